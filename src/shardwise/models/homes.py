"""Remembering the directory that a model was built from, so that export can copy its config and tokenizer."""

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
    """Keep the absolute path of the directory that a model's config came from, whatever is done to the cwd."""
    _HOMES[unwrap(model)] = os.path.abspath(directory)


def home_of(model: nn.Module) -> str | None:
    """The directory of a model's config and tokenizer; None if it was not built from one."""
    return _HOMES.get(unwrap(model))


def inherit_home(model: nn.Module, ancestor: nn.Module) -> None:
    """``model`` was built from the same directory as ``ancestor``, if that was built from one."""
    if (home := home_of(ancestor)) is not None:
        _HOMES[unwrap(model)] = home
