"""Small reads anywhere in a file or an object: the directory of an archive, a description, a short value."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Lock
from types import TracebackType
from typing import Protocol, Self, TypeVar

from ..errors import FormatError, SourceError
from ..ranks.patience import patiently
from ..storage import is_url, read_range, stat_of
from .records import StoredFile

__all__ = ["OpenFile", "each", "open_file"]

#: Of an object, so many bytes come at a time, and so many such blocks are kept: parts of one archive lie close together.
_BLOCK_BYTES, _BLOCKS = 16 * 1024, 64
#: Items whose places are looked up in a store at a time.
_AT_ONCE = 16
T = TypeVar("T")
R = TypeVar("R")


class OpenFile(Protocol):
    """A file or an object that is open for small reads; leaving a block of it closes it."""

    stored: StoredFile
    """Its path, its size, and the version that is read."""

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes from ``at`` on; fewer at the end. Raises :class:`SourceError`."""

    def close(self) -> None:
        """Close it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_file(path: str, known: StoredFile | None = None) -> OpenFile:
    """Open a regular file or an object. ``known``: the object when it was first looked at, of which no other version is read.

    Never blocks on a pipe. Raises :class:`SourceError` (from ``FileNotFoundError`` if there is none), :class:`FormatError`.
    """
    return _Object(path, known) if is_url(path) else _Local(path)


def each(path: str, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """``work`` of every item; several at a time if the bytes come from a store, where each request takes milliseconds."""
    if not is_url(path):
        return list(map(work, items))
    with ThreadPoolExecutor(_AT_ONCE, "shardwise-looks") as pool:
        coming = [
            pool.submit(copy_context().run, work, item) for item in items
        ]  # with what was listed already
        try:
            return [one.result() for one in coming]
        finally:
            pool.shutdown(cancel_futures=True)


class _Closing:
    """A context manager that closes."""

    def close(self) -> None:
        """Give back what was taken."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Local(_Closing):
    """As :class:`OpenFile`."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:  # ValueError: NUL in the caller's path
            raise SourceError(f"can't be opened: {getattr(error, 'strerror', error)}", path=path) from error
        status = os.fstat(self._fd)
        self.stored = StoredFile(path, status.st_size)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise FormatError("can't be read: not a regular file", path=path)

    def read(self, at: int, nbytes: int) -> bytes:
        try:
            return patiently(os.pread, self._fd, nbytes, at)
        except OSError as error:
            raise SourceError(f"can't be read: {error.strerror}", path=self.stored.path) from error

    def close(self) -> None:
        os.close(self._fd)


class _Object(_Closing):
    """As :class:`OpenFile`. Thread-safe. Memory: a MiB."""

    def __init__(self, url: str, known: StoredFile | None) -> None:
        if known is None:
            found = stat_of(url)
            if found is None:
                raise SourceError("can't be opened: no such object", path=url) from FileNotFoundError(url)
            known = StoredFile(url, found.nbytes, found.version)
        self.stored = known
        self._blocks: dict[int, bytes] = {}
        self._lock = Lock()

    def read(self, at: int, nbytes: int) -> bytes:
        stop = min(at + nbytes, self.stored.nbytes)
        if stop <= at:
            return b""
        if stop - at > _BLOCK_BYTES:
            return self._fetch(at, stop)
        first = at // _BLOCK_BYTES
        content = b"".join(self._block(k) for k in range(first, (stop - 1) // _BLOCK_BYTES + 1))
        return content[at - first * _BLOCK_BYTES : stop - first * _BLOCK_BYTES]

    def _block(self, k: int) -> bytes:
        with self._lock:
            found = self._blocks.pop(k, None)
        if found is None:
            found = self._fetch(k * _BLOCK_BYTES, min((k + 1) * _BLOCK_BYTES, self.stored.nbytes))
        with self._lock:
            self._blocks[k] = found  # the last that would be dropped
            while len(self._blocks) > _BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))
        return found

    def _fetch(self, start: int, stop: int) -> bytes:
        return read_range(self.stored.path, start, stop, version=self.stored.version)

    def close(self) -> None:
        self._blocks.clear()
