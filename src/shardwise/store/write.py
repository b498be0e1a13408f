"""Makes files and directories that are on the disk when a call returns."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from types import TracebackType

import xxhash

from ..errors import CheckpointError
from ..format.manifest import BLOCK_BYTES, FileEntry
from ..limits import MAX_HEADER_BYTES
from ..ranks.patience import PIECE_BYTES, patiently, write_behind
from ..storage import is_url
from .in_store import ObjectWriter

__all__ = ["FileWriter", "fsync_directory", "make_directories", "write_file"]

_PIECE_BYTES = 16 * 1024**2


class FileWriter:
    """Writes a new file from front to back; leaving the block without an error syncs it to disk.

    Refuses to overwrite. Calls ``on_progress(n)`` after each piece. Bytes in the page cache are written to disk on the
    way, which leaves at most 128 MiB for fsync. Raises :class:`CheckpointError` naming the file (full disk, file size
    limit, I/O error, also one that only fsync reports).
    """

    def __init__(self, path: str, on_progress: Callable[[int], object] | None = None) -> None:
        self._path = path
        self._on_progress = on_progress
        self.nbytes = 0
        self._cached_bytes = 0  # in the page cache since the kernel was last told to write

    def __enter__(self) -> FileWriter:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = patiently(os.open, self._path, flags, 0o644)
        except OSError as error:
            raise CheckpointError(f"{self._path}: can't be created: {error.strerror}") from error
        return self

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        done = 0
        while done < view.nbytes:
            try:
                count = patiently(os.write, self._fd, view[done : done + _PIECE_BYTES])
                self._count_cached(count)
            except OSError as error:
                raise self._error(error) from error
            done += count
            self.nbytes += count
            if self._on_progress is not None:
                self._on_progress(count)

    def _count_cached(self, count: int) -> None:
        self._cached_bytes += count
        if self._cached_bytes >= PIECE_BYTES:
            self._cached_bytes = 0
            patiently(write_behind, self._fd)

    def _error(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path}: writing failed after {self.nbytes} bytes: {error.strerror}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                patiently(os.fsync, self._fd)
        except OSError as failure:
            raise CheckpointError(f"{self._path}: fsync failed: {failure.strerror}") from failure
        finally:
            self._close(has_failed=kind is not None)

    def _close(self, *, has_failed: bool) -> None:
        """Close the file. On some network file systems close() is the first call to report lost bytes."""
        try:
            patiently(os.close, self._fd)
        except OSError as failure:
            if not has_failed:
                raise CheckpointError(f"{self._path}: closing failed: {failure.strerror}") from failure


def write_file(path: str, content: bytes) -> FileEntry:
    """Write and sync a small file or object whole. Returns its manifest entry: the first 100 MB, then blocks of the rest."""
    with ObjectWriter(path) if is_url(path) else FileWriter(path) as file:
        file.write(content)
    head, view = min(len(content), MAX_HEADER_BYTES), memoryview(content)
    blocks = range(head, len(content), BLOCK_BYTES)
    return FileEntry(
        len(content),
        head,
        xxhash.xxh3_64_hexdigest(view[:head]),
        tuple([xxhash.xxh3_64_hexdigest(view[at : at + BLOCK_BYTES]) for at in blocks]),
    )


def make_directories(path: str) -> None:
    """Make a directory and its missing parents; every new name is durable on return, also one that a start which was killed, or could not
    sync, has made. Raises ``OSError``, :class:`CheckpointError`."""
    missing = []
    while not patiently(os.path.isdir, path):
        missing.append(path)
        path = os.path.dirname(path)
    _sync_name(path)
    for new in reversed(missing):
        # Another process was faster; or it is a file, and opening anything in it will fail.
        with contextlib.suppress(FileExistsError):
            patiently(os.mkdir, new)
        fsync_directory(os.path.dirname(new))


def _sync_name(path: str) -> None:
    """Make the name of a directory durable that was there. Those above it are: each was synced before the next was made.

    Not where the directory above can't be opened or synced, as that of a mount point; raises :class:`CheckpointError` if its disk fails.
    """
    try:
        fsync_directory(os.path.dirname(path))
    except CheckpointError as error:
        if getattr(error.__cause__, "errno", None) in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    try:
        fd = patiently(os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            patiently(os.fsync, fd)
        finally:
            patiently(os.close, fd)
    except OSError as error:
        raise CheckpointError(f"{path}: fsync failed: {error.strerror}") from error
