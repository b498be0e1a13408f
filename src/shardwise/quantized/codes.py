"""How the codes of a tensor lie in the stored one: which part of it a box needs, and its numbers in fp32.

What is stored one element each is here; :mod:`.packed` has integers packed into words, :mod:`.fp4` pairs of FP4 in bytes.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Protocol

from ..layout.boxes import Box
from ..objects import frozen

if TYPE_CHECKING:
    import torch

__all__ = ["Codes", "OneEach", "floats", "lowered"]


class Codes(Protocol):
    """An arrangement of codes."""

    @property
    def lift(self) -> int:
        """:meth:`floats` are the numbers divided by 2 to this power; 0 where they are the numbers."""

    def box(self, box: Box) -> Box:
        """The box of the stored codes that holds a box of the tensor."""

    def floats(self, box: Box, stored: torch.Tensor) -> torch.Tensor:
        """The numbers of ``box`` in fp32, in memory of their own, from the elements of :meth:`box`."""


@frozen
class OneEach:
    """One stored element for each element: int8, FP8. Implements :class:`Codes`."""

    lift = 0

    def box(self, box: Box) -> Box:
        return box

    def floats(self, box: Box, stored: torch.Tensor) -> torch.Tensor:
        return floats(stored)


#: Fewer numbers go through the table: each call of torch costs as much as some thousand of them.
_MANY = 4096
#: The sign of E4M3, and its exponent and mantissa, where fp16 has them; and how much larger the bias of the exponent is there.
_E4M3_IN_FP16, _E4M3_BIAS = -0x8000 | 0x3F80, 15 - 7


def floats(stored: torch.Tensor) -> torch.Tensor:
    """Stored numbers as fp32, exactly, in memory of their own. FP8 by shifts or through a table: ten and four times as fast as
    torch's cast on CPUs."""
    found, lift = lowered(stored)
    return found.mul_(2.0**lift) if lift else found


def lowered(stored: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Stored numbers as fp32, divided by 2 to a power, and the power. A caller that multiplies by scales saves an operation."""
    import torch

    if stored.is_cpu and stored.numel() >= _MANY:
        found = _shifted(stored)
        if found is not None:
            return found
    if stored.is_cpu and stored.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        indices = stored.view(torch.uint8).to(torch.int32).reshape(-1)
        return _fp8_numbers(stored.dtype).index_select(0, indices).view(stored.shape), 0
    return stored.to(torch.float32, copy=True), 0


def _shifted(stored: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """FP8 as fp32 by way of fp16, which has its bits, too, and holds subnormal numbers at full speed; None if there are NaN."""
    import torch

    if stored.dtype == torch.float8_e5m2:  # the upper byte of fp16
        wide = stored.view(torch.int8).to(torch.int16)
        return wide.bitwise_left_shift_(8).view(torch.float16).to(torch.float32), 0
    if stored.dtype != torch.float8_e4m3fn:
        return None
    if int((stored.view(torch.uint8) & 0x7F).amax()) == 0x7F:  # NaN of either sign
        return None
    bits = stored.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_E4M3_IN_FP16)
    return bits.view(torch.float16).to(torch.float32), _E4M3_BIAS


@cache
def _fp8_numbers(dtype: torch.dtype) -> torch.Tensor:
    """The numbers that the 256 bytes stand for."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
