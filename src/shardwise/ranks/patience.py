"""Slow system calls on files count as progress, and large writes are cut into short ones.

A rank that makes no progress for ``timeout_s`` counts as missing. During a system call Python can't tick, but the
kernel works: a slow disk or server does not make a rank dead. So the calls of a block of work go through
:func:`patiently`, and a thread that lives as long as the block ticks

* while a call goes on, for at most ``LIMIT`` times the timeout: a server that is gone for good keeps a call forever;
* when a call has ended since it last looked.

It does not tick for Python code between the calls, nor in a killed or stopped process, whose threads stop with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Container, Iterator
from typing import ParamSpec, TypeVar

from shardwise.errors import ShardwiseError

__all__ = [
    "LIMIT",
    "PIECE_BYTES",
    "Watch",
    "current_watch",
    "patiently",
    "remove_tree",
    "watched",
    "write_behind",
]

P = ParamSpec("P")
T = TypeVar("T")

#: One system call counts as progress for this many times the timeout.
LIMIT = 10
#: The kernel is told to write after this many bytes in the page cache. An fsync then finds at most two pieces.
PIECE_BYTES = 64 * 1024**2


#: Calls that one thread began plus calls that it ended, in one block of work. Odd during a call.
Count = list[int]


class Watch:
    """Ticks for the system calls of one block of work. Several threads may make them."""

    def __init__(self, tick: Callable[[], object], period_s: float, limit_s: float) -> None:
        self._tick = tick
        self._period_s = period_s
        self._limit_s = limit_s
        self._counts: list[Count] = []
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def count(self) -> Count:
        """A counter for the calls of one thread."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="shardwise-patience", daemon=True)
                # Python starts no thread while a process ends or when the system has none left: then nothing ticks.
                with contextlib.suppress(RuntimeError):
                    self._thread.start()
        count = [0]
        self._counts.append(count)
        return count

    def end(self) -> None:
        """No tick comes after this."""
        self._is_over.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()

    def _look(self) -> None:
        seen: dict[int, tuple[int, float]] = {}  # by thread, its count and since when it is that
        while not self._is_over.wait(self._period_s):
            now, is_moving = time.monotonic(), False
            for k, (number,) in enumerate(tuple(self._counts)):
                before, since = seen.get(k, (0, now))
                if number != before:
                    seen[k], is_moving = (number, now), True
                elif number % 2 and now - since < self._limit_s:
                    is_moving = True
            if is_moving:
                with contextlib.suppress(ShardwiseError):  # the group is gone: the next agreement says so
                    self._tick()


class _Here(threading.local):
    watch: Watch | None = None
    count: Count | None = None
    """The counter of this thread's calls; made at the first call."""


_here = _Here()


@contextlib.contextmanager
def watched(watch: Watch | None) -> Iterator[None]:
    """Count this thread's system calls in the block for ``watch``; None: for no watch."""
    before = _here.watch, _here.count
    _here.watch, _here.count = watch, None
    try:
        yield
    finally:
        _here.watch, _here.count = before


def current_watch() -> Watch | None:
    """The watch of this thread, to hand to a helper thread that does part of its work."""
    return _here.watch


def patiently(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``call(*args, **kwargs)``, one system call on a file, and count it as progress of this rank.

    Outside a block of work (:meth:`.ranks.Ranks.patience`) it only makes the call. Costs a quarter of a microsecond.
    """
    count = _here.count
    if count is None:
        if _here.watch is None:
            return call(*args, **kwargs)
        count = _here.count = _here.watch.count()
    count[0] += 1
    try:
        return call(*args, **kwargs)
    finally:
        count[0] += 1


def remove_tree(path: str, *, spared: Container[str] = ()) -> None:
    """Delete a directory tree, name by name, but for files at its top that are ``spared``. Files that can't be deleted stay. Links are not
    followed: where ``path`` is one, nothing is deleted.
    """
    if patiently(os.path.islink, path):
        return
    for folder, folders, names in os.walk(path, topdown=False):
        for name in names:
            if folder == path and name in spared:
                continue
            with contextlib.suppress(OSError):
                patiently(os.unlink, os.path.join(folder, name))
        for name in folders:
            inner = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                patiently(os.unlink if os.path.islink(inner) else os.rmdir, inner)
    with contextlib.suppress(OSError):
        patiently(os.rmdir, path)


def write_behind(fd: int) -> None:
    """Wait until the kernel has written the bytes that the call before started, then start writing the rest.

    Called after each ``PIECE_BYTES`` it leaves at most two pieces for fsync, and the disk writes beside the caller.
    Linux only (``sync_file_range``); elsewhere, and on file systems without it, nothing happens. Raises ``OSError``
    if bytes could not be written: a later fsync would not report it.
    """
    function = _sync_file_range()
    if function is not None and function(fd, 0, 0, _WAIT_BEFORE | _WRITE):
        code = ctypes.get_errno()
        if code not in _NOT_HERE:
            raise OSError(code, os.strerror(code))


_WAIT_BEFORE, _WRITE = 1, 2  # of linux/fs.h
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP, errno.EPERM)


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    found = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found
