"""Integers of few bits, packed without gaps into int32 words: element *i* has the bits from ``i * bits`` on.

Source: ``pack_to_int32`` of compressed-tensors. Codes are unsigned; half their range is subtracted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layout.boxes import Box
from ..objects import frozen

if TYPE_CHECKING:
    import torch

__all__ = ["PackedIntegers", "packed_size"]

_WORD_BITS = 32


def packed_size(size: int, bits: int) -> int:
    """Words that hold ``size`` integers."""
    return -(-size * bits // _WORD_BITS)


@frozen
class PackedIntegers:
    """Integers packed along one of two dims. Implements :class:`.Codes`."""

    bits: int
    dim: int = 1
    """Along which they are packed."""
    lift = 0

    def box(self, box: Box) -> Box:
        start, stop = list(box.start), list(box.stop)
        start[self.dim] = box.start[self.dim] * self.bits // _WORD_BITS
        stop[self.dim] = packed_size(box.stop[self.dim], self.bits)
        return Box(tuple(start), tuple(stop))

    def floats(self, box: Box, stored: torch.Tensor) -> torch.Tensor:
        import torch

        words = stored if self.dim == 1 else stored.t()
        if words.stride(1) != 1:
            words = words.clone(memory_format=torch.contiguous_format)
        found = self._integers(words, box.start[self.dim], box.stop[self.dim]).to(torch.float32)
        return found if self.dim == 1 else found.t()

    def _integers(self, words: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of each row, whose first word holds the first."""
        import torch

        octets = words.view(torch.uint8)  # words are little-endian, as all that is stored
        first = start * self.bits // _WORD_BITS * 4  # byte of the row
        if self.bits == 8:
            return (octets[:, start - first : stop - first] ^ 0x80).view(torch.int8)
        if self.bits == 4:
            octets = octets[:, start // 2 - first : -(-stop // 2) - first]
            return _nibbles(octets)[:, start % 2 :][:, : stop - start]
        eights = _bytes_of_eights(octets, first, start, stop, self.bits)
        return self._of_eights(eights)[:, start % 8 :][:, : stop - start]

    def _of_eights(self, octets: torch.Tensor) -> torch.Tensor:
        """Eight integers lie in as many bytes as they have bits, which together are one large integer."""
        import torch

        wide = torch.int32 if self.bits < 4 else torch.int64
        octets = octets.unflatten(1, (-1, self.bits))
        eights = octets[..., 0].to(wide)
        for k in range(1, self.bits):
            eights |= octets[..., k].to(wide) << 8 * k
        shifts = torch.arange(0, 8 * self.bits, self.bits, dtype=wide, device=octets.device)
        integers = eights.unsqueeze(-1) >> shifts
        return integers.bitwise_and_((1 << self.bits) - 1).sub_(1 << (self.bits - 1)).flatten(1)


def _bytes_of_eights(octets: torch.Tensor, first: int, start: int, stop: int, bits: int) -> torch.Tensor:
    """The bytes of all eights that elements ``start`` to ``stop`` are of; zeros for those that a box does not bring.

    ``first``: the place of the first byte in its row.
    """
    import torch

    before = first - start // 8 * bits
    after = -(-stop // 8) * bits - (first + octets.shape[1])
    return torch.nn.functional.pad(octets, (before, after))  # less than zero: bytes are left out


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """The two integers of each byte, low bits first, less 8."""
    import torch

    wide = octets.to(torch.int16, memory_format=torch.contiguous_format)
    wide = wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F)
    return wide.view(torch.int8).sub_(8)
