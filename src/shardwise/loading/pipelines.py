"""``load_pipeline``: a diffusers pipeline whose large models are sharded while they are loaded."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..catalog.pipelines import Component, pipeline_in
from ..catalog.records import PIPELINE_NAME, refuse_foreign
from ..errors import SourceError
from ..internals.diffusers import assembled, component_class, download_pipeline
from ..models.hub import FromPretrained, HubOptions, find_for_all, understand
from ..planning.plan import IOOptions
from ..ranks.ranks import Ranks
from ..sharding.fsdp import ShardPolicy
from .pretrained import load_pretrained


def load_pipeline(
    path: str | os.PathLike[str],
    mesh: DeviceMesh | None = None,
    *,
    shard: Sequence[str],
    components: Mapping[str, Any] | None = None,
    adapter: Any = None,
    seed: int = 0,
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
        seed: seed for new adapters, whose first values are the same at every world size.
        dtype: dtype of all models, or dtypes by component with ``"default"`` for the others. Default: as in diffusers, float32. Parts that a
            class keeps in fp32 stay so.
        policy: how the models in ``shard`` are split into FSDP2 groups.
        device: device of the models that aren't sharded. Default: the mesh's device type. ``"cpu"`` keeps them in host memory until you move
            them.
        io: staging memory and time limits.
        options: as for ``from_pretrained``: ``variant``, ``use_safetensors``, and for the hub ``revision``, ``token``, ``cache_dir``,
            ``local_files_only``, ``force_download``.

    Every rank of the default process group must call it. Raises the errors of :func:`load_pretrained`; :class:`SourceError` for a folder that
    is not a pipeline, and for a name that the pipeline doesn't have.
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
        if adapter is not None and not isinstance(adapter, Mapping):
            raise TypeError(
                f"adapter is a {type(adapter).__name__}; expected a dict of components in shard=: adapter={{{next(iter(sharded), 'transformer')!r}: …}}"
            )
        if unknown := {*(adapter or {})} - {*sharded}:
            raise ValueError(f"adapter= names {sorted(unknown)}, and only components in shard= can have one")
    hub = asked.hub
    named = [*given, *(n for n in dtype if n != "default")] if isinstance(dtype, Mapping) else [*given]
    directory, listed = find_pipeline(path, hub, given, ranks, needed=sharded, named=named)
    with ranks.agree("choose the variants"):
        variants = {name: listed[name].variant(hub.variant) for name in sharded}
    for name in sharded:
        given[name] = load_pretrained(
            directory,
            mesh,
            policy=policy,
            dtype=dtype_of(dtype, name),
            auto_class=component_class(listed[name].library, listed[name].class_name),
            adapter=(adapter or {}).get(name),
            seed=seed,
            io=io,
            subfolder=name,
            variant=variants[name],
            use_safetensors=hub.use_safetensors,
        )
    with ranks.agree("load the other components"):
        files = {"variant": hub.variant, "use_safetensors": hub.use_safetensors}
        try:
            pipeline = assembled(
                directory, given, dict(dtype) if isinstance(dtype, Mapping) else dtype, files
            )
        except ValueError as error:
            if not (empty := {*pipeline_in(directory).without} - given.keys()):
                raise
            left_out = ", ".join(f"{name!r}: None" for name in sorted(empty))
            raise SourceError(
                f"{error} The folder holds no {', '.join(sorted(empty))}: pass your own, or components={{{left_out}}}",
                path=directory,
            ) from error
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
    named: Collection[str] = (),
) -> tuple[str, Mapping[str, Component]]:
    """The local directory of a pipeline and its components. From the Hub without the weights of components ``left_out``.

    Every rank must call it. Raises :class:`SourceError` for a ``needed`` component that it doesn't have, for a ``named`` one that it has no
    place for, and for a directory that some ranks lack.
    """
    found = find_for_all(path, options, ranks, download=partial(_download, os.fspath(path), tuple(left_out)))
    with ranks.agree("read the pipeline"):
        if found.lent is not None:
            raise SourceError(
                "is a pipeline, which must be a local directory on every rank; copy it to every host",
                path=found.lent,
            )
        if not os.path.isfile(os.path.join(found.directory, PIPELINE_NAME)):
            refuse_foreign(found.directory)
            raise SourceError(
                f"no {PIPELINE_NAME}, which a diffusers pipeline has; one model is loaded by load_pretrained",
                path=found.directory,
            )
        pipeline = pipeline_in(found.directory)
        listed = pipeline.components
        if unknown := ({*named} - {*listed, *pipeline.without}) | ({*needed} - listed.keys()):
            raise SourceError(
                f"has no component {', '.join(sorted(map(repr, unknown)))}; it has {', '.join(listed)}",
                path=os.fspath(path),
            )
    return found.directory, listed


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


def dtype_of(dtype: torch.dtype | Mapping[str, torch.dtype] | None, name: str) -> torch.dtype:
    """The dtype of a component, by the ``dtype`` of :func:`load_pipeline`."""
    if isinstance(dtype, Mapping):
        return dtype.get(name, dtype.get("default", torch.float32))
    return dtype or torch.float32
