"""Remembers how a live model was made. Export uses it to restore the stored names and shapes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..catalog.records import StoredTensor
from ..models.homes import inherit_home
from ..names import unwrap
from ..objects import frozen
from .match import Recipe

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Origin", "inherit", "recall", "remember"]


@frozen
class Origin:
    """The recipes of a load by wanted name, and the shapes of the stored tensors that they read."""

    recipes: Mapping[str, Recipe]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def is_plain(self) -> bool:
        """Whether every tensor was stored whole under its own name."""
        return all(
            r.empty == (name,) or (len(r.tiles) == 1 and r.tiles[0].source == name)
            for name, r in self.recipes.items()
        )


# Keyed by the model object, not stored on it: a model's attributes are its owner's.
_ORIGINS: weakref.WeakKeyDictionary[nn.Module, Origin] = weakref.WeakKeyDictionary()


def remember(model: nn.Module, recipes: Mapping[str, Recipe], stored: Mapping[str, StoredTensor]) -> None:
    """Keep the recipes with which ``model`` was filled, for as long as it lives.

    Keeps nothing if any tensor was converted whole: such a recipe can't be inverted.
    """
    sources = [s for r in recipes.values() for s in (*(t.source for t in r.tiles), *r.empty)]
    if not stored.keys() >= set(sources):
        _ORIGINS.pop(unwrap(model), None)
        return
    shapes = {source: stored[source].shape for source in sources}
    _ORIGINS[unwrap(model)] = Origin(dict(recipes), shapes)


def recall(model: nn.Module) -> Origin | None:
    """The origin of a model's last load from a source with other names; None if there was none."""
    return _ORIGINS.get(unwrap(model))


def inherit(model: nn.Module, ancestor: nn.Module) -> None:
    """Note that ``model`` has the same origin as ``ancestor``."""
    own, given = unwrap(model), unwrap(ancestor)
    if given in _ORIGINS:
        _ORIGINS[own] = _ORIGINS[given]
    inherit_home(own, given)
