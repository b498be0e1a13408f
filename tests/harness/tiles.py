"""What a tile does, element by element: the definition that tests compare with."""

from __future__ import annotations

from itertools import product

from shardwise.tensors.tiles import Tile

__all__ = ["Index", "pairs"]

Index = tuple[int, ...]


def pairs(tile: Tile) -> list[tuple[Index, Index]]:
    """(source index, target index) of every iteration, by the definition in the docstring of tensors/tiles.py."""
    found = []
    for steps in product(*(range(loop.size) for loop in tile.loops)):
        source, target = list(tile.source_start), list(tile.target_start)
        for i, loop in zip(steps, tile.loops, strict=True):
            source[loop.source_dim] += i * loop.source_step
            target[loop.target_dim] += i * loop.target_step
        found.append((tuple(source), tuple(target)))
    return found
