"""Positioned reads from local files straight into memory."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from ..errors import IntegrityError, SourceError
from ..planning.buckets import Span
from ..planning.records import Reads, Transfer
from ..ranks.patience import patiently
from .ahead import LookAhead, Quicker
from .arriving import arrival
from .page_cache import Chosen, Pages
from .threads import MOST_ONTO_DEVICE, Threads, threads_of_this_rank

__all__ = ["FileReader"]

# Linux returns at most 0x7ffff000 bytes per call; smaller pieces show progress.
_PIECE_BYTES = 64 * 1024**2
# Between two pieces the next ranges are asked for.
_PIECE_FROM_STORAGE_BYTES = 4 * 1024**2
# A step of a large run has thousands of files; a process may often open only 1,024.
_MOST_OPEN = 64
# Linux: advice, and reads that fail instead of waiting for storage.
_CAN_ASK = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")


class FileReader:
    """Reads byte ranges into given memory, and keeps recently opened files open. Not thread-safe; rank-local.

    ``bytes_read`` counts requested bytes. Calls ``on_progress(n)`` after each piece. With ``page_cache="release"`` it
    gives the kernel's pages back after reading. ``reads`` is as :attr:`IOOptions.reads`, for the ranges in a block of
    :meth:`expecting`; others are plain reads. ``threads`` share each large read; None: as :func:`threads_of_this_rank`.
    """

    def __init__(
        self,
        on_progress: Callable[[int], None] | None = None,
        *,
        page_cache: Chosen = "keep",
        reads: Reads = "plain",
        threads: int | None = 1,
    ) -> None:
        self.bytes_read = 0
        self.page_cache = page_cache
        self._reads = reads if _CAN_ASK else "plain"
        self._reason = "asked for" if _CAN_ASK or reads == "plain" else "this system can't be asked"
        self._from_storage = self._reads == "ahead"
        self._ahead: LookAhead | None = None
        self._quicker = Quicker()
        self._pages = Pages() if page_cache == "release" else None
        self._asked_threads = threads
        self._threads = Threads(threads_of_this_rank() if threads is None else threads)
        self._opening = threading.Lock()
        self._fds: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._on_progress = on_progress
        self._arrive = arrival()
        self._arrived_bytes = 0

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file, and end the threads."""
        self._threads.close()
        for opened in (self._fds, self._held):
            while opened:
                self._close(opened.popitem()[1])

    def hold(self, paths: Iterable[str]) -> None:
        """Open these files now and keep them open: they stay readable after deletion.

        Opens at most half as many as the process may have open; the rest are opened when they are read. Raises as
        :meth:`read_into` does.
        """
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        for path in paths:
            if len(self._held) < most and path not in self._held:
                self._held[path] = self._open_new(path)

    @contextmanager
    def expecting(self, spans: Iterable[Span]) -> Iterator[None]:
        """The reads in this block are of these spans, in this order. May be nested.

        From the first byte on that is not in the page cache, the kernel is asked for the next spans while one is read.
        ``spans`` is not looked at before that.
        """
        before = self._ahead
        self._ahead = None if self._reads == "plain" else LookAhead(spans, self._ask)
        try:
            yield
        finally:
            self._ahead = before

    def elements(self, transfer: Transfer) -> None:
        """None: they are read."""

    def describe_reads(self) -> str:
        """How this reader reads, why, and by how many threads if several shared a read."""
        threads = f"; by {self._threads.count} threads" if self._threads.shared_bytes else ""
        arrived = f"; {self._arrived_bytes} bytes from other hosts" if self._arrived_bytes else ""
        return self._way() + threads + arrived

    def _way(self) -> str:
        if self._reads == "plain":
            return f"plain: {self._reason}"
        if self._reads == "ahead":
            return "ahead: asked for"
        if not self._from_storage:
            has_read = self.bytes_read > self._arrived_bytes
            return "plain: all bytes were in the page cache" if has_read else "plain: nothing was read"
        return f"{self._quicker.kind}: {self._reason}{self._quicker.describe()}"

    def descriptor(self, path: str) -> int:
        """Another descriptor of the file that this reader has open at ``path``, also where a new file has taken the name since.

        The caller closes it. Several threads may call it. Raises as :meth:`read_into` does.
        """
        with self._opening:
            return os.dup(self._fd(path))

    def lanes(self, *, onto_device: bool = False) -> int:
        """In how many lanes cached bytes may be read beside this reader; 0 unless it may choose how to read, and keeps pages."""
        if self._reads != "auto" or self._from_storage or self._pages is not None or self._arrive is not None:
            return 0
        if onto_device and self._asked_threads is None:
            return threads_of_this_rank(MOST_ONTO_DEVICE)
        return self._threads.count

    def was_in_cache(self, nbytes: int, *, lanes: int) -> None:
        """Count bytes that so many lanes have read."""
        self._threads.shared_bytes += nbytes if lanes > 1 else 0
        self._count(nbytes)

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes at ``offset_bytes``. Raises :class:`SourceError`, or :class:`IntegrityError` if
        the file is too short."""
        done, length = 0, view.nbytes
        if self._arrive is not None and self._arrive(path, offset_bytes, view):
            self._arrived_bytes += length
            self._count(length)
            return
        while done < length:
            at = offset_bytes + done
            try:
                fd, count = self._read(path, at, view[done : done + _PIECE_BYTES])
            except OSError as error:
                raise SourceError(
                    f"reading {length} bytes at {offset_bytes} failed: {error.strerror}", path=path
                ) from error
            if count == 0:
                raise IntegrityError(
                    f"ends at byte {offset_bytes + done}, but {length} bytes were expected at {offset_bytes}: truncated",
                    path=path,
                )
            if self._pages is not None:
                self._pages.read(fd, at, at + count)
            done += count
            self._count(count)

    def _count(self, nbytes: int) -> None:
        self.bytes_read += nbytes
        if self._on_progress is not None:
            self._on_progress(nbytes)

    def _read(self, path: str, at: int, piece: memoryview) -> tuple[int, int]:
        """Read a piece or its beginning. Returns the file that it was read from, and the number of bytes."""
        preadv = self._threads.preadv
        if self._ahead is None:
            fd = self._fd(path)
            return fd, patiently(preadv, fd, piece, at)
        if not self._from_storage:
            fd = self._fd(path)
            try:
                count = patiently(preadv, fd, piece, at, os.RWF_NOWAIT)
            except BlockingIOError:
                self._reason = (
                    f"some bytes weren't in the page cache, starting at byte {self.bytes_read} of the load"
                )
            except OSError:  # not supported here, or a failure that comes again below
                self._reason = "the file system does not say what is in the page cache"
            else:
                if count:
                    return fd, count
                return fd, patiently(preadv, fd, piece, at)
            self._from_storage = True
        started = time.perf_counter()
        if self._reads == "ahead" or self._quicker.kind == "ahead":
            self._ahead.reading(path, at)
        fd = self._fd(path)  # not before: asking opens files, and so may close this one
        count = patiently(preadv, fd, piece[:_PIECE_FROM_STORAGE_BYTES], at)
        if self._reads == "auto":
            self._quicker.took(count, time.perf_counter() - started)
        return fd, count

    def _ask(self, path: str, start: int, stop: int) -> None:
        with suppress(OSError, IntegrityError, SourceError):  # the read says what is wrong
            patiently(os.posix_fadvise, self._fd(path), start, stop - start, os.POSIX_FADV_WILLNEED)

    def _fd(self, path: str) -> int:
        fd = self._held.get(path, self._fds.get(path))
        return self._open(path) if fd is None else fd

    def _open(self, path: str) -> int:
        fd = self._open_new(path)
        while len(self._fds) >= _MOST_OPEN:  # the oldest is the least likely to be read again
            self._close(self._fds.pop(next(iter(self._fds))))
        self._fds[path] = fd
        return fd

    def _open_new(self, path: str) -> int:
        fd = _open(path)
        if self._pages is not None:
            self._pages.open(fd)
        return fd

    def _close(self, fd: int) -> None:
        if self._pages is not None:
            self._pages.close(fd)
        patiently(os.close, fd)


def _open(path: str) -> int:
    try:
        return patiently(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise IntegrityError("lost: no such file", path=path) from error
    except OSError as error:
        raise SourceError(f"can't be opened: {error.strerror}", path=path) from error
