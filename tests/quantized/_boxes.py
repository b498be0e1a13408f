"""Sources from files, and decoding of boxes as a reader does it: the parts' boxes, cut from the stored tensors."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shardwise.catalog.open import open_catalog
from shardwise.catalog.quantized import Found, Source
from shardwise.catalog.records import Coded
from shardwise.dtypes import torch_dtype
from shardwise.tensors.boxes import Box, whole
from tests.quantized._opened import check_opened, exactly

State = dict[str, torch.Tensor]
Find = Callable[[Source], Found]


def stored(root: Path) -> tuple[State, dict[str, Any]]:
    """The tensors of a checkpoint, and what its config says of quantization."""
    config = json.loads((root / "config.json").read_text())
    state: State = {}
    for file in sorted(root.glob("*.safetensors")):
        state |= load_file(file)
    return state, config.get("quantization_config", {})


def found_in(find: Find, root: Path, state: State, settings: dict[str, Any]) -> Found:
    """What a family finds in these tensors, once they are written."""
    root.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, root / "model.safetensors")
    catalog = open_catalog(root)
    return find(
        Source(catalog.tensors, settings, lambda name: state[name].contiguous().view(-1).numpy().tobytes())
    )


def cut(one: Coded, state: State, box: Box) -> torch.Tensor:
    """The elements of a box, from the boxes of its parts."""
    asked = one.rule.boxes(box)
    assert asked.keys() == one.parts.keys()
    parts = {}
    for role, part in one.parts.items():
        assert whole(part.shape).contains(asked[role]) or not asked[role].numel, (box, role, asked[role])
        raw = state[part.name].contiguous().view(-1).view(torch.uint8)
        parts[role] = raw.view(torch_dtype(part.dtype)).view(part.shape)[asked[role].slices].clone()
        assert tuple(parts[role].shape) == asked[role].sizes
    found = one.rule.decode(box, parts)
    assert tuple(found.shape) == box.sizes
    return exactly(one, found)


def boxes_of(shape: tuple[int, ...], count: int = 30) -> Iterator[Box]:
    """The whole, edges, one row, one column, none, and boxes at random."""
    yield whole(shape)
    ends = [sorted({(0, 1), (n - 1, n), (0, n), (n // 2, n // 2), (1, n)}) for n in shape]
    for spans in itertools.product(*ends):
        yield Box(*zip(*spans, strict=True))
    draw = random.Random(repr(shape))
    for _ in range(count):
        spans = [sorted(draw.choices(range(n + 1), k=2)) for n in shape]
        yield Box(*zip(*spans, strict=True))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are the same, to the bit."""
    unsigned = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(unsigned), right.contiguous().view(unsigned)
    )


def check_boxes(one: Coded, state: State, expected: torch.Tensor) -> None:
    """Every box decodes to what the library makes of the whole tensor."""
    assert one.tensor.shape == tuple(expected.shape)
    for box in boxes_of(one.tensor.shape):
        assert same(cut(one, state, box), expected[box.slices]), (one.tensor.name, box)
    check_opened(one, state, expected)


def read_elements(one: Coded, box: Box) -> dict[str, int]:
    """How many elements of each part a box needs."""
    return {role: asked.numel for role, asked in one.rule.boxes(box).items()}
