"""The box of a transfer holds its elements, and the view in it gives them in the order of its loops."""

from __future__ import annotations

import math
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.catalog.records import Chunk, StoredTensor
from shardwise.planning.plan import transfers_of
from shardwise.tensors.boxes import (
    Box,
    LocalBox,
    Wanted,
    boxes_of_range,
    contiguous_parts,
    contiguous_strides,
    whole,
)
from shardwise.tensors.tiles import Loop, Tile, identity

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def wanted_box(shape: tuple[int, ...], chance: random.Random) -> Wanted:
    start = tuple(chance.randrange(n) for n in shape)
    stop = tuple(chance.randint(a + 1, n) for a, n in zip(start, shape, strict=True))
    box = Box(start, stop)
    held = (LocalBox(box, (0,) * len(shape)),)
    return Wanted("w", "F32", shape, held, box.sizes, contiguous_strides(box.sizes))


def tile_of(shape: tuple[int, ...], chance: random.Random) -> tuple[Tile, tuple[int, ...]]:
    """A tile of a stored tensor of this shape, and the shape of its target: identity, permuted dims, or every second element."""
    kind = chance.choice(("identity", "permuted", "strided"))
    if kind == "identity":
        return identity("s", shape), shape
    if kind == "permuted":
        order = list(range(len(shape)))
        chance.shuffle(order)
        loops = tuple(Loop(shape[d], d, 1, k, 1) for k, d in enumerate(order) if shape[d] != 1)
        zero = (0,) * len(shape)
        return Tile("s", loops, zero, zero), tuple(shape[d] for d in order)
    sizes = tuple(-(-n // 2) for n in shape)
    loops = tuple(Loop(n, d, 2, d, 1) for d, n in enumerate(sizes) if n != 1)
    zero = (0,) * len(shape)
    return Tile("s", loops, zero, zero), sizes


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.integers(0, 2**32))
def test_a_view_of_the_box_gives_the_elements(shape: tuple[int, ...], seed: int) -> None:
    chance = random.Random(seed)
    tile, target = tile_of(shape, chance)
    stored = {"s": StoredTensor("s", "F32", shape, (Chunk(whole(shape), "path", 0),))}
    flat = np.arange(math.prod(shape))
    for transfer in transfers_of(tile, wanted_box(target, chance), stored):
        first = transfer.offset_bytes // 4
        expected = [first]
        for loop in transfer.loops:
            expected = [e + i * loop.source_stride for e in expected for i in range(loop.size)]
        found = transfer.box_in(shape)
        inside = np.ascontiguousarray(flat.reshape(shape)[found.box.slices])
        view = np.lib.stride_tricks.as_strided(inside, found.sizes, [8 * s for s in found.strides])
        assert view.reshape(-1).tolist() == expected
        assert (found.box.start, found.box.stop) == (
            tuple(np.array(np.unravel_index(expected, shape)).min(axis=1)),
            tuple(np.array(np.unravel_index(expected, shape)).max(axis=1) + 1),
        )


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.integers(0, 2**32), st.integers(1, 30))
def test_contiguous_parts_of_a_box(shape: tuple[int, ...], seed: int, most: int) -> None:
    """In order, without a gap, contiguous in the box, and no larger than asked for."""
    chance = random.Random(seed)
    origin = tuple(chance.randint(0, 9) for _ in shape)
    flat, box = np.arange(math.prod(shape)), whole(shape).moved(origin)
    parts = list(contiguous_parts(box, most))
    found = [e for p in parts for e in flat.reshape(shape)[p.slices_in(box)].reshape(-1).tolist()]
    assert found == list(range(len(flat)))
    assert all(0 < part.numel <= most for part in parts)


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.integers(0, 2**32))
def test_boxes_of_a_range(shape: tuple[int, ...], seed: int) -> None:
    chance = random.Random(seed)
    flat = np.arange(math.prod(shape))
    start = chance.randint(0, len(flat))
    stop = chance.randint(start, len(flat))
    boxes = list(boxes_of_range(start, stop, shape))
    found = [e for box in boxes for e in flat.reshape(shape)[box.slices].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape)
