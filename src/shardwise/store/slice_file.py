"""Writes one slice file: straight from the tensors, checksummed on the way, synced to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import xxhash

from ..format.manifest import BLOCK_BYTES, FileEntry
from ..format.slices import Slice, header_bytes
from ..storage import is_url
from .direct import DirectWriter
from .in_store import ObjectWriter
from .write import FileWriter

__all__ = ["tensor_bytes", "write_slices"]

_PIECE_BYTES = 16 * 1024**2
#: Files of this size or more get a thread of their own.
LARGE_BYTES = 16 * 1024**2


def write_slices(
    path: str,
    slices: Sequence[Slice],
    contents: Iterable[Iterable[torch.Tensor]],
    on_progress: Callable[[int], object] | None = None,
) -> FileEntry:
    """Write one slice file, or object of a store, in safetensors format, and sync it. Returns its manifest entry.

    ``contents``: for each slice, in order, tensors on the CPU (any strides) that hold its box, one part after another. They
    are taken when they are written. Memory: 16 MiB for a large file, and 16 MiB for tensors that are not contiguous.
    """
    header = header_bytes(slices)
    blocks = _Blocks()
    nbytes = sum(one.nbytes for one in slices)
    writer: FileWriter | ObjectWriter
    if is_url(path):
        writer = ObjectWriter(path, on_progress, expected_bytes=len(header) + nbytes)
    else:
        writer = (DirectWriter if nbytes >= LARGE_BYTES else FileWriter)(path, on_progress)
    with writer as file:
        file.write(header)
        for parts in contents:
            for part in parts:
                for view in tensor_bytes(part):
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
    """A tensor's elements in row-major order as raw bytes: a view if it is contiguous, else copies of ≤ 16 MiB."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = tensor.as_strided((tensor.numel(),), (1,))  # one element counts as contiguous with any stride
        yield flat.view(torch.uint8).numpy().data
        return
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= _PIECE_BYTES or tensor.dim() == 0:
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return
    rows = max(1, _PIECE_BYTES * tensor.shape[0] // nbytes)
    for begin in range(0, tensor.shape[0], rows):
        piece = tensor[begin : begin + rows]
        yield from tensor_bytes(piece[0] if piece.shape[0] == 1 else piece.contiguous())
