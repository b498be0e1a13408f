"""4-bit codes as blocks: each row of a tensor of bytes holds a block's codes and then its scale.

A weight of ``n`` elements in blocks of ``b`` is one U8 tensor of ⌈n / b⌉ rows and ``b / 2 + 4`` columns: ``b`` codes, two a byte, and
the scale in fp32 (little-endian). FSDP2 cuts rows, so each cut falls on a block, whatever the weight's shape, and every shard can
be decoded alone. (llama.cpp's ``Q4_0`` stores blocks so, too.) The codes and the scales are bitsandbytes' own, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..catalog.records import Coded, StoredTensor
from ..dtypes import torch_dtype
from ..internals.bitsandbytes import dequantize_4bit, quantize_4bit
from ..layout.boxes import Box
from ..objects import frozen
from .coded import coded
from .fourbit import FourBit
from .scales import finite
from .stored import reshaped

if TYPE_CHECKING:
    import torch

__all__ = ["SCALE_BYTES", "Blocks", "Joined", "encoded", "joined"]

#: A scale in fp32.
SCALE_BYTES = 4


@frozen
class Blocks:
    """How a weight lies in blocks."""

    shape: tuple[int, ...]
    """Of the weight."""
    quant_type: str
    """``nf4`` or ``fp4``."""
    block: int
    """Elements of a block."""
    dtype: str
    """The stored code of the dtype that the weight had before, and has again when it is decoded."""

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Blocks, and bytes of each."""
        return -(-math.prod(self.shape) // self.block), self.block // 2 + SCALE_BYTES

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and the scales of blocks, each in one dim and in memory of its own."""
        import torch

        half = self.block // 2
        return rows[:, :half].reshape(-1), rows[:, half:].contiguous().view(torch.float32).view(-1)

    def joined(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Blocks of codes and scales; the last block is filled up with zeros."""
        import torch

        rows = torch.zeros(scales.numel(), self.stored_shape[1], dtype=torch.uint8)
        half = self.block // 2
        padded = torch.nn.functional.pad(codes.reshape(-1), (0, scales.numel() * half - codes.numel()))
        rows[:, :half] = padded.view(-1, half)
        rows[:, half:] = scales.reshape(-1, 1).view(torch.uint8)
        return rows

    def decoded(self, rows: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The elements of blocks ``start`` to ``stop``, in the order of the weight, in one dim. On the device of ``rows``."""
        codes, scales = self.split(rows)
        count = min(stop * self.block, math.prod(self.shape)) - start * self.block
        values = dequantize_4bit(
            codes, scales, (1, len(scales) * self.block), self.quant_type, self.block, torch_dtype(self.dtype)
        )
        return values.view(-1)[:count]

    def parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes of the whole weight, as many as bitsandbytes has of it, and the scales."""
        codes, scales = self.split(rows)
        return codes[: -(-math.prod(self.shape) // 2)], scales

    def weight(self, rows: torch.Tensor) -> torch.Tensor:
        """The weight that all blocks stand for. On the device of ``rows``."""
        codes, scales = self.parts(rows)
        dtype = torch_dtype(self.dtype)
        return dequantize_4bit(codes, scales, self.shape, self.quant_type, self.block, dtype)

    def elements(self, box: Box) -> tuple[int, int]:
        """The elements, in the order of the weight, of the blocks that a box of rows and columns touches."""
        return box.start[0] * self.block, min(box.stop[0] * self.block, math.prod(self.shape))


@frozen
class Joined:
    """Blocks of codes and scales that bitsandbytes stored. Implements :class:`.Rule`; parts as :class:`.FourBit`'s.

    Scales that are quantized, too, are decoded: a block then has the scale that bitsandbytes works out of them.
    """

    blocks: Blocks
    flat: FourBit
    """The rule of the weight in one dim."""

    @property
    def format(self) -> str:
        return f"{self.flat.format}, kept"

    def boxes(self, box: Box) -> Mapping[str, Box]:
        return self.flat.boxes(self._elements(box))

    def scales_of(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """As :meth:`.FourBit.scales_of`."""
        return self.flat.scales_of(self._elements(box), parts)

    def _elements(self, box: Box) -> Box:
        start, stop = self.blocks.elements(box)
        return Box((start,), (stop,))

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scales = finite(self.flat.name, self.scales_of(box, parts))
        return self.blocks.joined(parts["codes"], scales)[:, box.start[1] : box.stop[1]]


@frozen
class _Encoded:
    """Blocks quantized from a plain weight, by bitsandbytes. Implements :class:`.Rule`; part: ``weight``."""

    blocks: Blocks
    source: StoredTensor
    is_transposed: bool
    """The weight is stored with inputs as rows (GPT-2's ``Conv1D``)."""

    @property
    def format(self) -> str:
        return f"{self.source.dtype}, quantized to {self.blocks.quant_type.upper()} in blocks of {self.blocks.block}"

    def boxes(self, box: Box) -> Mapping[str, Box]:
        first, last = self._rows(box)
        columns = self.blocks.shape[1]
        if self.is_transposed:
            return {"weight": Box((0, first), (columns, last))}
        return {"weight": Box((first, 0), (last, columns))}

    def _rows(self, box: Box) -> tuple[int, int]:
        start, stop = self.blocks.elements(box)
        return start // self.blocks.shape[1], -(-stop // self.blocks.shape[1])

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        (start, stop), blocks = self.blocks.elements(box), self.blocks
        weight = parts["weight"].to(torch_dtype(blocks.dtype))
        if self.is_transposed:
            weight = weight.t()
        before = self._rows(box)[0] * blocks.shape[1]
        values = weight.reshape(-1)[start - before : stop - before].contiguous()
        codes, scales = quantize_4bit(values, blocks.quant_type, blocks.block)
        return blocks.joined(codes, finite(self.source.name, scales))[:, box.start[1] : box.stop[1]]


def joined(one: Coded, dtype: str) -> tuple[Blocks, Coded] | None:
    """A weight in bitsandbytes' 4-bit codes as blocks; None if it is stored in another format. ``dtype``: what it decodes to."""
    if not isinstance(one.rule, FourBit) or len(one.rule.shape) != 2:
        return None
    rule = one.rule
    blocks = Blocks(rule.shape, rule.quant_type, rule.block, dtype)
    flat = replace(rule, shape=(math.prod(rule.shape),))
    shapes = {"codes": flat.codes_shape, "scales": flat.scales_shape}
    parts = {
        role: reshaped(part, part.dtype, shapes[role]) if role in shapes else part
        for role, part in one.parts.items()
    }
    return blocks, coded(one.tensor.name, "U8", blocks.stored_shape, parts, Joined(blocks, flat))


def encoded(stored: StoredTensor, blocks: Blocks, *, is_transposed: bool) -> Coded:
    """A plain stored weight, quantized while it is read: no more than the rows of a few blocks at a time."""
    rule = _Encoded(blocks, stored, is_transposed)
    return coded(stored.name, "U8", blocks.stored_shape, {"weight": stored}, rule)
