"""Proof of cover: every wanted element is written exactly once, every stored tensor is used or declared.

Whole tensors are checked, not a rank's boxes. Cutting a tile by boxes neither adds nor drops elements, so the proof
holds on every rank, and every rank finds the same problems without talking to another.
"""

from __future__ import annotations

import math

from ..catalog.records import Catalog
from ..errors import PlanError
from ..layout.boxes import Box, whole
from ..layout.wanted import Layout, Wanted
from ..recipe.match import Matched
from ..recipe.tiles import Tile, bounds, is_identity, is_injective, tiles_overlap

__all__ = ["cover_problems", "prove_cover"]


def prove_cover(catalog: Catalog, layout: Layout, matched: Matched) -> None:
    """Raise :class:`PlanError` listing every problem, unless recipes cover the wanted tensors exactly once."""
    problems = list(matched.problems)
    proved: dict[tuple[object, ...], object] = {}
    for wanted in layout.wanted:
        recipe = matched.recipes.get(wanted.name)
        for tiles in () if recipe is None else (recipe.tiles, *recipe.copies):
            # By identity: layers that are made alike share these objects, and hashing them would take longer than the proof.
            shapes = [catalog.tensors[tile.source].shape for tile in tiles]
            parts = [(id(t.loops), id(t.source_start), id(t.target_start)) for t in tiles]
            key = (wanted.shape, *parts, *map(id, shapes))
            if key not in proved:
                if found := cover_problems(wanted, tiles, catalog):
                    problems += found
                else:
                    proved[key] = tiles, shapes  # which keeps the objects, and so their ids
    if problems:
        raise PlanError(
            f"{catalog.root} can't fill this model completely: {len(problems)} problems", tuple(problems)
        )


def cover_problems(wanted: Wanted, tiles: tuple[Tile, ...], catalog: Catalog) -> list[str]:
    """Problems that keep tiles from covering a wanted tensor exactly once, reading only existing elements."""
    whole_shape = catalog.tensors[tiles[0].source].shape if len(tiles) == 1 else None
    if whole_shape == wanted.shape and is_identity(tiles[0], wanted.shape):
        return []  # stored as it is wanted
    problems: list[str] = []
    reaches: list[tuple[Box, Tile]] = []
    target, held = whole(wanted.shape), 0
    for tile in tiles:
        if numel := tile.numel:
            held += numel
            reaches.append((bounds(tile, "target"), tile))
            source = whole(catalog.tensors[tile.source].shape)
            problems += [
                f"not covered: {wanted.name!r}: a tile reaches outside the {side} {tile.source!r}"
                for side, shape, reach in (
                    ("target", target, reaches[-1][0]),
                    ("source", source, bounds(tile, "source")),
                )
                if not shape.contains(reach)
            ]
        if not is_injective(tile, "target"):
            problems.append(
                f"overlapping: {wanted.name!r}: a tile of {tile.source!r} writes an element twice"
            )
    expected = math.prod(wanted.shape)
    if held != expected:
        problems.append(f"not covered: {wanted.name!r} has {expected} elements, its tiles write {held}")
    pair = _overlap(reaches)
    if pair:
        problems.append(
            f"overlapping: {wanted.name!r}: {pair[0].source!r} and {pair[1].source!r} write one element"
        )
    return problems


def _overlap(reaches: list[tuple[Box, Tile]]) -> tuple[Tile, Tile] | None:
    """Two tiles that write a common element, found by a sweep along target dim 0. Each with its bounds, none empty."""
    if len(reaches) < 2:
        return None
    if not reaches[0][1].target_start:
        return reaches[0][1], reaches[1][1]
    open_tiles: list[tuple[int, Tile]] = []
    for box, tile in sorted(reaches, key=lambda pair: pair[0]):
        open_tiles = [(stop, t) for stop, t in open_tiles if stop > box.start[0]]
        for _, other in open_tiles:
            if tiles_overlap(other, tile, "target"):
                return other, tile
        open_tiles.append((box.stop[0], tile))
    return None
