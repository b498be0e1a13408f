"""Tiles: the one idea behind loading, conversion, resharding and export. Plain integers, no torch.

A tile says that a set of elements of a *target* tensor are elements of one *source* tensor: a nest of
loops, where each loop steps along one dim of the source and along one dim of the target (as a DMA
descriptor does). Loop index ``(i0, i1, …)`` pairs

    source index  source_start + Σ i_k · source_step_k · e(source_dim_k)
    target index  target_start + Σ i_k · target_step_k · e(target_dim_k)

Identity and rename are one tile; a transpose is one tile with its dims swapped; concatenation is
several tiles; a view that merges or splits dims is one tile with several loops on one dim. A shard is the rest of a
tile after cutting both sides by boxes; cutting never changes which source element goes to which target element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from ..layout.boxes import Box
from ..objects import frozen

__all__ = [
    "Loop",
    "Tile",
    "bounds",
    "cut",
    "identity",
    "invert",
    "is_identity",
    "is_injective",
    "iterations",
    "tiles_overlap",
    "translate",
]

Side = Literal["source", "target"]


@frozen
class Loop:
    """One loop of a tile: ``size`` steps along a dim of the source and a dim of the target. Steps are ≥ 1."""

    size: int
    source_dim: int
    source_step: int
    target_dim: int
    target_step: int

    def on(self, side: Side) -> tuple[int, int]:
        """(dim, step) on one side."""
        if side == "source":
            return self.source_dim, self.source_step
        return self.target_dim, self.target_step


@frozen
class Tile:
    """Elements of a target tensor that are elements of the source tensor named ``source``."""

    source: str
    loops: tuple[Loop, ...]
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod([loop.size for loop in self.loops])

    def start(self, side: Side) -> tuple[int, ...]:
        return self.source_start if side == "source" else self.target_start


def identity(source: str, shape: Sequence[int]) -> Tile:
    """The tile of a tensor stored as it is wanted."""
    return Tile(source, *_identity(tuple(shape)))


@lru_cache(maxsize=4096)  # most tensors are stored as they are wanted, and many share a shape
def _identity(shape: tuple[int, ...]) -> tuple[tuple[Loop, ...], tuple[int, ...], tuple[int, ...]]:
    loops = tuple([Loop(n, d, 1, d, 1) for d, n in enumerate(shape) if n != 1])
    zero = (0,) * len(shape)
    return loops, zero, zero


def is_identity(tile: Tile, shape: tuple[int, ...]) -> bool:
    """Whether a tile is :func:`identity` of a tensor of this shape."""
    return (tile.loops, tile.source_start, tile.target_start) == _identity(shape)


def invert(tile: Tile, target: str) -> Tile:
    """The same pairs of elements with source and target swapped; ``target`` names the former target."""
    loops = tuple(Loop(v.size, v.target_dim, v.target_step, v.source_dim, v.source_step) for v in tile.loops)
    return Tile(target, loops, tile.target_start, tile.source_start)


def bounds(tile: Tile, side: Side) -> Box:
    """The smallest box that holds every element of a tile (which must not be empty) on one side."""
    if side == "source":
        start, reach = tile.source_start, [(v.source_dim, v.source_step * (v.size - 1)) for v in tile.loops]
    else:
        start, reach = tile.target_start, [(v.target_dim, v.target_step * (v.size - 1)) for v in tile.loops]
    stop = [s + 1 for s in start]
    for dim, n in reach:
        stop[dim] += n
    return Box(start, tuple(stop))


def is_dense(tile: Tile, side: Side) -> bool:
    """Whether a tile's elements fill its bounds on one side, each named once."""
    return bounds(tile, side).numel == tile.numel and is_injective(tile, side)


def translate(tile: Tile, side: Side, offset: Sequence[int]) -> Tile:
    """The tile with one side's start moved by ``offset`` (to go from global to local indices)."""
    moved = tuple([s + o for s, o in zip(tile.start(side), offset, strict=True)])
    if side == "source":
        return Tile(tile.source, tile.loops, moved, tile.target_start)
    return Tile(tile.source, tile.loops, tile.source_start, moved)


def cut(tile: Tile, side: Side, box: Box) -> Iterator[Tile]:
    """The part of a tile whose elements lie inside ``box`` on one side, as few disjoint tiles."""
    if tile.numel == 0:
        return
    reach = bounds(tile, side)
    if box.contains(reach):  # as most are, or lie outside of it: parts of a stack
        yield tile
        return
    if box.intersect(reach) is None:
        return
    parts = [tile]
    for dim, (low, high) in enumerate(zip(box.start, box.stop, strict=True)):
        parts = [piece for part in parts for piece in _cut_dim(part, side, dim, low, high)]
    yield from parts


def _cut_dim(tile: Tile, side: Side, dim: int, low: int, high: int) -> Iterator[Tile]:
    """The part of a tile with ``low <= index < high`` along one dim of one side."""
    first = tile.start(side)[dim]
    mine = [k for k, loop in enumerate(tile.loops) if loop.on(side)[0] == dim]
    last = first + sum(tile.loops[k].on(side)[1] * (tile.loops[k].size - 1) for k in mine)
    if low <= first and last < high:
        yield tile
        return
    if high <= first or last < low:
        return
    # Several loops may move along this dim. Split the one with the largest step into the iterations that lie
    # wholly inside (one tile) and at most a few at the edges (cut further along the inner loops).
    k = max(mine, key=lambda k: tile.loops[k].on(side)[1])
    loop = tile.loops[k]
    step = loop.on(side)[1]
    inner = last - first - step * (loop.size - 1)  # how far the other loops reach
    begin = max(0, -(-(low - first - inner) // step))  # first iteration that touches [low, high)
    end = min(loop.size, (high - 1 - first) // step + 1)
    full_begin = max(begin, -(-(low - first) // step))
    full_end = min(end, (high - 1 - first - inner) // step + 1)
    if full_begin >= full_end:
        full_begin = full_end = end
    for i in range(begin, full_begin):
        yield from _cut_dim(iterations(tile, k, i, i + 1), side, dim, low, high)
    if full_begin < full_end:
        yield iterations(tile, k, full_begin, full_end)
    for i in range(full_end, end):
        yield from _cut_dim(iterations(tile, k, i, i + 1), side, dim, low, high)


def iterations(tile: Tile, k: int, begin: int, end: int) -> Tile:
    """The tile with loop k restricted to iterations begin … end-1."""
    loop = tile.loops[k]
    source_start = list(tile.source_start)
    target_start = list(tile.target_start)
    source_start[loop.source_dim] += begin * loop.source_step
    target_start[loop.target_dim] += begin * loop.target_step
    rest = (replace(loop, size=end - begin),) if end - begin > 1 else ()
    loops = (*tile.loops[:k], *rest, *tile.loops[k + 1 :])
    return Tile(tile.source, loops, tuple(source_start), tuple(target_start))


def is_injective(tile: Tile, side: Side) -> bool:
    """Whether no element of one side is named twice by the tile. Exact for nested steps, else conservative."""
    if len({loop.on(side)[0] for loop in tile.loops}) == len(tile.loops):
        return True  # one loop for each dim
    by_dim: dict[int, list[tuple[int, int]]] = {}
    for loop in tile.loops:
        dim, step = loop.on(side)
        by_dim.setdefault(dim, []).append((step, loop.size))
    for loops in by_dim.values():
        reach = 0
        for step, size in sorted(loops):
            if size > 1 and step <= reach:
                return False
            reach += step * (size - 1)
    return True


def tiles_overlap(a: Tile, b: Tile, side: Side) -> bool:
    """Whether two tiles name a common element on one side.

    A tile's set is a product over dims of 1-D sets (each loop moves along one dim), so two tiles
    overlap exactly if their 1-D sets meet in every dim.
    """
    if not a.numel or not b.numel or not bounds(a, side).intersect(bounds(b, side)):
        return False
    if is_dense(a, side) and is_dense(b, side):
        return True
    dims = range(len(a.start(side)))
    return all(_indices(a, side, dim) & _indices(b, side, dim) for dim in dims)


def _indices(tile: Tile, side: Side, dim: int) -> set[int]:
    """Every index that a tile touches along one dim."""
    found = {tile.start(side)[dim]}
    for loop in tile.loops:
        loop_dim, step = loop.on(side)
        if loop_dim == dim:
            found = {base + step * i for base in found for i in range(loop.size)}
    return found
