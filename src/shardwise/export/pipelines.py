"""Exports of diffusers pipelines: each model by the export of one model, everything else as diffusers saves it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from ..catalog.checkpoint import directory
from ..catalog.records import PIPELINE_NAME
from ..errors import CheckpointError, SourceError
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..internals.diffusers import is_pipeline, save_others
from ..internals.sentence_transformers import is_sentence_class, save_without_weights, weighted_modules
from ..loading.pipelines import find_pipeline
from ..models.homes import ADAPTERS_NAME
from ..models.hub import HubOptions
from ..publish.lock import remove_ours
from ..ranks.ranks import Ranks, patiently
from ..storage import is_file
from ..storage.records import is_url, join
from .write import make_room, publish_directory

T = TypeVar("T")
#: What a training state calls its model if it has only one; others are extras with sharded tensors.
_ONLY = "model"


def models_of(parts: Any) -> dict[str, nn.Module] | None:
    """The models of a live pipeline, or of a dict of some of its components, by name; None for anything else.

    A sentence-transformers model is a pipeline, too: of its modules that have weights, by folder.
    """
    if is_sentence_class(type(parts)):
        return weighted_modules(parts)
    if is_pipeline(parts):
        parts = parts.components
    if not isinstance(parts, Mapping):
        return None
    return {str(name): part for name, part in parts.items() if isinstance(part, nn.Module)}


def stored_models(path: str | os.PathLike[str], component: str | None) -> dict[str, str | None]:
    """The models of a checkpoint by the components of a pipeline that they are, or ``component`` alone. Rank-local.

    ``component`` names the model of a checkpoint that has only one, apart from its extras, or of another source, where it is None. ``"transformer=ema"``
    takes the model ``ema`` for the component ``transformer``. Raises :class:`SourceError` if that is missing.
    """
    root = os.fspath(path)
    manifest = read_manifest(root) if is_file(join(root, MANIFEST_NAME)) else None
    names: list[str | None] = [None] if manifest is None else [*manifest.models]
    if component is not None:
        component, _, name = component.partition("=")
        chosen: str | None = name or component
        if not name and component not in names:
            chosen = _ONLY if _ONLY in names else names[0] if len(names) == 1 else component
        found = {component: chosen}
    elif names == [None] or _ONLY in names:
        raise SourceError(
            "has one model; say which component it is: model_name='transformer' (--model transformer)",
            path=root,
        )
    else:
        found = {str(name): name for name in names}
    for chosen in found.values():
        if chosen not in names:
            raise SourceError(f"has no model {chosen!r}; it has {', '.join(map(str, names))}", path=root)
        if manifest is not None and f"{directory('model', str(chosen))}/{ADAPTERS_NAME}" in manifest.files:
            raise SourceError(
                f"its model {chosen!r} has adapters, and a pipeline needs the whole model: load the model with adapter=, restore the step, and export "
                "the live model with merge=True",
                path=root,
            )
    return found


def write_pipeline(
    parts: Any,
    models: Mapping[str, Any],
    final: str,
    source: str | os.PathLike[str] | None,
    write: Callable[[Any, str], T],
    ranks: Ranks,
    *,
    overwrite: bool,
) -> dict[str, T]:
    """Write a pipeline into a local directory, which appears complete or not at all. Returns what ``write`` gave, by model.

    ``models``: those of ``parts``, by component. ``parts``: a live pipeline, or models of the pipeline in ``source``, from which everything else is
    copied. Every rank must call it. Raises :class:`CheckpointError` for a place that is taken, :class:`SourceError` for a source that is no
    pipeline.
    """
    in_modules = is_sentence_class(type(parts))
    with ranks.agree("check arguments"):
        if is_url(final):
            raise ValueError(
                f"a pipeline is exported into a local directory; export its models to {final} one by one"
            )
        if source is None and not (in_modules or is_pipeline(parts)):
            raise ValueError(
                "a dict of models needs pipeline=, the pipeline that everything else is copied from"
            )
        if source is not None and in_modules:
            raise ValueError(
                f"pipeline= doesn't apply to a {type(parts).__name__}, which has all of its parts itself"
            )
        if not models:
            raise ValueError(f"there is no model among {list(parts)}")
    folder = "" if source is None else find_pipeline(source, HubOptions(), models, ranks, needed=models)[0]
    places = {name: f".parts/{k}" if in_modules else name for k, name in enumerate(models)}
    temporary = ranks.on_first(
        "make export directory", lambda: make_room(final, sorted(places.values()), overwrite=overwrite)
    )
    try:
        found = {name: write(model, os.path.join(temporary, places[name])) for name, model in models.items()}

        def finish() -> None:
            if in_modules:
                save_without_weights(parts, temporary)
                for name, place in places.items():
                    _move_in(os.path.join(temporary, place), os.path.join(temporary, name))
                remove_ours(os.path.join(temporary, ".parts"))
            elif folder:
                _copy_others(folder, temporary, models)
            else:
                save_others(parts, temporary, models)
            publish_directory(temporary, final, overwrite=overwrite)

        ranks.on_first("write the other components", finish)
    except BaseException:
        if ranks.rank == 0:
            remove_ours(temporary)
        raise
    return found


def _move_in(exported: str, folder: str) -> None:
    """Move an exported model's weights, and the files that its module didn't save, into the module's folder."""
    for name in os.listdir(exported):
        to = os.path.join(folder, name)
        if ".safetensors" in name or not os.path.lexists(to):
            os.replace(os.path.join(exported, name), to)


def _copy_others(folder: str, temporary: str, models: Mapping[str, nn.Module]) -> None:
    """Copy everything in a pipeline's folder except its ``models``."""
    for name in sorted(os.listdir(folder)):
        path, to = os.path.join(folder, name), os.path.join(temporary, name)
        if name in models or name.startswith("."):
            continue
        try:
            if os.path.isdir(path):
                patiently(shutil.copytree, path, to, symlinks=False)
            elif name == PIPELINE_NAME or not name.endswith((".safetensors", ".bin", ".ckpt", ".pt")):
                patiently(shutil.copyfile, path, to)
        except OSError as error:
            raise CheckpointError(f"{to}: can't be copied from {path}: {error.strerror or error}") from error
