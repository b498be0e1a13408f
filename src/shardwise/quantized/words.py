"""Codes of a few bits, packed into bytes and words: unpacked without loops over elements, and which words a box needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["covering", "fields", "looked_up", "transposed_halves"]


def covering(start: int, stop: int, unit: int) -> tuple[int, int]:
    """The units (bytes, words, groups) that hold the elements from ``start`` to ``stop``; none for no elements."""
    first = start // unit
    return first, max(first, -(-stop // unit)) if stop > start else first


def looked_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """What each byte stands for: its row of a table of 256 rows, put one after another along the last dim.

    A row is taken as one number of its size, which is several times faster than an index of rows.
    """
    import torch

    assert codes.dtype == torch.uint8
    row = {2: torch.int16, 4: torch.int32, 8: torch.int64}[table[0].nbytes]
    found = table.view(row).view(256).index_select(0, codes.reshape(-1).to(torch.int32))
    return found.view(table.dtype).view(*codes.shape[:-1], codes.shape[-1] * table.shape[1])


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The unsigned fields of 2, 4 or 8 bits in the int32 words of each row, lowest bits first, in F32.

    Each byte is widened to as many bytes as it has fields, and copies of it are shifted to put one field into each.
    """
    import torch

    found = words.clone(
        memory_format=torch.contiguous_format
    )  # contiguous() keeps odd strides of dims of one
    found = found.view(torch.uint8)
    per_byte = 8 // bits
    if per_byte > 1:
        wide = found.to({2: torch.int16, 4: torch.int32}[per_byte])
        spread = wide.clone()
        for k in range(1, per_byte):
            spread |= wide * (1 << (8 - bits) * k)  # torch has no fast shift of 16 bits
        spread &= sum((1 << bits) - 1 << 8 * k for k in range(per_byte))
        found = spread.view(torch.uint8)
    return found.to(torch.float32)


def transposed_halves(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix of words, or of bytes in whole words, as int16, transposed: each column of 16 bits becomes a row. Memory: as much."""
    import torch

    if matrix.stride(-1) != 1 or (matrix.storage_offset() | matrix.stride(0)) * matrix.itemsize % 2:
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(torch.int16).t().contiguous()
