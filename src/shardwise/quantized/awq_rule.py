"""AWQ's codes: unsigned fields of 4 bits in words along the outputs, in an order of their own, in groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..layout.boxes import Box
from .groups import scaled
from .scales import finite
from .words import covering

if TYPE_CHECKING:
    import torch

__all__ = ["Awq", "outputs_of"]

#: The field of a word that holds each of its 8 outputs. Source: AWQ_REVERSE_ORDER of AutoAWQ (MIT).
_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """``(code − zero) × scale`` of the input's group, in F16. Implements :class:`.Rule`.

    Parts: ``codes`` [inputs, outputs in words], ``zeros`` [groups, outputs in words] and ``scales`` [groups, outputs]. The tensor
    is [outputs, inputs], as a Linear's. Source: ``dequantize_gemm`` of AutoAWQ.
    """

    name: str
    size: int
    """Inputs of a group."""

    @property
    def format(self) -> str:
        return f"AWQ with 4 bits in groups of {self.size}"

    def boxes(self, box: Box) -> Mapping[str, Box]:
        (row, column), (row_end, column_end) = box.start, box.stop
        word, word_end = covering(row, row_end, 8)
        group, group_end = covering(column, column_end, self.size)
        return {
            "codes": Box((column, word), (column_end, word_end)),
            "zeros": Box((group, word), (group_end, word_end)),
            "scales": Box((group, row), (group_end, row_end)),
        }

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        import torch

        if not box.numel:
            return torch.empty(box.sizes, dtype=torch.float16)
        scales = finite(self.name, parts["scales"]).t().contiguous()
        codes, zeros = (
            outputs_of(parts[one]).narrow(0, box.start[0] % 8, box.sizes[0]) for one in ("codes", "zeros")
        )
        scaled(codes, zeros, scales, box.start[1], self.size)
        # The product of a difference of codes and an F16 is exact in F32, so this is F16 arithmetic, and faster.
        return codes.to(torch.float16)


def outputs_of(words: torch.Tensor) -> torch.Tensor:
    """The outputs that words hold, one a row, in F32."""
    import torch

    shifts = torch.tensor(_FIELDS, dtype=torch.int32).mul_(4).view(1, 8, 1)
    shifted = torch.bitwise_right_shift(words.t().contiguous().unsqueeze(1), shifts)
    return shifted.to(torch.int8).bitwise_and_(15).reshape(-1, words.shape[0]).float()
