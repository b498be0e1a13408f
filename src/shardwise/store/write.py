"""Writing the files of a checkpoint: straight from memory, checksummed on the way, synced to disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch
import xxhash

from ..catalog.manifest import BLOCK_BYTES, FileEntry
from ..catalog.slices import Slice, header_bytes
from ..errors import CheckpointError

__all__ = [
    "FileWriter",
    "fsync_directory",
    "make_directories",
    "tensor_bytes",
    "write_file",
    "write_slices",
]

_PIECE_BYTES = 16 * 1024**2


class FileWriter:
    """A new file that is written from front to back; leaving the block without an error syncs it to disk.

    Refuses to overwrite. ``on_progress(n)`` is called after each piece. Raises :class:`CheckpointError`
    naming the file (full disk, file size limit, I/O error, also one that only fsync reports).
    """

    def __init__(self, path: str, on_progress: Callable[[int], object] | None = None) -> None:
        self._path = path
        self._on_progress = on_progress
        self.nbytes = 0

    def __enter__(self) -> FileWriter:
        try:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointError(f"{self._path}: can't be created: {error.strerror}") from error
        return self

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        done = 0
        while done < view.nbytes:
            try:
                count = os.write(self._fd, view[done : done + _PIECE_BYTES])
            except OSError as error:
                raise CheckpointError(
                    f"{self._path}: writing failed after {self.nbytes} bytes: {error.strerror}"
                ) from error
            done += count
            self.nbytes += count
            if self._on_progress is not None:
                self._on_progress(count)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._fd)
        except OSError as failure:
            raise CheckpointError(f"{self._path}: fsync failed: {failure.strerror}") from failure
        finally:
            self._close(has_failed=kind is not None)

    def _close(self, *, has_failed: bool) -> None:
        """On some network file systems close() is the first to tell that bytes did not arrive."""
        try:
            os.close(self._fd)
        except OSError as failure:
            if not has_failed:
                raise CheckpointError(f"{self._path}: closing failed: {failure.strerror}") from failure


def write_file(path: str, content: bytes) -> FileEntry:
    """Write and sync a small file whole. Returns its manifest entry."""
    with FileWriter(path) as file:
        file.write(content)
    return FileEntry(len(content), len(content), xxhash.xxh3_64_hexdigest(content))


def write_slices(
    path: str,
    slices: Sequence[Slice],
    piece_of: Callable[[Slice], torch.Tensor | Iterator[torch.Tensor]],
    on_progress: Callable[[int], object] | None = None,
) -> FileEntry:
    """Write one slice file in safetensors format and sync it. Returns its manifest entry.

    ``piece_of`` gives the live tensor (any device, any strides) that holds exactly a slice's box, or the parts of it
    one after another. Memory: nothing for contiguous CPU tensors, else 16 MiB of staging.
    """
    header = header_bytes(slices)
    blocks = _Blocks()
    with FileWriter(path, on_progress) as file:
        file.write(header)
        for one in slices:
            found = piece_of(one)
            for piece in (found,) if isinstance(found, torch.Tensor) else found:
                for view in tensor_bytes(piece):
                    file.write(view)
                    blocks.add(view)
    return FileEntry(file.nbytes, len(header), xxhash.xxh3_64_hexdigest(header), blocks.finish())


class _Blocks:
    """xxh3 of each 16 MiB block of a byte stream."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._hash = xxhash.xxh3_64()
        self._room = BLOCK_BYTES

    def add(self, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            piece = view[done : done + self._room]
            self._hash.update(piece)
            done += piece.nbytes
            self._room -= piece.nbytes
            if self._room == 0:
                self._close()

    def _close(self) -> None:
        self._digests.append(self._hash.hexdigest())
        self._hash = xxhash.xxh3_64()
        self._room = BLOCK_BYTES

    def finish(self) -> tuple[str, ...]:
        if self._room < BLOCK_BYTES:
            self._close()
        return tuple(self._digests)


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's elements in row-major order as raw bytes: in place if it lies so, else in pieces of ≤ 16 MiB."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield tensor.reshape(-1).view(torch.uint8).numpy().data
        return
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= _PIECE_BYTES or tensor.dim() == 0:
        yield tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        return
    rows = max(1, _PIECE_BYTES * tensor.shape[0] // nbytes)
    for begin in range(0, tensor.shape[0], rows):
        piece = tensor[begin : begin + rows]
        yield from tensor_bytes(piece[0] if piece.shape[0] == 1 else piece.contiguous().cpu())


def make_directories(path: str) -> None:
    """A directory and what is missing above it; every new name is durable on return. Raises ``OSError``."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for new in reversed(missing):
        # Another process was faster; or it is a file, which whoever opens something in it is told.
        with contextlib.suppress(FileExistsError):
            os.mkdir(new)
        fsync_directory(os.path.dirname(new))


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"{path}: fsync failed: {error.strerror}") from error
