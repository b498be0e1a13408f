"""Blocks of consecutive elements: how they lie in a tensor, and which cuts fall on them. Pure.

Quantized optimizer states have one scale for each block of the rank's own elements, row-major. Where every cut falls between
blocks, these are the blocks of the whole tensor, however it is cut. So the scales are a tensor that is cut like the codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from ..objects import frozen
from .boxes import Box, LocalBox
from .placements import Cut, Geometry, cut_boxes

__all__ = ["BlockGrid", "fitting_ranks", "grid_of"]

#: The largest number of ranks that an error suggests.
_MOST_RANKS = 64


@frozen
class BlockGrid:
    """Blocks of a tensor of global ``shape``. A unit is the least number of rows of ``dim`` that whole blocks fill."""

    shape: tuple[int, ...]
    block: int
    """Elements of a block."""
    dim: int
    """The dim that units cut. No cut may lie in a later one."""
    rows: int
    """Rows of ``dim`` in a unit."""
    unit: int
    """Elements of a unit: a multiple of ``block``."""

    def part_shape(self, elements: int, shape: Sequence[int] | None = None) -> tuple[int, ...]:
        """The shape of a tensor with one number for ``elements`` elements of this one, of a block or less.

        ``shape``: that of a local tensor, instead of the global one. Cuts between blocks cut both alike. 1 gives the
        shape itself.
        """
        whole = tuple(self.shape if shape is None else shape)
        if elements == 1:
            return whole
        return (*whole[: self.dim], whole[self.dim] // self.rows, self.unit // elements)

    def falls_on(self, geometry: Geometry) -> bool:
        """Whether every cut of a geometry lies between blocks."""
        if any(cut.kind != "replicate" and cut.dim > self.dim for cut in geometry.cuts):
            return False
        units = (*self.shape[: self.dim], self.shape[self.dim] // self.rows)
        return all(
            tuple(self._scaled(cut_boxes(units, geometry, at))) == cut_boxes(self.shape, geometry, at)
            for at in product(*map(range, geometry.axis_sizes))
        )

    def _scaled(self, boxes: Iterable[LocalBox]) -> Iterator[LocalBox]:
        """Boxes of units as boxes of elements."""
        after = self.shape[self.dim + 1 :]

        def scaled(at: Sequence[int], rest: Sequence[int]) -> tuple[int, ...]:
            return (*at[: self.dim], at[self.dim] * self.rows, *rest)

        zeros = (0,) * len(after)
        for one in boxes:
            box = Box(scaled(one.box.start, zeros), scaled(one.box.stop, after))
            yield LocalBox(box, scaled(one.local_start, zeros))


def grid_of(shape: Sequence[int], block: int) -> BlockGrid | None:
    """The blocks of a tensor, row-major; None if they don't fill it.

    The cut dim is the last one that can be: of rows that hold whole blocks, columns may be cut, too.
    """
    numel = 1
    for dim in reversed(range(len(shape))):
        row, numel = numel, numel * shape[dim]
        if numel and numel % block == 0:
            unit = math.lcm(row, block)
            return BlockGrid(tuple(shape), block, dim, unit // row, unit)
    return None


def fitting_ranks(grids: Iterable[tuple[BlockGrid, int]]) -> tuple[int, ...]:
    """Numbers of ranks, up to 64, over which each of these tensors can be cut along its dim, between blocks."""
    pairs = set(grids)

    def fits(count: int) -> bool:
        cuts = {d: Geometry((count,), ("ranks",), (Cut("shard", d),), tuple(range(count))) for _, d in pairs}
        return all(grid.falls_on(cuts[dim]) for grid, dim in pairs)

    return tuple(n for n in range(1, _MOST_RANKS + 1) if fits(n))
