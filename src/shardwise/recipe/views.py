"""Rewrites the tiles of a tensor when the tensor is viewed, cut, joined or permuted.

Every function takes the tiles that make up a tensor and returns those of the result; only target sides change. Plain
integers, no torch. Used by tracing (``trace.py``), tested against numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from ..layout.boxes import Box
from .tiles import Loop, Tile, cut, iterations, translate

__all__ = ["Untraceable", "join", "narrow", "permute", "reshape", "select", "squeeze", "unsqueeze"]

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
