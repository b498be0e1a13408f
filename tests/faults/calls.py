"""Watching the file-system calls of a save from inside its process: counting, recording, killing, failing at one.

The functions of ``os`` are replaced for as long as a watch lasts; each calls the real one through. That no call
is missed is held by the crash images: the recorded operations, replayed, must give the very directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Call",
    "Hook",
    "fail_at",
    "fail_while",
    "kill_after",
    "kill_before",
    "note",
    "phase_of",
    "record_into",
    "recorded",
    "short_write_at",
    "slow_at",
    "stop_at",
    "stop_inside",
    "through",
    "watched",
]

_BY_PATH = ("mkdir", "rmdir", "unlink", "remove", "truncate", "chmod", "utime", "mknod", "mkfifo")
_BY_TWO_PATHS = ("rename", "replace", "link", "symlink")
_BY_FD = (
    *("write", "writev", "pwrite", "pwritev", "fsync", "fdatasync", "ftruncate", "posix_fallocate"),
    *("fchmod", "copy_file_range", "sendfile", "splice", "close"),
)
WRITES = ("write", "writev", "pwrite", "pwritev")
#: What a resume and a search for a directory do.
READING = ("stat", "listdir", "scandir", "preadv", "open for reading")

_WRITABLE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(slots=True)
class Call:
    """One call under the watched directory. ``path`` is relative to it; ``args`` may be changed by a hook."""

    number: int
    name: str
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: str = ""
    """New name of a rename."""
    handle: int = -1
    """Which opening of a file; file descriptors are used again."""

    @property
    def label(self) -> str:
        return f"{self.name} {self.path}" + (f" -> {self.target}" if self.target else "")


#: Gets a call and what performs it (``do()`` uses ``call.args``); returns what the caller gets.
Hook = Callable[[Call, Callable[[], Any]], Any]


@dataclass
class _Watch:
    root: str
    hook: Hook
    reading: bool
    counter: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    handles: Iterator[int] = field(default_factory=itertools.count)
    opened: dict[int, tuple[str, int, bool]] = field(default_factory=dict)  # fd -> path, handle, for writing

    def relative(self, path: Any, dir_fd: int | None) -> str | None:
        """A path below the root, as seen from there; None for others."""
        if isinstance(path, int):
            return self.opened[path][0] if path in self.opened else None
        text = os.fsdecode(path)
        if dir_fd is not None:
            if dir_fd not in self.opened:
                return None
            return os.path.normpath(os.path.join(self.opened[dir_fd][0], text))
        found = os.path.relpath(os.path.abspath(text), self.root)
        return None if found.startswith("..") else found

    def wrap(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def watched_call(*args: Any, **kwargs: Any) -> Any:
            call = self.describe(name, args, kwargs)
            if call is None:
                return own(*args, **kwargs)
            counted = name not in READING and not call.name.endswith(" for reading")
            if counted == self.reading or call.name == "close for reading":
                result = own(*args, **kwargs)
            else:
                call.number = next(self.counter)
                result = self.hook(call, lambda: own(*call.args, **call.kwargs))
            if name == "open":
                self.opened[result] = (call.path, call.handle, counted)
            elif name == "close":
                self.opened.pop(args[0], None)
            return result

        return watched_call

    def describe(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """None for calls that have nothing to do with the directory."""
        if name in _BY_FD:
            if args[0] not in self.opened:
                return None
            path, handle, writing = self.opened[args[0]]
            kind = "close for reading" if name == "close" and not writing else name
            return Call(0, kind, path, args, kwargs, handle=handle)
        if name in _BY_TWO_PATHS:
            path = self.relative(args[0], kwargs.get("src_dir_fd"))
            target = self.relative(args[1], kwargs.get("dst_dir_fd"))
            if path is None and target is None:
                return None
            return Call(0, name, path or "outside", args, kwargs, target or "outside")
        path = self.relative(args[0] if args else ".", kwargs.get("dir_fd"))
        if path is None:
            return None
        if name == "open":
            flags = args[1] if len(args) > 1 else kwargs["flags"]
            kind = "open" if flags & _WRITABLE else "open for reading"
            return Call(0, kind, path, args, kwargs, handle=next(self.handles))
        return Call(0, name, path, args, kwargs)


@contextlib.contextmanager
def watched(root: str | Path, hook: Hook, *, reading: bool = False) -> Iterator[None]:
    """Calls on anything below ``root`` go through ``hook``: those that change it, or those that only read."""
    watch = _Watch(os.path.realpath(root), hook, reading)
    names = ["open", "stat", "listdir", "scandir", "preadv", *_BY_PATH, *_BY_TWO_PATHS, *_BY_FD]
    own = {name: getattr(os, name) for name in names if hasattr(os, name)}
    for name, function in own.items():
        setattr(os, name, watch.wrap(name, function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(os, name, function)


# --------------------------------------------------------------------------------------------------- hooks


def through(calls: list[str]) -> Hook:
    """Only notes the labels."""

    def hook(call: Call, do: Callable[[], Any]) -> Any:
        calls.append(call.label)
        return do()

    return hook


def kill_before(number: int) -> Hook:
    def hook(call: Call, do: Callable[[], Any]) -> Any:
        if call.number == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return do()

    return hook


def kill_after(number: int) -> Hook:
    def hook(call: Call, do: Callable[[], Any]) -> Any:
        try:
            return do()
        finally:  # also of a call that fails, as making a directory that is there does
            if call.number == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def stop_at(number: int) -> Hook:
    """SIGSTOP before a call; the call is made after SIGCONT."""

    def hook(call: Call, do: Callable[[], Any]) -> Any:
        if call.number == number:
            os.kill(os.getpid(), signal.SIGSTOP)
        return do()

    return hook


def stop_inside(number: int) -> Hook:
    """SIGSTOP while a call goes on, which takes another second after SIGCONT."""

    def hook(call: Call, do: Callable[[], Any]) -> Any:
        if call.number == number:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
            time.sleep(1.3)
        return do()

    return hook


def slow_at(number: int, seconds: float) -> Hook:
    """A call that takes long in the kernel."""

    def hook(call: Call, do: Callable[[], Any]) -> Any:
        if call.number == number:
            time.sleep(seconds)
        return do()

    return hook


def fail_at(number: int, code: int = errno.EIO) -> Hook:
    """A call is not made and raises instead. A file that fails to close is closed, as the kernel has it."""

    def hook(call: Call, do: Callable[[], Any]) -> Any:
        if call.number == number:
            if call.name == "close":
                do()
            raise OSError(code, os.strerror(code))
        return do()

    return hook


def fail_while(failing: Callable[[Call], bool], code: int = errno.ENOENT) -> Hook:
    """Calls of which ``failing`` is true raise."""

    def hook(call: Call, do: Callable[[], Any]) -> Any:
        if failing(call):
            raise OSError(code, os.strerror(code), call.path)
        return do()

    return hook


def short_write_at(number: int) -> Hook:
    """One write takes one byte only, as write(2) may."""

    def hook(call: Call, do: Callable[[], Any]) -> Any:
        if call.number == number and call.name in WRITES:
            data = call.args[1]
            if call.name.endswith("v"):
                data = [memoryview(data[0]).cast("B")[:1]]
            else:
                data = memoryview(data).cast("B")[:1]
            call.args = (call.args[0], data, *call.args[2:])
        return do()

    return hook


def record_into(log: Path, rank: int) -> Hook:
    """Appends every call that succeeded, with its data, to a log of all ranks: one order for all of them."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    own_write, own_lock = os.write, threading.Lock()

    def hook(call: Call, do: Callable[[], Any]) -> Any:
        data, args = b"", call.args
        if call.name in ("write", "pwrite"):
            data = bytes(args[1])
        elif call.name in ("writev", "pwritev"):
            data = b"".join(bytes(piece) for piece in args[1])
        with own_lock:
            fcntl.flock(fd, fcntl.LOCK_EX)  # held over the call itself: the log's order is the disk's
            try:
                result = do()
                offset = args[2] if call.name in ("pwrite", "pwritev") else None
                if call.name in ("truncate", "ftruncate"):
                    offset = args[1]
                if call.name == "posix_fallocate":
                    offset = args[1] + args[2]
                creates = call.name == "open" and bool(args[1] & os.O_CREAT)
                empties = call.name == "open" and bool(args[1] & os.O_TRUNC)
                count = result if call.name in WRITES else 0
                entry = (
                    *(call.name, call.path, call.target, (rank, call.handle)),
                    *(data[:count], offset, creates, empties),
                )
                own_write(fd, pickle.dumps(entry))
                return result
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)

    return hook


def note(log: Path, what: str) -> None:
    """A mark in a log of :func:`record_into`."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.write(fd, pickle.dumps((what,)))
    os.close(fd)


def recorded(log: Path) -> list[tuple[Any, ...]]:
    """The entries of a log, and the marks, each a tuple of one."""
    entries = []
    with log.open("rb") as file:
        while file.peek(1):
            entries.append(pickle.load(file))
    return entries


def phase_of(label: str) -> str:
    """The part of a save that a call belongs to."""
    name, _, rest = label.partition(" ")
    path, _, target = rest.partition(" -> ")
    if "latest" in rest:
        return "hint"
    if target.startswith("step-") or (name == "fsync" and path == "."):
        return "publish"
    if target.startswith(".trash") or path.startswith(".trash"):
        return "retention"
    if path.endswith("manifest.json"):
        return "manifest"
    if name == "mkdir" or (name == "fsync" and "." not in os.path.basename(path)[1:]):
        return "directories"
    return "own files"
