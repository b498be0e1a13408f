"""Positioned reads from local files straight into memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable
from types import TracebackType

from ..errors import IntegrityError, SourceError
from ..ranks.patience import patiently
from .page_cache import Chosen, Pages

__all__ = ["FileReader"]

# Linux returns at most 0x7ffff000 bytes per call; smaller pieces show progress.
_PIECE_BYTES = 64 * 1024**2
# A step of a large run has thousands of files; a process may often open only 1,024.
_MOST_OPEN = 64


class FileReader:
    """Reads byte ranges into given memory, and keeps recently opened files open. Not thread-safe; rank-local.

    ``bytes_read`` counts requested bytes. Calls ``on_progress(n)`` after each piece. With ``page_cache="release"`` it
    gives the kernel's pages back after reading.
    """

    def __init__(
        self, on_progress: Callable[[int], None] | None = None, *, page_cache: Chosen = "keep"
    ) -> None:
        self.bytes_read = 0
        self.page_cache = page_cache
        self._pages = Pages() if page_cache == "release" else None
        self._fds: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._on_progress = on_progress

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
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

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes at ``offset_bytes``. Raises :class:`SourceError`, or :class:`IntegrityError` if
        the file is too short."""
        fd = self._held.get(path, self._fds.get(path))
        if fd is None:
            fd = self._open(path)
        done, length = 0, view.nbytes
        while done < length:
            piece = view[done : done + _PIECE_BYTES]
            try:
                count = patiently(os.preadv, fd, [piece], offset_bytes + done)
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
                self._pages.read(fd, offset_bytes + done, offset_bytes + done + count)
            done += count
            self.bytes_read += count
            if self._on_progress is not None:
                self._on_progress(count)

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
