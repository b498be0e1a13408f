"""Writes large files past the page cache: it fills and hashes one buffer while another goes to the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import threading
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from ..ranks.patience import current_watch, patiently, watched
from .write import FileWriter

__all__ = ["DirectWriter"]

BUFFER_BYTES = 8 * 1024**2
#: Alignment of offsets, lengths and memory: a multiple of every disk's sector size.
_ALIGNMENT = 4096
#: Errors of a write past the page cache, on file systems that accept the flag itself.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
#: Linux only.
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectWriter(FileWriter):
    """A :class:`FileWriter` with a thread that writes while the caller makes the next bytes.

    Writes past the page cache (``O_DIRECT``) if the file system can, otherwise through it. Past the cache the kernel
    does not copy each byte, which costs more than hashing it, and has nothing left to flush at the end. A later call,
    or leaving the block, raises the error of a write. Memory: two buffers of 8 MiB.
    """

    def __enter__(self) -> DirectWriter:
        self._buffer = _buffer()
        self._used = 0
        self._failure: BaseException | None = None
        self._free: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        self._free.put(_buffer())
        self._full: queue.SimpleQueue[tuple[NDArray[np.uint8], int] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        super().__enter__()
        self._watch = current_watch()  # the thread does this thread's work
        self._has_thread = True
        try:
            self._is_direct = _switch(self._fd, on=True)
            # A daemon: the caller waits for it, and after an interrupt it must not keep the process alive.
            threading.Thread(target=self._write_buffers, name="shardwise-write", daemon=True).start()
        except RuntimeError:  # Python starts no thread while a process ends or when the system has none left
            self._has_thread = False
        except BaseException:
            self._full.put(None)
            self._close(has_failed=True)
            raise
        return self

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        source = np.frombuffer(data, dtype=np.uint8)
        done = 0
        while done < len(source):
            count = min(len(source) - done, BUFFER_BYTES - self._used)
            self._buffer[self._used : self._used + count] = source[done : done + count]
            self._used += count
            done += count
            if self._used == BUFFER_BYTES:
                self._hand_over()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._failure = self._failure or error  # the waiting buffers are not needed any more
        try:
            if self._used and self._failure is None:
                self._hand_over()
        finally:
            self._full.put(None)
            if self._has_thread:
                self._ended.wait()  # not join(): if Ctrl-C interrupts it, Python 3.11 counts the thread as ended
            if kind is None and self._failure is not None:
                self._close(has_failed=True)
                raise self._failure
            super().__exit__(kind, error, trace)

    def _hand_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._has_thread:
            self._full.put((self._buffer, self._used))
            self._buffer = self._free.get()
        else:
            self._write_out(self._buffer.data[: self._used])
        if self._on_progress is not None:
            self._on_progress(self._used)
        self._used = 0

    # -- the thread --------------------------------------------------------------------------------------

    def _write_buffers(self) -> None:
        with watched(self._watch):
            while (found := self._full.get()) is not None:
                buffer, used = found
                try:
                    if self._failure is None:
                        self._write_out(buffer.data[:used])
                except BaseException as error:
                    self._failure = error
                self._free.put(buffer)
        self._ended.set()

    def _write_out(self, view: memoryview) -> None:
        aligned = view.nbytes // _ALIGNMENT * _ALIGNMENT if self._is_direct else view.nbytes
        done = 0
        while done < view.nbytes:
            if (
                self._is_direct and done == aligned
            ):  # the end of the file, or an unaligned rest of a short write
                self._is_direct = _switch(self._fd, on=False)
                aligned = view.nbytes
            try:
                count = patiently(os.write, self._fd, view[done:aligned])
                if not self._is_direct:
                    self._count_cached(count)
            except OSError as error:
                if self._is_direct and error.errno in _REFUSALS:  # needs a larger alignment, or refuses all
                    aligned = done
                    continue
                raise self._error(error) from error
            done += count
            self.nbytes += count
            if self._is_direct and done % _ALIGNMENT:
                aligned = done


def _buffer() -> NDArray[np.uint8]:
    """Aligned to pages."""
    return np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), dtype=np.uint8)


def _switch(fd: int, *, on: bool) -> bool:
    """Make writes go past the page cache, or through it. Returns whether they go past it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
        return on and _O_DIRECT != 0
    return False
