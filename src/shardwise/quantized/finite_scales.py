"""Scales checked on their own, before any of the codes that they scale is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..catalog.records import Coded
from ..tensors.boxes import Box
from .bitsandbytes import FourBit, Joined
from .gptq import Gptq
from .rules import Grouped, finite

if TYPE_CHECKING:
    import torch

__all__ = ["check_scales", "scales_in"]

#: Scales that are checked at a time.
_ELEMENTS = 512 * 1024
_ROLES = ("scales", "global", "nested", "book", "groups")


def scales_in(one: Coded, box: Box) -> Mapping[str, Box]:
    """The boxes of the parts, by role, that say how the codes of a box are scaled: scales, and the group of each input.

    Empty for a plain tensor that is quantized while it is read.
    """
    return {role: part for role, part in one.rule.boxes(box).items() if role in _ROLES}


def check_scales(one: Coded, box: Box, parts: Mapping[str, torch.Tensor]) -> None:
    """Raises :class:`IntegrityError`, which names the tensor, if a scale is NaN or infinite, or if a group doesn't exist.

    ``parts``: the elements of :func:`scales_in`.
    """
    if not box.numel:
        return
    name = one.tensor.name
    if "groups" in parts:
        assert isinstance(one.rule, Gptq | Grouped), one.rule
        one.rule.check_groups(parts["groups"], box)
    if isinstance(one.rule, FourBit | Joined):
        finite(name, one.rule.scales_of(box, parts))
        return
    for some in _pieces(parts["scales"]):
        scales = finite(name, some)
        if "global" in parts:
            finite(name, scales / parts["global"])


def _pieces(scales: torch.Tensor) -> Sequence[torch.Tensor]:
    """The scales in pieces along their first dim: in fp32, all of a large tensor would be fresh memory each time."""
    if scales.numel() <= _ELEMENTS:
        return (scales,)
    pieces: Sequence[torch.Tensor] = scales.split(max(1, _ELEMENTS * scales.shape[0] // scales.numel()))
    return pieces
