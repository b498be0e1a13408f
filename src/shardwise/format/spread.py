"""Finds slices in all ranks' files, for one box or one rank at a time.

:func:`.slices.rank_files` lists all slices of one rank. A run at another world size needs a few boxes from each of
many ranks' files: with 60,000 tensors on 1,024 ranks, a few of 60 million slices. So nothing here is computed for
all ranks and all tensors. Tensors of equal dtype, shape, geometry and owner (a *kind*) are cut alike and share the
work; kinds are far fewer than tensors. Pure: no torch, no files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ..dtypes import itemsize
from ..layout.boxes import Box
from ..layout.placements import Geometry, cutting_axes, dim_intervals
from ..objects import frozen
from .slices import SliceTensor, boxes_to_write, in_file_order, owner_ranks

__all__ = ["CutKind", "SliceAt", "Spread", "file_count"]


@frozen
class SliceAt:
    """A box of a tensor, in the ``file``-th slice file (from 0) of a rank."""

    box: Box
    rank: int
    file: int


@frozen
class _Piece:
    """One interval of a dim. Ranks at ``coordinate`` hold ``count`` of them; this is number ``index``, from 0."""

    start: int
    stop: int
    coordinate: tuple[int, ...]
    index: int
    count: int


class _Dim:
    """How a dim of some length is cut into intervals. ``axes``: the mesh axes that cut it; coordinates are on them."""

    def __init__(self, length: int, dim: int, geometry: Geometry) -> None:
        self.axes = tuple(axis for axis, _ in cutting_axes(geometry, dim))
        sizes = [geometry.axis_sizes[axis] for axis in self.axes]
        #: How many intervals each coordinate holds.
        self.counts = np.zeros(sizes, np.int64)
        found = []
        coordinate = [0] * len(geometry.axis_sizes)
        for here in product(*map(range, sizes)):
            for axis, index in zip(self.axes, here, strict=True):
                coordinate[axis] = index
            intervals = dim_intervals(length, dim, geometry, coordinate)
            self.counts[here] = len(intervals)
            found += [_Piece(a, b, here, k, len(intervals)) for k, (a, b) in enumerate(intervals)]
        self._pieces = sorted(found, key=lambda p: p.start)
        self._starts = [p.start for p in self._pieces]

    def overlapping(self, low: int, high: int) -> list[_Piece]:
        """The intervals that hold an index from low to high-1. Intervals are disjoint and cover the dim."""
        first = max(0, bisect_right(self._starts, low) - 1)
        last = bisect_right(self._starts, high - 1)
        return self._pieces[first:last]


@lru_cache(maxsize=256)  # weights and optimizer states are cut alike
def _dim(length: int, dim: int, geometry: Geometry) -> _Dim:
    return _Dim(length, dim, geometry)


class CutKind:
    """Tensors, not empty, that are cut alike."""

    def __init__(self, tensor: SliceTensor) -> None:
        geometry = tensor.geometry
        self.tensor = tensor
        self._dims = [_dim(length, dim, geometry) for dim, length in enumerate(tensor.shape)]
        first = next(iter(owner_ranks(geometry, tensor.owner).values()))
        replicated = {axis for axis, cut in enumerate(geometry.cuts) if cut.kind == "replicate"}
        self._base = [c if axis in replicated else 0 for axis, c in enumerate(first)]
        self._owned = tuple(c if axis in replicated else slice(None) for axis, c in enumerate(first))
        self._known: dict[Box, tuple[SliceAt, ...]] = {}

    def boxes_by_rank(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ranks of the owning replica, and how many boxes each holds."""
        sizes = self.tensor.geometry.axis_sizes
        boxes = np.ones(sizes, np.int64)
        for dim in self._dims:
            boxes *= dim.counts.reshape([n if axis in dim.axes else 1 for axis, n in enumerate(sizes)])
        ranks = np.array(self.tensor.geometry.ranks, np.int64).reshape(sizes)
        return ranks[self._owned].reshape(-1), boxes[self._owned].reshape(-1)

    def touching(self, box: Box) -> tuple[SliceAt, ...]:
        """The slices that share an element with a box."""
        found = self._known.get(box)
        if found is None:
            found = self._known[box] = tuple(self._find(box))
        return found

    def _find(self, box: Box) -> Iterator[SliceAt]:
        geometry = self.tensor.geometry
        per_dim = [d.overlapping(a, b) for d, a, b in zip(self._dims, box.start, box.stop, strict=True)]
        for pieces in product(*per_dim):
            coordinate, file = list(self._base), 0
            for dim, piece in zip(self._dims, pieces, strict=True):
                file = file * piece.count + piece.index
                for axis, index in zip(dim.axes, piece.coordinate, strict=True):
                    coordinate[axis] = index
            place = 0
            for size, index in zip(geometry.axis_sizes, coordinate, strict=True):
                place = place * size + index
            found = Box(tuple([p.start for p in pieces]), tuple([p.stop for p in pieces]))
            yield SliceAt(found, geometry.ranks[place], file)


class Spread:
    """The slices of the tensors of one directory.

    ``held`` maps each rank that has files to their number. ``kinds`` has None for tensors without elements.
    """

    def __init__(self, tensors: Sequence[SliceTensor]) -> None:
        order = in_file_order(tensors)
        kinds: dict[tuple[object, ...], int] = {}
        self._order = {t.name: position for position, t in enumerate(order)}
        self._kind_at: list[int] = []
        firsts: list[SliceTensor] = []
        for t in order:
            kind = kinds.setdefault((t.shape, t.geometry, t.owner, t.dtype), len(kinds))
            if kind == len(firsts):
                firsts.append(t)
            self._kind_at.append(kind)
        self._kinds_of_all = np.array(self._kind_at, np.int64)
        self._tensors = firsts
        self.kinds = [None if 0 in t.shape else CutKind(t) for t in firsts]
        self.held = self._count_files()

    def _count_files(self) -> dict[int, int]:
        most = max((max(t.geometry.ranks) for t in self._tensors), default=0)
        found = np.zeros(most + 1, np.int64)
        for tensor, kind in zip(self._tensors, self.kinds, strict=True):
            if kind is None:
                rank = next(iter(owner_ranks(tensor.geometry, tensor.owner)))
                found[rank] = max(found[rank], 1)
            else:
                ranks, boxes = kind.boxes_by_rank()
                found[ranks] = np.maximum(found[ranks], boxes)
        return {int(rank): int(found[rank]) for rank in np.flatnonzero(found)}

    def find(self, name: str) -> tuple[int, int]:
        """A tensor's position in the order of a file, and the index of its kind."""
        position = self._order[name]
        return position, self._kind_at[position]

    def offsets_bytes(self, rank: int, file: int) -> NDArray[np.int64]:
        """By position, the offset of each tensor in a file's payload, or where it would begin if it has no box there."""
        sizes = []
        for tensor in self._tensors:
            boxes = boxes_to_write(tensor, rank)
            sizes.append(boxes[file].box.numel * itemsize(tensor.dtype) if file < len(boxes) else 0)
        lengths = np.array(sizes, np.int64)[self._kinds_of_all]
        return np.cumsum(lengths) - lengths


def file_count(tensors: Sequence[SliceTensor]) -> int:
    """The largest number of slice files of any rank. Every slice file's name ends with it."""
    kinds = {(t.shape, t.geometry, t.owner, t.dtype): t for t in tensors}
    return max(Spread([*kinds.values()]).held.values(), default=0)
