"""Hard links to the files of a checkpoint's ``model/`` at its top, where ``from_pretrained`` looks."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from ..format.manifest import FileEntry
from ..models.assets import ADAPTERS_NAME
from ..ranks.patience import patiently
from ..store.write import fsync_directory, make_directories, write_file

__all__ = ["show_at_top"]

_log = logging.getLogger(__name__)
_FOLDER = "model/"


def show_at_top(root: str, files: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Link the files of ``model/`` into ``root``, except those already there. Returns all files' manifest entries.

    Links take no space. If the file system has none, small files are copied and weights are skipped with a warning.
    Weights of a model with adapters are skipped: ``from_pretrained`` can't build a model from them. For rank 0, before
    the manifest is written.
    """
    found = dict(files)
    inside = {
        name: name.removeprefix(_FOLDER)
        for name in files
        if name.startswith(_FOLDER) and name.removeprefix(_FOLDER) not in files
    }
    has_adapters = inside.pop(_FOLDER + ADAPTERS_NAME, None) is not None
    weights = {n: top for n, top in inside.items() if top.endswith(".safetensors") and "/" not in top}
    for name in weights:
        del inside[name]
    for name, top in inside.items():
        source, target = os.path.join(root, name), os.path.join(root, top)
        make_directories(os.path.dirname(target))
        try:
            patiently(os.link, source, target)
        except OSError:
            write_file(target, patiently(Path(source).read_bytes))
        found[top] = files[name]
    for folder in {os.path.dirname(top) for top in inside.values()} - {""}:
        fsync_directory(os.path.join(root, folder))
    if not has_adapters:
        found |= _link_weights(root, weights, files)
    return found


def _link_weights(
    root: str, weights: Mapping[str, str], files: Mapping[str, FileEntry]
) -> dict[str, FileEntry]:
    """Link all weights or none: a reader takes the files that it finds for the whole model."""
    try:
        for name, top in weights.items():
            patiently(os.link, os.path.join(root, name), os.path.join(root, top))
    except OSError as error:
        for top in weights.values():
            with contextlib.suppress(FileNotFoundError):
                patiently(os.unlink, os.path.join(root, top))
        _log.warning(
            "%s: no hard links here (%s): from_pretrained reads the weights in its folder model, not at its top",
            root,
            error.strerror,
        )
        return {}
    return {top: files[name] for name, top in weights.items()}
