"""Quantizes experts to MXFP4, as gpt-oss stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..layout.boxes import Box
from ..objects import frozen
from .encode_grouped import mx_exponents
from .packing import fp4_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["Mxfp4Encoder"]

_BLOCK = 32


@frozen
class Mxfp4Encoder:
    """Exponents by :func:`.mx_exponents`, codes rounded to the nearest, ties to even. Implements :class:`.Encoder`.

    OpenAI published codes and no quantizer; this is the rule that compressed-tensors has for MXFP4.
    """

    reference = "MXFP4: OCP's rule as in compressed-tensors"
    makes = ("codes", "scales")
    once = ()
    unit = (1, _BLOCK, 1)

    def encode(
        self,
        box: Box,
        values: torch.Tensor,
        kept: Mapping[str, torch.Tensor],
        measured: tuple[torch.Tensor, ...],
    ) -> Mapping[str, torch.Tensor]:
        import torch

        blocks = values.transpose(1, 2).unflatten(2, (-1, _BLOCK))
        exponents = mx_exponents(blocks.abs().amax(-1), 4)
        scales = torch.pow(2.0, (exponents.to(torch.int32) - 127).float())
        scaled = (blocks.float() / scales.unsqueeze(-1)).clamp_(-6, 6)
        return {"codes": fp4_bytes(scaled), "scales": exponents}
