"""MXFP4 of OpenAI's gpt-oss: experts as ``X_blocks``, 16 bytes of two FP4 each, and ``X_scales``, an exponent per block.

Source: ``convert_moe_packed_tensors`` in transformers' ``integrations/mxfp4.py``. Its result is the transpose of what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..catalog.records import StoredTensor
from ..objects import frozen
from ..tensors.boxes import Box
from .open import Found, Source
from .rules import FP4_LIFT, coded, covering, factors, numbers_of_halves, spread, transposed_halves

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
            found.problems.append(f"{name}{_SCALES} has no {name}{_BLOCKS} next to it")
        elif scales is None:
            found.problems.append(
                f"{name}{_BLOCKS} has no {name}{_SCALES} next to it: codes without scales are not weights"
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


@frozen
class Mxfp4Experts:
    """Implements :class:`.Rule`. Codes are transposed four at a time: numbers would be four times as many bytes."""

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
        return self.opened(box, parts)(box)

    def opened(self, box: Box, parts: Mapping[str, torch.Tensor]) -> Callable[[Box], torch.Tensor]:
        """Implements :class:`.OpeningRule`: codes and scales are transposed once."""
        import torch

        if not box.numel:
            return lambda inner: torch.empty(inner.sizes, dtype=torch.bfloat16)
        experts = [transposed_halves(octets) for octets in parts["codes"].flatten(2)]
        scales, rest = factors(self.name, parts["scales"].transpose(1, 2).contiguous(), FP4_LIFT)
        # Of one block, only some words were read.
        unit = _BLOCK if scales.shape[1] > 1 else 8
        first, first_block = box.start[1] // unit * unit, box.start[1] // _BLOCK

        def decode(inner: Box) -> torch.Tensor:
            (expert, column, row), (last_expert, last_column, last_row) = inner.start, inner.stop
            start, stop = row - box.start[2], last_row - box.start[2]
            word, last_word = covering(column, last_column, 8)
            halves = slice(2 * word - first // 4, 2 * last_word - first // 4)
            own = slice(expert - box.start[0], last_expert - box.start[0])
            made = [numbers_of_halves(one[halves, start:stop]) for one in experts[own]]
            numbers = torch.stack(made) if len(made) > 1 else made[0].unsqueeze(0)
            numbers = numbers[:, column - 8 * word :][:, : inner.sizes[1]]
            block, last_block = covering(column, last_column, _BLOCK)
            near = scales[own, block - first_block : last_block - first_block, start:stop]
            values = numbers.to(torch.float32)
            return _scaled(values if rest == 1 else values.mul_(rest), near, inner)

        return decode


def _scaled(values: torch.Tensor, scales: torch.Tensor, box: Box) -> torch.Tensor:
    """Numbers of FP4 [experts, columns, rows] times the scales of their blocks, in place. BF16 holds the products exactly."""
    if box.start[1] % _BLOCK == 0 and box.sizes[1] % _BLOCK == 0:
        values.unflatten(1, (-1, _BLOCK)).mul_(scales.unsqueeze(2))
    else:
        values.mul_(spread(scales, box, (1, _BLOCK, 1)))
    return values
