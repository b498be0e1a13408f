"""Remembers the directory that a model was built from, and the quantized source that filled it.

Export copies config and tokenizer from the one, and writes the format of the other.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..catalog.records import Catalog
from ..names import unwrap
from ..objects import frozen
from ..storage import is_url

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "LoadedFrom",
    "home_of",
    "inherit_home",
    "remember_home",
    "remember_source",
    "source_of",
    "versions_of",
]

# Keyed by the model object, not stored on it: a model's attributes are its owner's.
_HOMES: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_SOURCES: weakref.WeakKeyDictionary[nn.Module, LoadedFrom] = weakref.WeakKeyDictionary()


@frozen
class LoadedFrom:
    """A quantized source, and its files as they were when a model was filled from it."""

    root: str
    versions: Mapping[str, tuple[int, object]]
    """As :func:`versions_of`."""


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
    if (source := source_of(ancestor)) is not None:
        _SOURCES[unwrap(model)] = source


def remember_source(models: Iterable[nn.Module], catalog: Catalog) -> None:
    """Note the source that a model was filled from, if it is quantized. ``models``: it, and what is inside its wrappers."""
    if catalog.coded:
        root = catalog.root if is_url(catalog.root) else os.path.abspath(catalog.root)
        source = LoadedFrom(root, versions_of(catalog))
        for model in models:
            _SOURCES[unwrap(model)] = source


def source_of(model: nn.Module) -> LoadedFrom | None:
    """The quantized source of a model's last load from one; None if there was none."""
    return _SOURCES.get(unwrap(model))


def versions_of(catalog: Catalog) -> dict[str, tuple[int, object]]:
    """What tells whether the files of a source are still the same: of each its size, and its time or the store's version."""
    found: dict[str, tuple[int, object]] = {}
    for file in catalog.files:
        if is_url(file.path):
            found[file.path] = file.nbytes, file.version
        else:
            path = os.path.abspath(file.path)
            found[path] = file.nbytes, os.stat(path).st_mtime_ns
    return found
