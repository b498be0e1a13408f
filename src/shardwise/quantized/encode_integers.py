"""Quantizes to the integers of bitsandbytes' INT8, and to those of GPTQ and AWQ with the scales that a calibration chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..layout.boxes import Box
from ..objects import frozen
from .awq_rule import Awq, outputs_of
from .gptq_rule import Gptq
from .groups import pieces
from .packing import awq_words, field_words
from .words import fields

if TYPE_CHECKING:
    import torch

__all__ = ["AwqEncoder", "GptqEncoder", "RowInt8Encoder"]


@frozen
class RowInt8Encoder:
    """``round(element × 127 ÷ absolute maximum of the row)``, of elements in F16. Implements :class:`.Encoder`.

    Source: ``Int8Params`` and ``int8_vectorwise_quant`` of bitsandbytes 0.50.
    """

    columns: int
    reference = "INT8: absolute maximum of the row, as bitsandbytes' int8_vectorwise_quant"
    makes = ("codes", "scales")
    once = ()

    @property
    def unit(self) -> tuple[int, ...]:
        return 1, max(1, self.columns)

    def encode(
        self,
        box: Box,
        values: torch.Tensor,
        kept: Mapping[str, torch.Tensor],
        measured: tuple[torch.Tensor, ...],
    ) -> Mapping[str, torch.Tensor]:
        import torch

        halves = values.to(torch.float16)
        largest = halves.abs().amax(1).float()
        scaled = halves * (127.0 / largest.unsqueeze(-1))
        return {"codes": torch.round(scaled).nan_to_num_(0).to(torch.int8), "scales": largest}


@frozen
class GptqEncoder:
    """Codes rounded again, with the source's scales, zero points and groups. Implements :class:`.Encoder`.

    GPTQ chooses scales and codes by calibration data, which an export does not have. Source: ``pack_original`` of GPTQModel.
    """

    rule: Gptq
    reference = "GPTQ: rounded to the source's scales and zero points, as its pack(); not calibrated again"
    makes = ("codes",)
    once = ()

    @property
    def unit(self) -> tuple[int, ...]:
        return 1, 32 // self.rule.bits

    def encode(
        self,
        box: Box,
        values: torch.Tensor,
        kept: Mapping[str, torch.Tensor],
        measured: tuple[torch.Tensor, ...],
    ) -> Mapping[str, torch.Tensor]:
        rule, rows = self.rule, box.sizes[0]
        zeros = fields(rule.zero_words(kept["zeros"]), rule.bits)
        zeros = zeros.narrow(1, box.start[0] % (32 // rule.bits), rows).t()
        scales, found = kept["scales"].t().float(), values.float()
        groups = rule.check_groups(kept["groups"], box)
        if rule.size:
            groups = groups - box.start[1] // rule.size
        codes = _rounded(found, scales.index_select(1, groups), zeros.index_select(1, groups), rule.bits)
        return {"codes": field_words(codes, rule.bits).t().contiguous()}


@frozen
class AwqEncoder:
    """Codes rounded again, with the source's scales and zero points. Implements :class:`.Encoder`.

    AWQ chooses scales by calibration data, which an export does not have. Source: ``WQLinear_GEMM.from_linear`` of AutoAWQ; it
    rounds weights that were clipped before, here codes are clipped.
    """

    rule: Awq
    reference = (
        "AWQ: rounded to the source's scales and zero points, as its from_linear(); not calibrated again"
    )
    makes = ("codes",)
    once = ()
    unit = (8, 1)

    def encode(
        self,
        box: Box,
        values: torch.Tensor,
        kept: Mapping[str, torch.Tensor],
        measured: tuple[torch.Tensor, ...],
    ) -> Mapping[str, torch.Tensor]:
        import torch

        scales, zeros = kept["scales"].t().float(), outputs_of(kept["zeros"])
        codes = torch.empty(values.shape, dtype=torch.float32)
        for (view, groups), (into, _) in zip(
            pieces(values.float(), box.start[1], self.rule.size),
            pieces(codes, box.start[1], self.rule.size),
            strict=True,
        ):
            into.copy_(_rounded(view, scales[:, groups].unsqueeze(-1), zeros[:, groups].unsqueeze(-1), 4))
        return {"codes": awq_words(codes.t())}


def _rounded(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """``round((value + zero × scale) ÷ scale)``, within the codes; zero where a scale is zero."""
    import torch

    found = torch.round((values + zeros * scales) / scales)
    return found.nan_to_num_(0).clamp_(0, 2**bits - 1)
