"""Detects the kind of source at a path and opens its catalog. Readers of kinds other than safetensors are imported when one is there."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from ..errors import FormatError, SourceError
from ..format.header import describe_steps
from ..limits import brief
from ..ranks.ranks import Ranks
from ..storage import is_directory, is_file, looking_once
from ..storage.records import is_url, place_of
from .quantized import with_quantization
from .records import (
    FULL_STATE_STEM,
    METADATA_NAME,
    ZERO,
    Catalog,
    is_torch_file,
    kind_of,
    megatron_folder,
    rank_files_in,
    refuse_below,
    refuse_content,
    refuse_foreign,
    refuse_named,
    zero_folder,
)
from .safetensors import catalog_of_safetensors, catalog_of_weights, has_safetensors
from .weights import Choice, Weights, names_of, weights_in, weights_of_modules, with_config

_log = logging.getLogger(__name__)
_ANY = Choice()


def open_catalog(path: str | os.PathLike[str], model: str | None = None, *, choice: Choice = _ANY) -> Catalog:
    """Catalog of the source at ``path``: a shardwise checkpoint, a DCP checkpoint, safetensors, or a
    file of ``torch.save``. Reads headers only.

    A path may be a URL of an object store (``s3://bucket/prefix``).

    The files decide: a directory with ``manifest.json`` is a checkpoint; one with the files that transformers'
    ``from_pretrained`` takes is a model of these (``choice`` as its arguments); one with ``.metadata`` is torch's (DCP),
    one with ``pytorch_model_fsdp_0`` or ``pytorch_model_fsdp.bin`` and no safetensors is Accelerate's. ``model`` names
    one of several in a checkpoint. If the directory has other candidates, the first rank logs a warning that names
    them. Raises :class:`SourceError`, by its name for what another program wrote and can't be read (:mod:`.records`).
    """
    with looking_once(os.fspath(path)):
        try:
            found = with_quantization(_plain(_open(os.fspath(path), model, choice)))
        except FormatError as error:
            refuse_content(error)
            raise
    if Ranks.current().rank == 0:
        _warn(found)
    return found


def _plain(catalog: Catalog) -> Catalog:
    """The catalog, if what it lists are plain tensors. Refuses by name what only its writer can put together."""
    if any(name.endswith("_flat_param") for name in catalog.tensors):
        raise SourceError(
            "holds FSDP1's flat parameters (LOCAL_STATE_DICT), which can be split only by the same number of ranks. Resume it once "
            "with FSDP1, and save there with SHARDED_STATE_DICT or FULL_STATE_DICT",
            path=catalog.root,
        )
    for name in catalog.tensors:
        scale = name.removesuffix("qdata") + "scale"
        if name.endswith(":qdata") or (name.endswith("_weight_qdata") and scale not in catalog.tensors):
            raise SourceError(
                f"is quantized by torchao ({brief(name)}) in a way that can't be read; of torchao's, INT8 and FP8 weights can be. Load "
                f"the model from which it was quantized, or let transformers or diffusers open it and save plain weights",
                path=catalog.root,
            )
    return catalog


def holds_model(root: str) -> bool:
    """Whether a directory holds a model in files of transformers, or in any safetensors."""
    return is_directory(root) and (weights_in(root, _ANY) is not None or has_safetensors(root))


def _open(root: str, model: str | None, choice: Choice) -> Catalog:
    if is_url(root):
        root = place_of(root).url
    if root.endswith(".json") and is_file(root):
        raise SourceError("contains no weights; give its directory, or a .safetensors file", path=root)
    if is_url(root) and model is None and not choice.is_asked and is_file(root):
        # who may read an object may not list its folder
        refuse_named(root)
        return _of_torch_file(root) if is_torch_file(root) else catalog_of_safetensors(root)
    if not choice.is_asked and is_file(os.path.join(root, "manifest.json")):
        from .checkpoint import catalog_of_checkpoint

        return catalog_of_checkpoint(root, model)
    if model is not None:
        what = (
            describe_steps(root)
            or f"is not a checkpoint, and only checkpoints can contain several models; leave out {model!r}"
        )
        raise SourceError(what, path=root)
    refuse_foreign(root)
    if is_torch_file(root):
        return _of_torch_file(root)
    if is_directory(root) and (found := _of_transformers(root, choice)) is not None:
        return found
    if of_ranks := rank_files_in(root, "model") or rank_files_in(root, f"{FULL_STATE_STEM}_0"):
        return _of_torch_file(of_ranks[0])
    if (of_zero := zero_folder(root)) is not None:
        from .zero import read_zero

        return read_zero(of_zero).catalog
    if (of_megatron := megatron_folder(root)) is not None:
        from .megatron import read_megatron

        return read_megatron(of_megatron).catalog
    if is_file(os.path.join(root, METADATA_NAME)):
        found = _of_dcp(root)
        # transformers puts the optimizer's DCP files into the caller's directory, maybe beside the model's safetensors.
        if found.tensors:
            return found
        if not has_safetensors(root):
            raise SourceError(
                "contains no model: its state dict has an optimizer, or values that aren't tensors", path=root
            )
        return catalog_of_safetensors(root)
    return catalog_of_safetensors(root) if has_safetensors(root) else _without_safetensors(root)


def _of_dcp(root: str) -> Catalog:
    from .dcp import catalog_of_dcp

    return catalog_of_dcp(root)


def _of_torch_file(path: str) -> Catalog:
    from .torch_files import catalog_of_torch_file

    return catalog_of_torch_file(path)


def _of_pickles(root: str, weights: Weights, choice: Choice) -> Catalog:
    from .torch_files import catalog_of_torch_files

    return catalog_of_torch_files(root, weights, choice)


def _of_transformers(root: str, choice: Choice) -> Catalog | None:
    """The model that its library's ``from_pretrained`` would take from a directory; None if it would find none."""
    weights = weights_in(root, choice)
    if weights is None:
        if choice.is_asked:
            names = " and no ".join(with_config(root, choice, names_of(root)).candidates)
            raise SourceError(f"contains no {names}, or none that fits {choice}", path=root)
        return None
    found = (
        _of_pickles(root, weights, choice)
        if weights.is_pickled
        else catalog_of_weights(root, weights, choice)
    )
    parts = () if choice.with_modules else weights_of_modules(root)
    is_dcp = not choice.is_asked and is_file(os.path.join(root, METADATA_NAME))
    others = (METADATA_NAME,) if is_dcp and _of_dcp(root).tensors else ()
    return replace(
        found,
        ignored_files=(*found.ignored_files, *others, *parts),
        passed_over=(*found.passed_over, *others, *parts),
    )


def _without_safetensors(root: str) -> Catalog:
    folder, file = (os.path.join(root, f"{FULL_STATE_STEM}{end}") for end in ("_0", ".bin"))
    if is_file(os.path.join(folder, METADATA_NAME)):
        return _of_dcp(folder)
    if is_file(file):
        return _of_torch_file(file)
    if describe_steps(root) is None and kind_of(root) in (None, ZERO):
        refuse_below(root)
    return catalog_of_safetensors(root)  # raises the error


def _warn(catalog: Catalog) -> None:
    """Log the files that a reader of this directory might expect to be loaded, in one warning."""
    said = []
    if others := [n for n in catalog.passed_over if "/" not in n]:
        taken = sorted(os.path.basename(file.path) for file in catalog.files)
        said.append(
            f"uses {_some(taken)}, as from_pretrained does, and ignores {_some(others)}, which may contain different weights; "
            f"remove the files that are outdated"
        )
    if parts := [n for n in catalog.passed_over if "/" in n]:
        said.append(
            f"loads only the transformers model: modules.json lists {_some(parts)} as weights of other modules. "
            f"To load them all, pass auto_class=SentenceTransformer to load_pretrained"
        )
    if catalog.unheld:
        said.append(f"its index lists tensors that its files don't hold: {_some(list(catalog.unheld))}")
    if said:
        _log.warning("%s: %s", catalog.root, "; ".join(said))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
