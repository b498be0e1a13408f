"""The tensors of an export: hub tensors, and which of their elements each module tensor holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..errors import FormatError
from ..layout.spec import TensorSpec
from ..objects import frozen
from ..recipe.match import Recipe
from ..recipe.tiles import Tile, identity, invert
from ..recipe.transformers import reverse_tiles

__all__ = ["HubTensors", "as_named", "inverted", "reverted"]


@frozen
class HubTensors:
    """Hub tensors by name with dtype and shape, and the tiles of them that each module tensor holds.

    A tile's source is a hub tensor, its target a module tensor: an export runs the load's tiles in reverse.
    """

    hub: dict[str, TensorSpec]
    tiles: dict[str, tuple[Tile, ...]]


def as_named(specs: Mapping[str, TensorSpec]) -> HubTensors:
    """Module tensors under their own names."""
    return HubTensors(dict(specs), {n: (identity(n, spec.shape),) for n, spec in specs.items()})


def reverted(meta_model: Any, specs: Mapping[str, TensorSpec]) -> HubTensors:
    """Module tensors with the hub names and shapes from the library's own reverse transforms."""
    hub, tiles = {}, {n: [] for n in specs}  # type: ignore[var-annotated]
    for made in reverse_tiles(meta_model, specs):
        hub[made.target] = TensorSpec(made.dtype, made.shape)
        for tile in made.tiles:
            tiles[tile.source].append(invert(tile, made.target))
    return _checked(HubTensors(hub, {n: tuple(found) for n, found in tiles.items()}))


def inverted(
    specs: Mapping[str, TensorSpec],
    recipes: Mapping[str, Recipe],
    shapes: Mapping[str, tuple[int, ...]],
) -> HubTensors:
    """Module tensors as the tensors that they were loaded from; initialized tensors keep their own names."""
    hub: dict[str, TensorSpec] = {}
    tiles = {}
    for name, (code, shape) in specs.items():
        recipe = recipes.get(name)
        tiles[name] = recipe.tiles if recipe is not None else (identity(name, shape),)
        for source in recipe.empty if recipe is not None else ():
            hub[source] = TensorSpec(code, tuple(shapes[source]))
        for tile in tiles[name]:
            known = hub.setdefault(tile.source, TensorSpec(code, tuple(shapes.get(tile.source, shape))))
            if known.dtype != code:
                raise FormatError(
                    f"{tile.source!r} would be written from tensors of dtypes {known.dtype} and {code}"
                )
    return _checked(HubTensors(hub, tiles))


def _checked(contents: HubTensors) -> HubTensors:
    """Check that every element of every hub tensor is written once. Raises :class:`FormatError` naming the rest."""
    held: Counter[str] = Counter()
    for found in contents.tiles.values():
        for tile in found:
            held[tile.source] += tile.numel
    wrong = [n for n, spec in contents.hub.items() if held[n] != math.prod(spec.shape)]
    if wrong:
        raise FormatError(
            f"{len(wrong)} tensors can't be given back whole, because the model holds only parts of them: "
            f"{', '.join(wrong[:5])}"
        )
    return contents
