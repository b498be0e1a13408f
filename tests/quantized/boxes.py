"""Boxes of a tensor, and what a rule makes of each, against the whole."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from shardwise.catalog.open import open_catalog
from shardwise.catalog.records import Coded, StoredTensor
from shardwise.quantized.open import Source
from shardwise.tensors.boxes import Box, whole
from tests.quantized._opened import check_opened, exactly


def source_of(root: str | os.PathLike[str], settings: dict) -> Source:
    """A directory of safetensors as families see it."""
    stored = stored_in(root)
    return Source(
        open_catalog(root).tensors,
        settings,
        lambda name: stored[name].contiguous().view(torch.uint8).numpy().tobytes(),
    )


def stored_in(root: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    return {
        name: tensor for path in Path(root).glob("*.safetensors") for name, tensor in load_file(path).items()
    }


def with_part(
    source: Source, name: str, dtype: str | None = None, shape: tuple[int, ...] | None = None
) -> Source:
    """The source with another dtype or shape of one tensor, or with one tensor more."""
    old = source.tensors.get(name) or next(iter(source.tensors.values()))
    new = StoredTensor(name, dtype or old.dtype, old.shape if shape is None else shape, old.chunks)
    return Source({**source.tensors, name: new}, source.settings, source.content)


def without(source: Source, *names: str) -> Source:
    return Source(
        {n: t for n, t in source.tensors.items() if n not in names}, source.settings, source.content
    )


def decoded(coded: Coded, box: Box, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the rule makes of a box, from exactly the parts that it asks for."""
    parts = {}
    for role, part in coded.rule.boxes(box).items():
        assert whole(coded.parts[role].shape).contains(part) or not part.numel, (role, box, part)
        parts[role] = stored[coded.parts[role].name][part.slices].clone()
    found = coded.rule.decode(box, parts)
    assert tuple(found.shape) == box.sizes
    return exactly(coded, found)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, also in the sign of zeros."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def boxes_of(shape: tuple[int, ...], count: int = 30) -> Iterator[Box]:
    """The whole, edges, single rows and columns, empty boxes, and random ones."""
    yield whole(shape)
    for dim, size in enumerate(shape):
        for start, stop in (
            (0, 1),
            (size - 1, size),
            (1, size),
            (0, 0),
            (3, 3),
            (size, size),
            (5, 6),
            (7, 18),
        ):
            start, stop = min(start, size), min(stop, size)
            yield Box(
                tuple(start if d == dim else 0 for d in range(len(shape))),
                tuple(stop if d == dim else n for d, n in enumerate(shape)),
            )
    rng = random.Random(str(shape))
    for _ in range(count):
        ends = [sorted(rng.sample(range(n + 1), 2)) for n in shape]
        yield Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def check_boxes(coded: Coded, expected: torch.Tensor, stored: dict[str, torch.Tensor]) -> None:
    """Every box is bitwise that slice of the whole which the library makes."""
    assert coded.tensor.shape == tuple(expected.shape)
    for box in boxes_of(coded.tensor.shape):
        assert same_bits(decoded(coded, box, stored), expected[box.slices]), (coded.tensor.name, box)
    check_opened(coded, stored, expected)
