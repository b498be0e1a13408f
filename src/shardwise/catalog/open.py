"""Detects the kind of source at a path and opens its catalog."""

from __future__ import annotations

import os

from ..errors import SourceError
from ..format.steps import describe_steps
from ..limits import brief
from ..storage import is_file, is_url, looking_once, place_of
from .checkpoint import catalog_of_checkpoint
from .dcp import METADATA_NAME, catalog_of_dcp
from .kinds import kind_of, refuse_below, refuse_foreign, refuse_named
from .quantization import with_quantization
from .records import Catalog
from .safetensors import catalog_of_safetensors, has_safetensors
from .torchfile import (
    FULL_STATE_STEM,
    catalog_of_torch_file,
    catalog_of_torch_files,
    has_torch_files,
    is_torch_file,
)

__all__ = ["open_catalog"]


def open_catalog(
    path: str | os.PathLike[str], model: str | None = None, *, variant: str | None = None
) -> Catalog:
    """Catalog of the source at ``path``: a shardwise checkpoint, a DCP checkpoint, safetensors, or a
    file of ``torch.save``. Reads headers only.

    A path may be a URL of an object store (``s3://bucket/prefix``).

    The files decide: a directory with ``manifest.json`` is a checkpoint, one with ``.metadata`` is torch's (DCP), one
    with ``pytorch_model_fsdp_0`` or ``pytorch_model_fsdp.bin`` and no safetensors is Accelerate's. ``model`` names
    one of several in a checkpoint; ``variant`` takes ``model.VARIANT.safetensors``. Raises :class:`SourceError`, by its name for
    what another program wrote and can't be read (:mod:`.kinds`).
    """
    with looking_once(os.fspath(path)):
        return with_quantization(_plain(_open(os.fspath(path), model, variant)))


def _plain(catalog: Catalog) -> Catalog:
    """The catalog, if what it lists are plain tensors. Refuses by name what only its writer can put together."""
    if any(name.endswith("_flat_param") for name in catalog.tensors):
        raise SourceError(
            "holds FSDP1's flat parameters (LOCAL_STATE_DICT), which only the same number of ranks can cut apart. Resume it once "
            "with FSDP1, and save there with SHARDED_STATE_DICT or FULL_STATE_DICT",
            path=catalog.root,
        )
    codes = next((name for name in catalog.tensors if name.endswith(("_weight_qdata", ":qdata"))), None)
    if codes is not None:
        raise SourceError(
            f"is quantised by torchao ({brief(codes)}), which can't be read. Load the model from which it was quantised, or let "
            f"transformers open it and save plain weights",
            path=catalog.root,
        )
    return catalog


def _open(root: str, model: str | None, variant: str | None) -> Catalog:
    if is_url(root):
        root = place_of(root).url
    if root.endswith(".json") and is_file(root):
        raise SourceError("holds no weights; give its directory, or a .safetensors file", path=root)
    if is_url(root) and model is None and variant is None and is_file(root):
        # who may read an object may not list its folder
        refuse_named(root)
        return catalog_of_torch_file(root) if is_torch_file(root) else catalog_of_safetensors(root)
    if variant is not None:
        return catalog_of_safetensors(root, variant)
    if is_file(os.path.join(root, "manifest.json")):
        return catalog_of_checkpoint(root, model)
    if model is not None:
        what = (
            describe_steps(root)
            or f"is not a checkpoint, and only checkpoints hold several models; don't ask for {model!r}"
        )
        raise SourceError(what, path=root)
    refuse_foreign(root)
    if is_torch_file(root):
        return catalog_of_torch_file(root)
    if is_file(os.path.join(root, METADATA_NAME)):
        found = catalog_of_dcp(root)
        # transformers puts the optimizer's DCP files into the caller's directory, maybe beside the model's safetensors.
        if found.tensors:
            return found
        if not has_safetensors(root):
            raise SourceError(
                "holds no model: its state dict has an optimizer, or values that aren't tensors", path=root
            )
        return catalog_of_safetensors(root)
    if has_safetensors(root):
        return catalog_of_safetensors(root)
    return _without_safetensors(root)


def _without_safetensors(root: str) -> Catalog:
    if has_torch_files(root):
        return catalog_of_torch_files(root)
    folder, file = (os.path.join(root, f"{FULL_STATE_STEM}{end}") for end in ("_0", ".bin"))
    if is_file(os.path.join(folder, METADATA_NAME)):
        return catalog_of_dcp(folder)
    if is_file(file):
        return catalog_of_torch_file(file)
    if describe_steps(root) is None and kind_of(root) is None:
        refuse_below(root)
    return catalog_of_safetensors(root)  # raises the error
