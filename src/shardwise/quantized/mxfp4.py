"""MXFP4 of OpenAI's gpt-oss: experts as ``X_blocks``, 16 bytes of two FP4 each, and ``X_scales``, an exponent per block.

Source: ``convert_moe_packed_tensors`` in transformers' ``integrations/mxfp4.py``. Its result is the transpose of what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..catalog.records import StoredTensor
from ..layout.boxes import Box
from .coded import coded
from .families import Found, Source
from .fp4 import FP4_LIFT, numbers_of_words
from .scales import finite, lifted, spread

if TYPE_CHECKING:
    import torch

__all__ = ["Mxfp4Experts", "find"]

_BLOCK = 32
_BYTES = _BLOCK // 2
_BLOCKS, _SCALES = "_blocks", "_scales"


def find(source: Source) -> Found:
    """Find experts in MXFP4. Implements :class:`.Family`."""
    found = Found()
    pairs = {name.removesuffix(_BLOCKS) for name in source.tensors if name.endswith(_BLOCKS)}
    method = source.settings.get("quant_method")
    if method != "mxfp4":
        return found
    pairs |= {
        name.removesuffix(_SCALES)
        for name, tensor in source.tensors.items()
        if name.endswith(_SCALES) and tensor.dtype == "U8"
    }
    for name in sorted(pairs):
        blocks, scales = source.tensors.get(name + _BLOCKS), source.tensors.get(name + _SCALES)
        if blocks is None:
            found.problems.append(f"{name}{_SCALES} has no {name}{_BLOCKS} beside it")
        elif scales is None:
            found.problems.append(
                f"{name}{_BLOCKS} has no {name}{_SCALES} beside it: codes without scales are not weights"
            )
        elif name in source.tensors:
            found.problems.append(f"{name} is stored twice: as {name} and as {name}{_BLOCKS}; remove one")
        elif wrong := [*_wrong_blocks(blocks), *_wrong_scales(scales, blocks)]:
            found.problems += wrong
        else:
            experts, rows, count, _ = blocks.shape
            parts = {"codes": blocks, "scales": scales}
            found.add(coded(name, "BF16", (experts, count * _BLOCK, rows), parts, Mxfp4Experts(name)))
    if not pairs:
        found.problems.append(
            f"the config says quant_method 'mxfp4', and no stored tensor ends in {_BLOCKS!r} or {_SCALES!r}"
        )
    return found


def _wrong_blocks(blocks: StoredTensor) -> list[str]:
    wrong = _wrong_dtype(blocks)
    if len(blocks.shape) != 4 or blocks.shape[-1] != _BYTES:
        wrong.append(
            f"{blocks.name} has shape {blocks.shape}; expected four dims: experts, rows, blocks and {_BYTES} bytes"
        )
    return wrong


def _wrong_scales(scales: StoredTensor, blocks: StoredTensor) -> list[str]:
    wrong = _wrong_dtype(scales)
    if scales.shape != blocks.shape[:-1]:
        wrong.append(
            f"{scales.name} has shape {scales.shape}; expected {blocks.shape[:-1]}, one scale for each block of {blocks.name}"
        )
    return wrong


def _wrong_dtype(part: StoredTensor) -> list[str]:
    return [] if part.dtype == "U8" else [f"{part.name} has dtype {part.dtype}; expected U8"]


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """Implements :class:`.Rule`. Codes are transposed by words of eight: numbers would be four times as many bytes."""

    name: str
    format = "MXFP4 in blocks of 32"

    def boxes(self, box: Box) -> Mapping[str, Box]:
        (expert, column, row), (last_expert, last_column, last_row) = box.start, box.stop
        first, last = column // _BLOCK, -(-last_column // _BLOCK)
        scales = Box((expert, row, first), (last_expert, last_row, last))
        within = Box((0,), (_BYTES,))
        if last - first == 1:  # of one block, only some words
            within = Box((column % _BLOCK // 8 * 4,), (-(-(last_column - first * _BLOCK) // 8) * 4,))
        return {"codes": Box(scales.start + within.start, scales.stop + within.stop), "scales": scales}

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        import torch

        if not box.numel:
            return torch.empty(box.sizes, dtype=torch.bfloat16, device=parts["codes"].device)
        scales = finite(self.name, parts["scales"].transpose(1, 2).contiguous())
        words = _words(parts["codes"].flatten(2)).transpose(1, 2).contiguous()
        first = box.start[1] % (_BLOCK if scales.shape[1] > 1 else 8)
        values = numbers_of_words(words).flatten(1, 2)[:, first : first + box.sizes[1]].to(torch.float32)
        scales = lifted(scales, values, FP4_LIFT)
        if first == 0 and box.sizes[1] % _BLOCK == 0:
            values.unflatten(1, (-1, _BLOCK)).mul_(scales.unsqueeze(2))
        else:
            values.mul_(spread(scales, box, (1, _BLOCK, 1)))
        return values.to(torch.bfloat16)


def _words(octets: torch.Tensor) -> torch.Tensor:
    """Bytes as int32 words, which torch makes only of memory that begins at a word."""
    import torch

    if octets.stride(-1) != 1 or octets.storage_offset() % 4 or any(n % 4 for n in octets.stride()[:-1]):
        octets = octets.clone(memory_format=torch.contiguous_format)
    return octets.view(torch.int32)
