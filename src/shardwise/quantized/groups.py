"""Codes with a zero point and a scale for each group of consecutive inputs: the arithmetic that GPTQ and AWQ share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layout.boxes import Box
from .scales import spread

if TYPE_CHECKING:
    import torch

__all__ = ["scaled"]


def scaled(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, box: Box, size: int
) -> torch.Tensor:
    """``(codes − zeros) × scales``, in place: of a box of rows of outputs and columns of inputs.

    ``zeros`` and ``scales``: a column for each group of ``size`` inputs that the box touches. All in F32, where
    differences of codes are exact.
    """
    start, stop = box.start[1], box.stop[1]
    if start % size == 0 and stop % size == 0:
        groups = codes.unflatten(1, (-1, size))
        groups.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1))
        return codes
    block = (1, size)
    return codes.sub_(spread(zeros, box, block)).mul_(spread(scales, box, block))
