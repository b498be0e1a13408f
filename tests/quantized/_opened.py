"""What a rule makes of boxes: in the dtype of the tensor, whole or opened once and cut again."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from shardwise.catalog.records import Coded, StoredTensor
from shardwise.dtypes import torch_dtype
from shardwise.tensors.boxes import Box, whole


def exactly(one: Coded, found: torch.Tensor) -> torch.Tensor:
    """The elements in the dtype of the tensor, which holds what a rule gives in F32 without a rounding."""
    made = found.to(torch_dtype(one.tensor.dtype))
    assert found.dtype in (made.dtype, torch.float32)
    assert torch.equal(made.double(), found.double())
    return made


def check_opened(one: Coded, stored: Mapping[str, torch.Tensor], expected: torch.Tensor) -> None:
    """Boxes within boxes, some of which begin inside words, groups and blocks, are those slices of the whole.

    ``stored``: the parts, by name.
    """
    chance = random.Random(one.tensor.name)
    for _ in range(12):
        around = _random_box(whole(one.tensor.shape), chance)
        parts = {
            role: _elements(stored, one.parts[role])[part.slices].clone()
            for role, part in one.rule.boxes(around).items()
        }
        decode = one.rule.opened(around, parts)
        for inner in (around, *(_random_box(around, chance) for _ in range(6))):
            found, wanted = exactly(one, decode(inner)), expected[inner.slices].contiguous()
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), (around, inner)


def _random_box(around: Box, chance: random.Random) -> Box:
    ends = [sorted(chance.sample(range(a, b + 1), 2)) for a, b in zip(around.start, around.stop, strict=True)]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def _elements(stored: Mapping[str, torch.Tensor], part: StoredTensor) -> torch.Tensor:
    found = stored[part.name].contiguous().view(-1).view(torch.uint8)
    return found.view(torch_dtype(part.dtype)).view(part.shape)
