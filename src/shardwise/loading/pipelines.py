"""``load_pipeline``: a diffusers pipeline whose large models are sharded while they are loaded."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import FormatError, SourceError
from ..internals.diffusers import assembled, component_class, download_pipeline
from ..limits import brief, read_shallow_json
from ..models.hub import FromPretrained, HubOptions, find_for_all, understand
from ..planning.plan import IOOptions
from ..ranks.ranks import Ranks
from ..sharding.fsdp import ShardPolicy
from .pretrained import load_pretrained

#: The file that lists a pipeline's components.
PIPELINE_NAME = "model_index.json"


def load_pipeline(
    path: str | os.PathLike[str],
    mesh: DeviceMesh | None = None,
    *,
    shard: Sequence[str],
    components: Mapping[str, Any] | None = None,
    adapter: Any = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    policy: ShardPolicy | None = None,
    device: torch.device | str | None = None,
    io: IOOptions | None = None,
    **options: Unpack[FromPretrained],
) -> Any:
    """Load a diffusers pipeline, with some of its models sharded over ``mesh`` and the others whole on every rank.

    Returns the pipeline that ``DiffusionPipeline.from_pretrained`` would return. Each model in ``shard`` is loaded by
    :func:`load_pretrained`: no rank ever holds more of it than its shards and the staging buffer. diffusers loads all other
    components by its own rules. Call :func:`load_report` with one of the sharded models for its report.

    Args:
        path: a local directory with ``model_index.json``, or the id of a pipeline on the Hugging Face hub.
        mesh: as for :func:`load_pretrained`.
        shard: names of the components to shard, such as ``("transformer", "transformer_2")``. Text encoders can be sharded, too.
        components: components to use instead of the stored ones, by name. None leaves an optional component out:
            ``components={"text_encoder": None}``.
        adapter: adapters of sharded models: a dict of component names to what ``adapter=`` of :func:`load_pretrained` takes.
        dtype: dtype of all models, or dtypes by component with ``"default"`` for the others. Default: as in diffusers, float32. Parts that a
            class keeps in fp32 stay so.
        policy: how the models in ``shard`` are split into FSDP2 groups.
        device: device of the models that aren't sharded. Default: the mesh's device type. ``"cpu"`` keeps them in host memory until you move
            them.
        io: staging memory and time limits.
        options: as for ``from_pretrained``: ``variant``, ``use_safetensors``, and for the hub ``revision``, ``token``, ``cache_dir``,
            ``local_files_only``, ``force_download``.

    Every rank of the default process group must call it. Raises the errors of :func:`load_pretrained`; :class:`ValueError` for a name that
    the pipeline doesn't have; :class:`SourceError` for a folder that is not a pipeline.
    """
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    given, sharded = dict(components or {}), tuple(shard)
    with ranks.agree("check arguments"):
        asked = understand(options, "auto")
        if isinstance(shard, str):
            raise TypeError(f"shard is a string; expected a sequence of names: shard=({shard!r},)")
        if asked.hub.subfolder or asked.implementations:
            raise TypeError(
                "load_pipeline takes no subfolder=, attn_implementation= or experts_implementation="
            )
        if unknown := {*(adapter or {})} - {*sharded}:
            raise ValueError(f"adapter= names {sorted(unknown)}, and only components in shard= can have one")
    hub = asked.hub
    directory, listed = find_pipeline(path, hub, given, ranks, needed=sharded)
    for name in sharded:
        given[name] = load_pretrained(
            directory,
            mesh,
            policy=policy,
            dtype=_dtype_of(dtype, name),
            auto_class=component_class(*listed[name]),
            adapter=(adapter or {}).get(name),
            io=io,
            subfolder=name,
            variant=_variant_of(hub.variant, directory, name),
            use_safetensors=hub.use_safetensors,
        )
    with ranks.agree("load the other components"):
        files = {"variant": hub.variant, "use_safetensors": hub.use_safetensors}
        pipeline = assembled(directory, given, dict(dtype) if isinstance(dtype, Mapping) else dtype, files)
        if lost := [name for name in sharded if getattr(pipeline, name) is not given[name]]:
            raise SourceError(
                f"{type(pipeline).__name__} doesn't take its {lost[0]!r} from a caller; leave it out of shard=",
                path=directory,
            )
    place = device or (None if mesh is None else mesh.device_type)
    for name, component in pipeline.components.items():
        if place is not None and name not in given and isinstance(component, nn.Module):
            component.to(place)
    return pipeline


def find_pipeline(
    path: str | os.PathLike[str],
    options: HubOptions,
    left_out: Collection[str],
    ranks: Ranks,
    *,
    needed: Collection[str] = (),
) -> tuple[str, dict[str, tuple[str, str]]]:
    """The local directory of a pipeline and its :func:`components_of`. From the Hub without the weights of components ``left_out``.

    Every rank must call it. Raises :class:`ValueError` for a component, left out or ``needed``, that it doesn't have, and
    :class:`SourceError` for a directory that some ranks lack.
    """
    found = find_for_all(path, options, ranks, download=partial(_download, os.fspath(path), tuple(left_out)))
    with ranks.agree("read the pipeline"):
        if found.lent is not None:
            raise SourceError(
                "is a pipeline, which must be a local directory on every rank; copy it to every host",
                path=found.lent,
            )
        listed = components_of(found.directory)
        if unknown := {*left_out, *needed} - listed.keys():
            raise ValueError(
                f"{os.fspath(path)}: has no component {', '.join(map(repr, sorted(unknown)))}; it has {', '.join(listed)}"
            )
    return found.directory, listed


def components_of(directory: str) -> dict[str, tuple[str, str]]:
    """The components of a pipeline, with the library and the class of each, from ``model_index.json``. Rank-local.

    Raises :class:`SourceError` without that file, :class:`FormatError` for one that can't be read.
    """
    file = os.path.join(directory, PIPELINE_NAME)
    if not os.path.isfile(file):
        raise SourceError(
            f"no {PIPELINE_NAME}, which a diffusers pipeline has; one model is loaded by load_pretrained",
            path=directory,
        )
    document = read_shallow_json(file, "list of components")
    if not isinstance(document, dict):
        raise FormatError(f"not a list of components: {brief(document)}", path=file)
    return {
        name: (value[0], value[1])
        for name, value in document.items()
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    }


def _download(path: str, left_out: Sequence[str], options: HubOptions) -> str:
    names = (
        "revision",
        "token",
        "cache_dir",
        "variant",
        "use_safetensors",
        "local_files_only",
        "force_download",
    )
    return download_pipeline(path, left_out, {name: getattr(options, name) for name in names})


def _variant_of(variant: str | None, directory: str, component: str) -> str | None:
    """The variant to load of a component. As in diffusers, a component that has no file of the variant is loaded without one."""
    folder = os.path.join(directory, component)
    if variant is None or not os.path.isdir(folder):
        return variant
    is_there = any(f".{variant}." in name or f".{variant}-" in name for name in os.listdir(folder))
    return variant if is_there else None


def _dtype_of(dtype: torch.dtype | Mapping[str, torch.dtype] | None, name: str) -> torch.dtype:
    if isinstance(dtype, Mapping):
        return dtype.get(name, dtype.get("default", torch.float32))
    return dtype or torch.float32
