"""Quantises to bitsandbytes' NF4 and FP4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ..layout.boxes import Box
from .fourbit import FourBit, book_of

if TYPE_CHECKING:
    import torch

__all__ = ["FourBitEncoder"]

#: Instead of an absolute maximum of zero.
_LEAST = 1e-38


@dataclass(frozen=True, slots=True)
class FourBitEncoder:
    """The code nearest to ``element ÷ absolute maximum of the block``. Implements :class:`.Encoder`.

    Source: ``quantize_4bit`` of bitsandbytes 0.50 in plain torch, which its CPU backend runs; GPU kernels may choose the other of two
    codes for an element that lies in the middle.
    """

    rule: FourBit
    makes = ("codes", "scales")
    once = ()

    @classmethod
    def of(cls, rule: FourBit) -> FourBitEncoder | str:
        if rule.nested is not None:
            return "its scales are quantised, too, around their mean, which the tensor's quant_state would have to say anew"
        if len(rule.shape) != 2:
            return f"expected two dims, found {len(rule.shape)}"
        return cls(rule)

    @property
    def reference(self) -> str:
        return (
            f"{self.rule.quant_type.upper()}: absolute maximum of the block, as bitsandbytes' quantize_4bit"
        )

    @property
    def unit(self) -> tuple[int, ...]:
        """As many rows as fill whole blocks, which lie in the tensor one after another; in whole bytes, too: blocks are even."""
        rows, columns = self.rule.shape
        return min(max(1, rows), self.rule.block // math.gcd(self.rule.block, max(1, columns))), max(
            1, columns
        )

    def encode(
        self,
        box: Box,
        values: torch.Tensor,
        kept: Mapping[str, torch.Tensor],
        extremes: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Mapping[str, torch.Tensor]:
        import torch

        flat, block = values.reshape(-1).float(), self.rule.block
        rest = flat.numel() % block
        apart = flat[: flat.numel() - rest].view(-1, block)
        largest = apart.abs().amax(-1)
        scaled = torch.clamp(apart * (1.0 / largest.clamp(min=_LEAST).view(-1, 1)), -1, 1).reshape(-1)
        if rest:
            last = flat[flat.numel() - rest :]
            most = last.abs().amax().clamp(min=_LEAST)
            largest = torch.cat([largest, most.unsqueeze(0)])
            scaled = torch.cat([scaled, torch.clamp(last / most, -1, 1)])
        bounds, order = _bounds(self.rule.quant_type)
        scaled = torch.nn.functional.pad(scaled, (0, scaled.numel() % 2))
        codes = order[torch.bucketize(scaled, bounds, out_int32=True)].to(torch.uint8)
        packed = (codes[::2] << 4) | codes[1::2]
        boxes = self.rule.boxes(box)
        return {
            "codes": packed.view(boxes["codes"].sizes),
            "scales": largest.view(boxes["scales"].sizes),
        }


@cache
def _bounds(quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The middles between the numbers of the book in order, and the code of each."""
    import torch

    book = book_of(quant_type)
    order = torch.argsort(book)
    return (book[order[:-1]] + book[order[1:]]) / 2, order
