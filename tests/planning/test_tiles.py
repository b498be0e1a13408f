"""Tiles against numpy: which element of the source does every element of the target become?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.tensors.boxes import Box, whole
from shardwise.tensors.tiles import (
    Loop,
    Side,
    Tile,
    bounds,
    cut,
    identity,
    is_dense,
    is_injective,
    tiles_overlap,
    translate,
)
from tests.harness.tiles import Index, pairs


def on(tile: Tile, side: Side) -> list[Index]:
    return [pair[side == "target"] for pair in pairs(tile)]


# --- tensors made by numpy, and the tiles that say the same ----------------------------------------------


@dataclass(frozen=True)
class Made:
    """A target array that holds the flat index of a source element everywhere (-1: nothing was written)."""

    shape: Index
    array: np.ndarray
    tiles: tuple[Tile, ...]


def source_of(shape: Index) -> Made:
    return Made(shape, np.arange(math.prod(shape)).reshape(shape), (identity("x", shape),))


def with_target(tile: Tile, loops: Sequence[Loop], start: Sequence[int]) -> Tile:
    return replace(tile, loops=tuple(loops), target_start=tuple(start))


def transpose(made: Made, order: Sequence[int]) -> Made:
    to = {old: new for new, old in enumerate(order)}
    tiles = tuple(
        with_target(
            t,
            [replace(v, target_dim=to[v.target_dim]) for v in t.loops],
            [t.target_start[d] for d in order],
        )
        for t in made.tiles
    )
    return Made(made.shape, made.array.transpose(order), tiles)


def narrow(made: Made, dim: int, low: int, high: int) -> Made:
    """What split gives: a part of a dim."""
    keep = Box(
        tuple(low if d == dim else 0 for d in range(made.array.ndim)),
        tuple(high if d == dim else n for d, n in enumerate(made.array.shape)),
    )
    back = tuple(-s for s in keep.start)
    tiles = tuple(translate(p, "target", back) for t in made.tiles for p in cut(t, "target", keep))
    return Made(made.shape, np.take(made.array, range(low, high), dim), tiles)


def concat(made: Made, parts: Sequence[Made], dim: int) -> Made:
    array = np.concatenate([p.array for p in parts], dim)
    tiles, base = [], 0
    for part in parts:
        shift = tuple(base if d == dim else 0 for d in range(array.ndim))
        tiles += [translate(t, "target", shift) for t in part.tiles]
        base += part.array.shape[dim]
    return Made(made.shape, array, tuple(tiles))


def rotate(made: Made, dim: int, at: int) -> Made:
    """split, then concatenate in the other order."""
    n = made.array.shape[dim]
    return concat(made, [narrow(made, dim, at, n), narrow(made, dim, 0, at)], dim)


def interleave(made: Made, dim: int, step: int, phase: int) -> Made:
    shape = list(made.array.shape)
    shape[dim] *= step
    array = np.full(shape, -1)
    array[tuple(slice(phase, None, step) if d == dim else slice(None) for d in range(len(shape)))] = (
        made.array
    )
    tiles = tuple(
        with_target(
            t,
            [replace(v, target_step=v.target_step * step) if v.target_dim == dim else v for v in t.loops],
            [s * step + phase if d == dim else s for d, s in enumerate(t.target_start)],
        )
        for t in made.tiles
    )
    return Made(made.shape, array, tiles)


def merge(made: Made, dim: int) -> Made:
    """view: dims ``dim`` and ``dim + 1`` become one."""
    inner = made.array.shape[dim + 1]
    shape = (*made.array.shape[:dim], made.array.shape[dim] * inner, *made.array.shape[dim + 2 :])

    def moved(v: Loop) -> Loop:
        if v.target_dim == dim:
            return replace(v, target_step=v.target_step * inner)
        return v if v.target_dim < dim else replace(v, target_dim=v.target_dim - 1)

    tiles = tuple(
        with_target(
            t,
            [moved(v) for v in t.loops],
            [
                *t.target_start[:dim],
                t.target_start[dim] * inner + t.target_start[dim + 1],
                *t.target_start[dim + 2 :],
            ],
        )
        for t in made.tiles
    )
    return Made(made.shape, made.array.reshape(shape), tiles)


def unmerge(made: Made, dim: int, inner: int) -> Made | None:
    """view: ``dim`` becomes two, the second of size ``inner``; None if some tile would not stay one."""
    n = made.array.shape[dim]
    if n % inner:
        return None
    tiles = []
    for t in made.tiles:
        one = _unmerge_tile(t, dim, inner)
        if one is None:
            return None
        tiles.append(one)
    shape = (*made.array.shape[:dim], n // inner, inner, *made.array.shape[dim + 1 :])
    return Made(made.shape, made.array.reshape(shape), tuple(tiles))


def _unmerge_tile(tile: Tile, dim: int, inner: int) -> Tile | None:
    loops: list[Loop] = []
    low, reach = tile.target_start[dim] % inner, 0
    for v in tile.loops:
        if v.target_dim != dim:
            loops.append(v if v.target_dim < dim else replace(v, target_dim=v.target_dim + 1))
        elif v.target_step % inner == 0:
            loops.append(replace(v, target_step=v.target_step // inner))
        elif low + reach + v.target_step * (v.size - 1) < inner:
            reach += v.target_step * (v.size - 1)
            loops.append(replace(v, target_dim=dim + 1))
        elif inner % v.target_step == 0 and v.size % (inner // v.target_step) == 0:
            fit = inner // v.target_step
            reach += v.target_step * (fit - 1)
            loops.append(Loop(v.size // fit, v.source_dim, v.source_step * fit, dim, 1))
            loops.append(replace(v, size=fit, target_dim=dim + 1))
        else:
            return None
    if low + reach >= inner:
        return None
    start = tile.target_start
    return with_target(tile, loops, [*start[:dim], start[dim] // inner, low, *start[dim + 1 :]])


@st.composite
def made_tensors(draw: st.DrawFn, operations: int = 5) -> Made:
    made = source_of(tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 6, 8)), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, operations))):
        made = draw(st.sampled_from(OPERATIONS))(draw, made)
        if made.array.size > 600:
            break
    return made


def _any_dim(draw: st.DrawFn, made: Made) -> int:
    return draw(st.integers(0, made.array.ndim - 1))


def _transpose(draw: st.DrawFn, made: Made) -> Made:
    return transpose(made, draw(st.permutations(range(made.array.ndim))))


def _narrow(draw: st.DrawFn, made: Made) -> Made:
    dim = _any_dim(draw, made)
    n = made.array.shape[dim]
    low = draw(st.integers(0, n - 1))
    return narrow(made, dim, low, draw(st.integers(low + 1, n)))


def _rotate(draw: st.DrawFn, made: Made) -> Made:
    dim = _any_dim(draw, made)
    n = made.array.shape[dim]
    return rotate(made, dim, draw(st.integers(1, n - 1))) if n > 1 else made


def _interleave(draw: st.DrawFn, made: Made) -> Made:
    step = draw(st.integers(1, 3))
    return interleave(made, _any_dim(draw, made), step, draw(st.integers(0, step - 1)))


def _merge(draw: st.DrawFn, made: Made) -> Made:
    return merge(made, draw(st.integers(0, made.array.ndim - 2))) if made.array.ndim > 1 else made


def _unmerge(draw: st.DrawFn, made: Made) -> Made:
    dim = _any_dim(draw, made)
    inner = draw(st.sampled_from([k for k in range(1, 9) if made.array.shape[dim] % k == 0]))
    return unmerge(made, dim, inner) or made


OPERATIONS: list[Callable[[st.DrawFn, Made], Made]] = [
    _transpose,
    _narrow,
    _rotate,
    _interleave,
    _merge,
    _unmerge,
    _unmerge,
]


@st.composite
def boxes_in(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in spans), tuple(b for _, b in spans))


def expected_pairs(made: Made) -> set[tuple[Index, Index]]:
    return {
        (tuple(int(i) for i in np.unravel_index(flat, made.shape)), index)
        for index, flat in np.ndenumerate(made.array)
        if flat >= 0
    }


def inside(index: Index, box: Box) -> bool:
    return all(a <= i < b for a, i, b in zip(box.start, index, box.stop, strict=True))


@given(made_tensors())
def test_tiles_say_what_numpy_does(made: Made) -> None:
    found = [pair for t in made.tiles for pair in pairs(t)]
    assert len(found) == len(set(found))
    assert set(found) == expected_pairs(made)


@settings(max_examples=300)
@given(made_tensors(), st.data())
def test_cut_both_sides_then_translate(made: Made, data: st.DataObject) -> None:
    target_box = data.draw(boxes_in(made.array.shape))
    source_box = data.draw(boxes_in(made.shape))
    shift = tuple(-s for s in target_box.start)
    found: list[tuple[Index, Index]] = []
    for tile in made.tiles:
        for piece in cut(tile, "target", target_box):
            for part in cut(translate(piece, "target", shift), "source", source_box):
                assert part.numel > 0
                assert part.source == "x"
                found += pairs(part)
    expected = {
        (source, tuple(i + s for i, s in zip(target, shift, strict=True)))
        for source, target in expected_pairs(made)
        if inside(target, target_box) and inside(source, source_box)
    }
    assert len(found) == len(set(found)), "pieces are not disjoint"
    assert set(found) == expected


@given(made_tensors(), st.sampled_from(["source", "target"]), st.data())
def test_pieces_are_few(made: Made, side: Side, data: st.DataObject) -> None:
    """One piece where a dim has one loop; with L nested loops, a middle and two edges at every level."""
    shape = made.shape if side == "source" else made.array.shape
    box = data.draw(boxes_in(shape))
    for tile in made.tiles:
        loops = [sum(v.on(side)[0] == d for v in tile.loops) for d in range(len(shape))]
        assert len(list(cut(tile, side, box))) <= math.prod(max(1, 2 * n - 1) for n in loops)


@given(made_tensors(), st.data())
def test_cuts_of_a_partition_add_up(made: Made, data: st.DataObject) -> None:
    shape = made.array.shape
    dim = data.draw(st.integers(0, len(shape) - 1))
    edges = sorted({0, shape[dim], *data.draw(st.lists(st.integers(0, shape[dim]), max_size=4))})
    total = 0
    for low, high in pairwise(edges):
        box = Box(
            tuple(low if d == dim else 0 for d in range(len(shape))),
            tuple(high if d == dim else n for d, n in enumerate(shape)),
        )
        total += sum(p.numel for t in made.tiles for p in cut(t, "target", box))
    assert total == sum(t.numel for t in made.tiles) == np.count_nonzero(made.array >= 0)


# --- properties of single tiles, of any steps ------------------------------------------------------------


@st.composite
def any_tiles(draw: st.DrawFn, *, dims: int = 2, low_size: int = 1) -> Tile:
    """Steps and sizes at random: loops may meet each other, and their elements may coincide."""
    loops = draw(
        st.lists(
            st.builds(
                Loop,
                st.integers(low_size, 4),
                st.integers(0, dims - 1),
                st.integers(1, 6),
                st.integers(0, dims - 1),
                st.integers(1, 6),
            ),
            max_size=3,
        )
    )
    start = st.tuples(*[st.integers(0, 6)] * dims)
    return Tile("x", tuple(loops), draw(start), draw(start))


sides = st.sampled_from(["source", "target"])


@given(any_tiles(), sides)
def test_bounds(tile: Tile, side: Side) -> None:
    indices = np.array(on(tile, side))
    assert bounds(tile, side) == Box(tuple(indices.min(0)), tuple(indices.max(0) + 1))


@given(any_tiles(), sides)
def test_is_dense(tile: Tile, side: Side) -> None:
    touched = set(on(tile, side))
    exact = len(touched) == tile.numel == bounds(tile, side).numel
    assert is_dense(tile, side) == exact


@given(any_tiles(), sides)
def test_is_injective_never_says_so_wrongly(tile: Tile, side: Side) -> None:
    indices = on(tile, side)
    if is_injective(tile, side):
        assert len(set(indices)) == len(indices)


def nested(tile: Tile, side: Side) -> bool:
    """Whether each step clears everything that smaller steps of the dim reach, or meets it exactly."""
    for dim in range(len(tile.start(side))):
        steps = sorted(v.on(side)[1] for v in tile.loops if v.on(side)[0] == dim and v.size > 1)
        if any(b % a for a, b in pairwise(steps)):
            return False
    return True


@given(any_tiles(), sides)
def test_is_injective_is_exact_for_nested_steps(tile: Tile, side: Side) -> None:
    indices = on(tile, side)
    if nested(tile, side):
        assert is_injective(tile, side) == (len(set(indices)) == len(indices))


@given(made_tensors())
def test_what_views_make_is_injective(made: Made) -> None:
    for tile in made.tiles:
        assert is_injective(tile, "source")
        assert is_injective(tile, "target")


@settings(max_examples=300)
@given(any_tiles(), any_tiles(), sides)
def test_tiles_overlap(a: Tile, b: Tile, side: Side) -> None:
    meets = bool(set(on(a, side)) & set(on(b, side)))
    assert tiles_overlap(a, b, side) == tiles_overlap(b, a, side) == meets


@given(any_tiles(), sides, st.data())
def test_cut_of_any_steps(tile: Tile, side: Side, data: st.DataObject) -> None:
    """Also where steps are not nested, and more pieces are needed."""
    box = data.draw(boxes_in(bounds(tile, side).stop))
    found = sorted(pair for piece in cut(tile, side, box) for pair in pairs(piece))
    assert found == sorted(pair for pair in pairs(tile) if inside(pair[side == "target"], box))


# --- corners ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3, 1, 2)])
def test_identity(shape: Index) -> None:
    tile = identity("x", shape)
    assert tile.numel == math.prod(shape)
    assert pairs(tile) == [(i, i) for i in np.ndindex(*shape)]
    assert bounds(tile, "target") == whole(shape)
    assert list(cut(tile, "target", whole(shape))) == [tile]


@pytest.mark.parametrize("side", ["source", "target"])
def test_empty_tiles_have_no_pieces_and_meet_nothing(side: Side) -> None:
    empty = identity("x", (3, 0, 2))
    assert empty.numel == 0
    assert list(cut(empty, side, whole((3, 0, 2)))) == []
    assert not tiles_overlap(empty, empty, side)
    full = identity("x", (3, 4))
    assert list(cut(full, side, Box((1, 2), (3, 2)))) == []


def test_zero_dims() -> None:
    scalar = identity("x", ())
    assert scalar.numel == 1
    assert is_dense(scalar, "target")
    assert tiles_overlap(scalar, scalar, "target")
    assert list(cut(scalar, "source", whole(()))) == [scalar]


def test_gaps_and_repeats_that_balance_are_not_dense() -> None:
    """0 2 4 6 8, some of them twice: nine iterations within nine elements."""
    loop = Loop(3, 0, 2, 0, 2)
    tile, between = Tile("x", (loop, loop), (0,), (0,)), Tile("x", (), (1,), (1,))
    assert bounds(tile, "target").numel == tile.numel == 9
    assert not is_dense(tile, "target")
    assert not tiles_overlap(tile, between, "target")


def stacked_heads() -> Iterator[tuple[int, int]]:
    """Cuts of a dim that two loops make up: heads of 8 rows each, taken in halves."""
    yield from ((3, 61), (0, 64), (9, 15), (7, 9), (8, 16), (63, 64))


@pytest.mark.parametrize(("low", "high"), list(stacked_heads()))
def test_a_rotary_permutation_cut_between_heads(low: int, high: int) -> None:
    made = source_of((64, 4))
    for step in (lambda m: unmerge(m, 0, 8), lambda m: unmerge(m, 1, 2)):
        made = step(made) or pytest.fail("can't be viewed so")
    made = merge(merge(transpose(made, (0, 2, 1, 3)), 0), 0)
    (tile,) = made.tiles
    assert np.array_equal(made.array, np.arange(256).reshape(8, 4, 2, 4).transpose(0, 2, 1, 3).reshape(64, 4))
    pieces = list(cut(tile, "target", Box((low, 0), (high, 4))))
    rows = sorted(t[0] for p in pieces for _, t in pairs(p) if t[1] == 0)
    assert rows == list(range(low, high))
    assert len(pieces) <= 5
