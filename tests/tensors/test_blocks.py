"""Blocks of a tensor: where cuts fall between them, every rank's own blocks are blocks of the whole, and cut alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.tensors.boxes import LocalBox
from shardwise.tensors.placements import Cut, Geometry, fitting_ranks, grid_of, local_shape
from tests.harness.rank_boxes import every_rank_boxes
from tests.harness.tiers import examples


def over(*axes: tuple[int, Cut]) -> Geometry:
    sizes = tuple(n for n, _ in axes)
    names = tuple(f"axis{k}" for k in range(len(axes)))
    return Geometry(sizes, names, tuple(cut for _, cut in axes), tuple(range(math.prod(sizes))))


def rows(count: int) -> Geometry:
    return over((count, Cut("shard", 0)))


def local(tensor: np.ndarray, boxes: tuple[LocalBox, ...]) -> np.ndarray:
    """A rank's tensor as torch keeps it."""
    shape = local_shape(tensor.shape, boxes)
    found = np.full(shape or (0,), -1)
    for one in boxes:
        found[one.slices] = tensor[one.box.slices]
    return found


@st.composite
def geometries(draw: st.DrawFn, dims: int) -> Geometry:
    dim = st.integers(0, dims - 1)
    cuts = st.one_of(
        st.just(Cut("replicate")),
        dim.map(lambda d: Cut("shard", d)),
        st.tuples(dim, st.integers(2, 3)).map(lambda c: Cut("strided", *c)),
    )
    return over(*draw(st.lists(st.tuples(st.integers(1, 4), cuts), min_size=1, max_size=2)))


@examples(400)
@given(st.data())
def test_a_rank_holds_whole_blocks_where_cuts_fall_on_them(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    fit = [block for block in range(2, 13) if grid_of(shape, block) is not None]
    assume(fit)
    block = data.draw(st.sampled_from(fit))
    geometry = data.draw(geometries(len(shape)))
    grid = grid_of(shape, block)
    assert grid is not None
    assume(grid.falls_on(geometry))
    block_of = np.arange(math.prod(shape)).reshape(shape) // block
    scales = np.arange(math.prod(shape) // block).reshape(grid.part_shape(block))
    held = every_rank_boxes(shape, geometry)
    for rank, boxes in every_rank_boxes(scales.shape, geometry).items():
        own, mine = local(block_of, held[rank]), local(scales, boxes)
        assert own.size == mine.size * block
        assert (own.reshape(-1, block) == mine.reshape(-1, 1)).all()
        if own.size:
            assert grid.part_shape(block, own.shape) == mine.shape


@pytest.mark.parametrize(
    ("shape", "block", "fits", "does_not"),
    [
        ((96, 256), 256, (1, 2, 3, 5, 8, 96), ()),  # a row is a block
        ((64, 96), 256, (1, 2, 4, 8), (3, 5, 16)),  # eight rows are three blocks
        ((8192,), 256, (1, 2, 4, 32), (3, 6, 64)),
    ],
)
def test_rows_over_ranks(
    shape: tuple[int, ...], block: int, fits: tuple[int, ...], does_not: tuple[int, ...]
) -> None:
    grid = grid_of(shape, block)
    assert grid is not None
    assert [grid.falls_on(rows(n)) for n in (*fits, *does_not)] == [True] * len(fits) + [False] * len(
        does_not
    )


def test_columns_may_be_cut_between_blocks_of_a_row_and_nowhere_else() -> None:
    columns = over((2, Cut("shard", 1)))
    wide, tall = grid_of((6, 512), 256), grid_of((512, 6), 256)
    assert wide is not None
    assert tall is not None
    assert wide.falls_on(columns)
    assert not tall.falls_on(columns)
    assert not wide.falls_on(over((4, Cut("shard", 1))))
    # Over one rank it divides nothing, but scales have no such dim that placements could name.
    assert not tall.falls_on(over((1, Cut("shard", 1))))


def test_what_blocks_do_not_fill_has_no_grid() -> None:
    assert grid_of((5, 7), 4) is None
    assert grid_of((), 4) is None


def test_numbers_of_ranks_that_an_error_suggests() -> None:
    grid, other = grid_of((64, 96), 256), grid_of((96, 256), 256)
    assert grid is not None
    assert other is not None
    assert fitting_ranks({(grid, 0), (other, 0)})[:4] == (1, 2, 4, 8)
