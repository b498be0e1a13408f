"""Tiles: the one idea behind loading, conversion, resharding and export. Plain integers, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from ..objects import frozen
from .boxes import Box

# ----------------------------------------------------------------------------------------------------
# Tiles: the one idea behind loading, conversion, resharding and export. Plain integers, no torch.
#
# A tile says that a set of elements of a *target* tensor are elements of one *source* tensor: a nest of
# loops, where each loop steps along one dim of the source and along one dim of the target (as a DMA
# descriptor does). Loop index ``(i0, i1, …)`` pairs
#
#     source index  source_start + Σ i_k · source_step_k · e(source_dim_k)
#     target index  target_start + Σ i_k · target_step_k · e(target_dim_k)
#
# Identity and rename are one tile; a transpose is one tile with its dims swapped; concatenation is
# several tiles; a view that merges or splits dims is one tile with several loops on one dim. A shard is the rest of a
# tile after cutting both sides by boxes; cutting never changes which source element goes to which target element.

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


# ----------------------------------------------------------------------------------------------------
# Rewrites the tiles of a tensor when the tensor is viewed, cut, joined or permuted.
#
# Every function takes the tiles that make up a tensor and returns those of the result; only target sides change. Plain
# integers, no torch. Used by tracing (``trace.py``), tested against numpy.

Tiles = tuple[Tile, ...]

#: A loop that can't be split along a new dim becomes one tile per iteration, up to this many.
_MOST_ITERATIONS = 4096


class Untraceable(Exception):
    """An operation, or its arguments, that tiles can't express."""


def permute(tiles: Tiles, dims: Sequence[int]) -> Tiles:
    """Dim k of the result is dim ``dims[k]`` of the tensor."""
    place = {dim: k for k, dim in enumerate(dims)}
    return tuple(
        replace(
            t,
            loops=tuple(replace(loop, target_dim=place[loop.target_dim]) for loop in t.loops),
            target_start=tuple(t.target_start[d] for d in dims),
        )
        for t in tiles
    )


def narrow(tiles: Tiles, shape: Sequence[int], dim: int, start: int, stop: int) -> Tiles:
    """Indices start … stop-1 of one dim."""
    low = tuple(start if d == dim else 0 for d in range(len(shape)))
    high = tuple(stop if d == dim else n for d, n in enumerate(shape))
    shift = tuple(-a for a in low)
    return tuple(translate(p, "target", shift) for t in tiles for p in cut(t, "target", Box(low, high)))


def squeeze(tiles: Tiles, dim: int) -> Tiles:
    """Drop one dim of size 1 (no loop moves along it)."""
    return tuple(
        Tile(
            t.source,
            _moved(t.loops, dim, -1),
            t.source_start,
            t.target_start[:dim] + t.target_start[dim + 1 :],
        )
        for t in tiles
    )


def unsqueeze(tiles: Tiles, dim: int) -> Tiles:
    """Add a dim of size 1."""
    return tuple(
        Tile(
            t.source,
            _moved(t.loops, dim - 1, 1),
            t.source_start,
            (*t.target_start[:dim], 0, *t.target_start[dim:]),
        )
        for t in tiles
    )


@lru_cache(maxsize=256)  # tens of thousands of experts have the same loops
def _moved(loops: tuple[Loop, ...], above: int, by: int) -> tuple[Loop, ...]:
    return tuple([v if v.target_dim <= above else replace(v, target_dim=v.target_dim + by) for v in loops])


def select(tiles: Tiles, shape: Sequence[int], dim: int, index: int) -> Tiles:
    """One index of one dim, which disappears."""
    return squeeze(narrow(tiles, shape, dim, index, index + 1), dim)


def join(parts: Sequence[tuple[Tiles, int]], ndim: int, dim: int) -> Tiles:
    """Tensors one after another along a dim; each part comes with its size there."""
    found: list[Tile] = []
    base = 0
    for tiles, size in parts:
        shift = tuple(base if d == dim else 0 for d in range(ndim))
        found += (translate(t, "target", shift) for t in tiles)
        base += size
    return tuple(found)


def reshape(tiles: Tiles, shape: Sequence[int], new_shape: Sequence[int]) -> Tiles:
    """The same elements in row-major order under another shape.

    Dims that do not change keep their tiles; between them, dims are merged into one and split again.
    """
    assert math.prod(shape) == math.prod(new_shape), (shape, new_shape)
    if math.prod(shape) == 0:
        return ()
    found = tiles
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            found = squeeze(found, dim)
    old_sizes = [n for n in shape if n != 1]
    for old, new in reversed(_groups(old_sizes, [n for n in new_shape if n != 1])):
        if old_sizes[old.start : old.stop] == new:  # from the last: earlier dim numbers stay valid
            continue
        found = tuple(_merge(t, list(old), old_sizes[old.start : old.stop]) for t in found)
        for size in reversed(new[1:]):
            found = tuple(p for t in found for p in _split(t, old.start, size))
    for dim, size in enumerate(new_shape):
        if size == 1:
            found = unsqueeze(found, dim)
    return found


def _groups(sizes: Sequence[int], new_sizes: Sequence[int]) -> list[tuple[range, list[int]]]:
    """Runs of old dims and the new sizes with as many elements, in order. All sizes are above 1."""
    groups = []
    i = j = 0
    while i < len(sizes):
        first_old, first_new = i, j
        a, b = sizes[i], new_sizes[j]
        while a != b:
            if a < b:
                i += 1
                a *= sizes[i]
            else:
                j += 1
                b *= new_sizes[j]
        i, j = i + 1, j + 1
        groups.append((range(first_old, i), list(new_sizes[first_new:j])))
    return groups


def _merge(tile: Tile, dims: Sequence[int], sizes: Sequence[int]) -> Tile:
    """The tile with adjacent target dims merged into the first of them."""
    if len(dims) == 1:
        return tile
    strides = {}
    step = 1
    for dim, size in zip(reversed(dims), reversed(sizes), strict=True):
        strides[dim] = step
        step *= size
    first, gone = dims[0], len(dims) - 1
    start = sum(tile.target_start[d] * strides[d] for d in dims)
    loops = []
    for loop in tile.loops:
        if loop.target_dim in strides:
            loops.append(
                replace(loop, target_dim=first, target_step=loop.target_step * strides[loop.target_dim])
            )
        else:
            loops += _moved((loop,), dims[-1], -gone)
    target_start = (*tile.target_start[:first], start, *tile.target_start[dims[-1] + 1 :])
    return replace(tile, loops=tuple(loops), target_start=target_start)


def _split(tile: Tile, dim: int, inner: int) -> Iterator[Tile]:
    """Pieces of the tile with one target dim split into (dim, dim + 1), the latter of size ``inner``."""
    for piece in _aligned(tile, dim, inner):
        loops: list[Loop] = []
        for loop in piece.loops:
            if loop.target_dim != dim:
                loops += _moved((loop,), dim, 1)
            elif loop.target_step % inner == 0:
                loops.append(replace(loop, target_step=loop.target_step // inner))
            else:
                loops.append(replace(loop, target_dim=dim + 1))
        outer, rest = divmod(piece.target_start[dim], inner)
        start = (*piece.target_start[:dim], outer, rest, *piece.target_start[dim + 1 :])
        yield replace(piece, loops=tuple(loops), target_start=start)


def _aligned(tile: Tile, dim: int, inner: int) -> Iterator[Tile]:
    """Pieces in which every loop along a dim either steps whole rows of ``inner``, or stays within one row."""
    within = [k for k, v in enumerate(tile.loops) if v.target_dim == dim and v.target_step % inner]
    reach = sum(tile.loops[k].target_step * (tile.loops[k].size - 1) for k in within)
    start = tile.target_start[dim]
    if start % inner + reach < inner:
        yield tile
        return
    k = max(within, key=lambda k: tile.loops[k].target_step)
    loop = tile.loops[k]
    if inner % loop.target_step:
        if loop.size > _MOST_ITERATIONS:
            raise Untraceable(f"a view cuts {loop.size} steps of {loop.target_step} into rows of {inner}")
        for i in range(loop.size):
            yield from _aligned(iterations(tile, k, i, i + 1), dim, inner)
        return
    per_row, offset = inner // loop.target_step, start % inner
    if offset < loop.target_step and loop.size > per_row:
        rows = loop.size // per_row
        body = iterations(tile, k, 0, rows * per_row)
        yield from _aligned(_two_loops(body, k, per_row), dim, inner)
        done = rows * per_row
    else:  # up to the end of the row; elements inside a step may reach across it
        inside = reach - loop.target_step * (loop.size - 1)
        done = max(0, (inner - 1 - offset - inside) // loop.target_step + 1)
        if done:
            yield iterations(tile, k, 0, done)
        if offset + done * loop.target_step < inner:
            yield from _aligned(iterations(tile, k, done, done + 1), dim, inner)
            done += 1
    if done < loop.size:
        yield from _aligned(iterations(tile, k, done, loop.size), dim, inner)


def _two_loops(tile: Tile, k: int, per_row: int) -> Tile:
    """Loop k written as rows times steps within a row."""
    loop = tile.loops[k]
    rows = loop.size // per_row
    outer = Loop(
        rows, loop.source_dim, loop.source_step * per_row, loop.target_dim, loop.target_step * per_row
    )
    pair = tuple(v for v in (outer, replace(loop, size=per_row)) if v.size > 1)
    return replace(tile, loops=(*tile.loops[:k], *pair, *tile.loops[k + 1 :]))
