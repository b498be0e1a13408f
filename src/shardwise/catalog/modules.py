"""Reads ``modules.json``, by which sentence-transformers finds the modules of a model: transformers' and further ones."""

from __future__ import annotations

import os

from ..errors import SourceError
from ..limits import is_inside, read_shallow_json
from ..objects import frozen
from ..storage import is_directory, is_file
from .weights import Choice, weights_in

__all__ = ["Module", "modules_in", "weights_of_modules"]

MODULES_NAME = "modules.json"
_MOST = 100


@frozen
class Module:
    """One module of a sentence-transformers model."""

    folder: str
    """Relative to the model's directory; empty for the directory itself."""
    type: str
    """The name of its class, with the Python module."""


def modules_in(root: str) -> tuple[Module, ...]:
    """The modules that ``modules.json`` of a directory lists, in order; empty without a file of this form. Rank-local."""
    file = os.path.join(root, MODULES_NAME)
    try:
        document = read_shallow_json(file, "list of modules") if is_file(file) else []
    except SourceError:
        return ()
    found = []
    for entry in document[:_MOST] if isinstance(document, list) else []:
        folder, kind = (entry.get("path"), entry.get("type")) if isinstance(entry, dict) else (None, None)
        if isinstance(kind, str) and (folder == "" or is_inside(folder)):
            found.append(Module(str(folder), kind))
    return tuple(found)


def weights_of_modules(root: str) -> tuple[str, ...]:
    """The weights of modules in folders of their own (``2_Dense/model.safetensors``), relative to ``root``. Rank-local."""
    found = []
    for module in modules_in(root):
        folder = os.path.join(root, module.folder)
        if module.folder and is_directory(folder) and (weights := weights_in(folder, Choice())) is not None:
            found.append(f"{module.folder}/{weights.name}")
    return tuple(found)
