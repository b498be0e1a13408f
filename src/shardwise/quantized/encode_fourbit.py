"""Quantizes to bitsandbytes' NF4 and FP4."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from ..layout.boxes import Box
from ..objects import frozen
from .fourbit import FourBit, book_of

if TYPE_CHECKING:
    import torch

__all__ = ["FourBitEncoder", "NestedFourBitEncoder", "fourbit_encoder"]

#: Instead of an absolute maximum of zero.
_LEAST = 1e-38


def fourbit_encoder(rule: FourBit) -> FourBitEncoder | NestedFourBitEncoder | str:
    """The encoder of a rule, or why it has none."""
    if len(rule.shape) != 2:
        return f"expected two dims, found {len(rule.shape)}"
    return FourBitEncoder(rule) if rule.nested is None else NestedFourBitEncoder(rule)


@frozen
class FourBitEncoder:
    """The code nearest to ``element ÷ absolute maximum of the block``. Implements :class:`.Encoder`.

    Source: ``quantize_4bit`` of bitsandbytes 0.50 in plain torch, which its CPU backend runs; GPU kernels may choose the other of two
    codes for an element that lies in the middle.
    """

    rule: FourBit
    makes = ("codes", "scales")
    once = ()

    @property
    def reference(self) -> str:
        return (
            f"{self.rule.quant_type.upper()}: absolute maximum of the block, as bitsandbytes' quantize_4bit"
        )

    @property
    def unit(self) -> tuple[int, ...]:
        return _rows_of_whole_blocks(self.rule, self.rule.block)

    def encode(
        self,
        box: Box,
        values: torch.Tensor,
        kept: Mapping[str, torch.Tensor],
        measured: tuple[torch.Tensor, ...],
    ) -> Mapping[str, torch.Tensor]:
        scaled, largest = _scaled(values, self.rule.block)
        boxes = self.rule.boxes(box)
        return {
            "codes": _codes(scaled, self.rule.quant_type).view(boxes["codes"].sizes),
            "scales": largest.view(boxes["scales"].sizes),
        }


@frozen
class NestedFourBitEncoder:
    """As :class:`FourBitEncoder`; the scales, less their mean, are codes of the source's book. Implements :class:`.Encoder`.

    Source: ``quantize_4bit(compress_statistics=True)`` of bitsandbytes 0.50, and its ``quantize_blockwise`` in plain torch. Its CPU
    kernel looks codes of scales up in a coarse table first: about one of a thousand is the code beside.
    """

    rule: FourBit
    makes = ("codes", "scales", "nested")
    once = ()

    @property
    def reference(self) -> str:
        return f"{FourBitEncoder(self.rule).reference}, scales by quantize_blockwise"

    @property
    def unit(self) -> tuple[int, ...]:
        assert self.rule.nested is not None
        return _rows_of_whole_blocks(self.rule, self.rule.block * self.rule.nested.block)

    def scales(self, values: torch.Tensor) -> torch.Tensor:
        """The scales of a window before they are quantized, of which the mean is wanted."""
        return _scaled(values, self.rule.block)[1]

    def state(self, content: bytes, mean: float) -> bytes:
        """The tensor's ``quant_state``, as it is with another mean of the scales."""
        return json.dumps({**json.loads(content), "nested_offset": mean}).encode()

    def encode(
        self,
        box: Box,
        values: torch.Tensor,
        kept: Mapping[str, torch.Tensor],
        measured: tuple[torch.Tensor, ...],
    ) -> Mapping[str, torch.Tensor]:
        import torch

        assert self.rule.nested is not None
        (mean,), book = measured, kept["book"]
        scaled, largest = _scaled(values, self.rule.block)
        outer, most = _scaled(largest - mean, self.rule.nested.block)
        codes = torch.bucketize(outer, (book[:-1] + book[1:]) / 2, out_int32=True).to(torch.uint8)
        boxes = self.rule.boxes(box)
        return {
            "codes": _codes(scaled, self.rule.quant_type).view(boxes["codes"].sizes),
            "scales": codes.view(boxes["scales"].sizes),
            "nested": most,
        }


def _rows_of_whole_blocks(rule: FourBit, size: int) -> tuple[int, int]:
    """As many rows as fill whole blocks, which lie in the tensor one after another; so whole bytes, too: blocks are even."""
    rows, columns = rule.shape
    return min(max(1, rows), size // math.gcd(size, max(1, columns))), max(1, columns)


def _scaled(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements in a row, divided by the absolute maximum of their block, and these maxima. The last block may be short."""
    import torch

    flat = values.reshape(-1).float()
    rest = flat.numel() % block
    apart = flat[: flat.numel() - rest].view(-1, block)
    largest = apart.abs().amax(-1)
    scaled = torch.clamp(apart * (1.0 / largest.clamp(min=_LEAST).view(-1, 1)), -1, 1).reshape(-1)
    if rest:
        last = flat[flat.numel() - rest :]
        most = last.abs().amax().clamp(min=_LEAST)
        largest = torch.cat([largest, most.unsqueeze(0)])
        scaled = torch.cat([scaled, torch.clamp(last / most, -1, 1)])
    return scaled, largest


def _codes(scaled: torch.Tensor, quant_type: str) -> torch.Tensor:
    """The nearest codes, two a byte, the first in the high bits."""
    import torch

    bounds, order = _bounds(quant_type)
    padded = torch.nn.functional.pad(scaled, (0, scaled.numel() % 2))
    codes = order[torch.bucketize(padded, bounds, out_int32=True)].to(torch.uint8)
    return torch.bitwise_or(codes[::2] << 4, codes[1::2])


@cache
def _bounds(quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The middles between the numbers of the book in order, and the code of each."""
    import torch

    book = book_of(quant_type)
    order = torch.argsort(book)
    return (book[order[:-1]] + book[order[1:]]) / 2, order
