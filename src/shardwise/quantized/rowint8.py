"""bitsandbytes' INT8 codes (LLM.int8): one a byte, with a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..layout.boxes import Box
from ..objects import frozen
from .scales import finite

if TYPE_CHECKING:
    import torch

__all__ = ["RowInt8"]

#: 1/127 as bitsandbytes writes it.
_STEP = 7.874015718698502e-3


@frozen
class RowInt8:
    """``code × absolute maximum of the row ÷ 127`` in F32. Implements :class:`.Rule`; parts: ``codes``, ``scales``.

    Two products, each rounded to fp32, in the order of bitsandbytes' ``int8_vectorwise_dequant``.
    """

    name: str

    @property
    def format(self) -> str:
        return "INT8 with a scale per row"

    def boxes(self, box: Box) -> Mapping[str, Box]:
        return {"codes": box, "scales": Box(box.start[:1], box.stop[:1])}

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        import torch

        scales = finite(self.name, parts["scales"])
        return parts["codes"].to(torch.float32).mul_(scales.unsqueeze(-1)).mul_(_STEP)
