"""Remembering how a live model was made, so that export can give the stored names back."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from .match import Recipe

if TYPE_CHECKING:
    from torch import nn

__all__ = ["recall", "remember"]

# Keyed by the model object, not stored on it: a model's attributes are its owner's.
_RECIPES: weakref.WeakKeyDictionary[nn.Module, dict[str, Recipe]] = weakref.WeakKeyDictionary()


def remember(model: nn.Module, recipes: dict[str, Recipe]) -> None:
    """Keep the recipes with which ``model`` was filled, for as long as it lives."""
    _RECIPES[model] = recipes


def recall(model: nn.Module) -> dict[str, Recipe] | None:
    """The recipes of the last load into ``model``, by wanted name; None if it was never loaded."""
    return _RECIPES.get(model)
