"""Integers of few bits, packed without gaps into int32 words: element *i* has the bits from ``i * bits`` on.

Source: ``pack_to_int32`` of compressed-tensors. Codes are unsigned; half their range is subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..layout.boxes import Box

if TYPE_CHECKING:
    import torch

__all__ = ["PackedIntegers", "packed_size"]

_WORD_BITS = 32


def packed_size(size: int, bits: int) -> int:
    """Words that hold ``size`` integers."""
    return -(-size * bits // _WORD_BITS)


@dataclass(frozen=True, slots=True)
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
        bits = start * self.bits % _WORD_BITS  # before the first element
        if self.bits == 8:
            return (octets[:, bits // 8 :][:, : stop - start] ^ 0x80).view(torch.int8)
        if self.bits == 4:
            octets = octets[:, bits // 8 : -(-(bits + 4 * (stop - start)) // 8)]
            return _nibbles(octets)[:, start % 2 :][:, : stop - start]
        return self._any_bits(octets, bits, stop - start)

    def _any_bits(self, octets: torch.Tensor, first_bit: int, count: int) -> torch.Tensor:
        """An element of at most 8 bits lies in at most two bytes."""
        import torch

        at = torch.arange(count, device=octets.device).mul_(self.bits).add_(first_bit)
        low = at >> 3
        high = (low + 1).clamp_(max=octets.shape[1] - 1)
        pairs = octets.index_select(1, high).to(torch.int16).bitwise_left_shift_(8)
        pairs.bitwise_or_(octets.index_select(1, low))
        pairs = pairs.to(torch.int32).bitwise_and_(0xFFFF).bitwise_right_shift_((at & 7).to(torch.int32))
        return pairs.bitwise_and_((1 << self.bits) - 1).sub_(1 << (self.bits - 1))


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """The two integers of each byte, low bits first, less 8."""
    import torch

    wide = octets.to(torch.int16, memory_format=torch.contiguous_format)
    wide = wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F)
    return wide.view(torch.int8).sub_(8)
