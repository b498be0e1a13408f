"""FP4 (E2M1): a sign, two bits of exponent, one of mantissa; two in each byte, low bits first.

Their four bits, put at the same places of an fp16 number, make one that is smaller by 2**14: exponents of E2M1 start at 1, those
of fp16 at 15. Zeros and subnormals come out right, too. A shift and a mask for many numbers at once cost less than a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layout.boxes import Box
from ..objects import frozen

if TYPE_CHECKING:
    import torch

__all__ = ["FP4_LIFT", "Fp4Pairs", "numbers_of_halves"]

#: Numbers come divided by 2 to this power.
FP4_LIFT = 14
#: Sign, the two lowest bits of the exponent, the highest of the mantissa, of fp16 as int16.
_MASK = 0x8E00 - 0x10000


@frozen
class Fp4Pairs:
    """Pairs along the last of two dims. Implements :class:`.Codes`."""

    lift = FP4_LIFT

    def box(self, box: Box) -> Box:
        (row, column), (last_row, last_column) = box.start, box.stop
        return Box((row, column // 2), (last_row, -(-last_column // 2)))

    def floats(self, box: Box, stored: torch.Tensor) -> torch.Tensor:
        import torch

        octets = stored.to(torch.int32, memory_format=torch.contiguous_format)
        # the highest bits of each half of 32 become its number's
        halves = (octets << 24).bitwise_or_(octets.bitwise_left_shift_(12)).view(torch.int16)
        numbers = halves.bitwise_right_shift_(3).bitwise_and_(_MASK).view(torch.float16)
        first = box.start[1] % 2
        return numbers[:, first : first + box.sizes[1]].to(torch.float32)


def numbers_of_halves(halves: torch.Tensor) -> torch.Tensor:
    """The four numbers of each int16, in rows one after another, in fp16."""
    import torch

    found = torch.empty((halves.shape[0], 4, halves.shape[1]), dtype=torch.int16, device=halves.device)
    for k in range(4):
        torch.bitwise_left_shift(halves, 12 - 4 * k, out=found[:, k])
    return found.bitwise_right_shift_(3).bitwise_and_(_MASK).view(torch.float16).flatten(0, 1)
