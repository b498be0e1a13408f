"""One code an element, times a scale: FP8 and INT8 with a scale per tensor, per channel or per block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..dtypes import torch_dtype
from ..layout.boxes import Box
from ..objects import frozen
from .codes import lowered
from .scales import blocks_of, factors, in_step

if TYPE_CHECKING:
    import torch

__all__ = ["Scaled"]


@frozen
class Scaled:
    """``codes × scale`` of the block. Implements :class:`.Rule`; parts: ``codes`` and ``scales``.

    In fp32, rounded once to ``dtype``: the rule of transformers' ``Fp8Dequantize``. A block at an edge of the tensor may be cut
    short.
    """

    format: str
    name: str
    dtype: str
    block: tuple[int, ...]
    """Elements of a block in each dim; one scale each."""

    def boxes(self, box: Box) -> Mapping[str, Box]:
        return {"codes": box, "scales": blocks_of(box, self.block)}

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found, lift = lowered(parts["codes"])
        scales, rest = factors(self.name, parts["scales"], lift)
        if rest != 1:
            found.mul_(rest)
        if box.numel:
            values, each = in_step(found, scales, box, self.block)
            values.mul_(each)
        return found.to(torch_dtype(self.dtype))
