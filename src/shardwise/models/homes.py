"""Remembers the directory that a model was built from. Export copies config and tokenizer from it."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from ..names import unwrap

if TYPE_CHECKING:
    from torch import nn

__all__ = ["home_of", "inherit_home", "remember_home"]

# Keyed by the model object, not stored on it: a model's attributes are its owner's.
_HOMES: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def remember_home(model: nn.Module, directory: str) -> None:
    """Keep the absolute path of the directory of a model's config: the working directory may change."""
    _HOMES[unwrap(model)] = os.path.abspath(directory)


def home_of(model: nn.Module) -> str | None:
    """The directory of a model's config and tokenizer; None if it was not built from one."""
    return _HOMES.get(unwrap(model))


def inherit_home(model: nn.Module, ancestor: nn.Module) -> None:
    """Note that ``model`` was built from the same directory as ``ancestor``, if any."""
    if (home := home_of(ancestor)) is not None:
        _HOMES[unwrap(model)] = home
