"""``plan_pipeline``: what each model of a diffusers pipeline takes on a rank, whole and sharded; and proof that its files are whole."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any, TypeVar, Unpack

import torch
from torch import nn

from ..catalog.pipelines import Component, Pipeline, pipeline_at, pipeline_of
from ..catalog.records import PIPELINE_NAME
from ..errors import FormatError, PlanError, ShardwiseError, SourceError
from ..internals.diffusers import component_class
from ..limits import read_shallow_json
from ..loading.load import plan_load
from ..loading.pipelines import dtype_of
from ..models.hub import FromPretrained, HubOptions, Pretrained, pipeline_on_hub, understand
from ..objects import frozen
from ..operations.operation import announced, size
from ..operations.printed import Printed, some
from ..planning.plan import IOOptions
from ..sharding.fsdp import ShardPolicy
from ..storage.records import is_url, join
from ..tensors.live import describe
from .plan import plan, source_of

T = TypeVar("T")

#: FSDP2 groups of a model that a rank may hold gathered at once: the root's, the one in use, and the next one.
GATHERED_GROUPS = 3
#: The largest number of ranks that is tried.
_MOST_RANKS = 1024


@frozen(kw_only=True)
class ComponentPlan:
    """The cost of one model of a pipeline."""

    name: str
    class_name: str
    variant: str | None
    """The variant of the weights that would be loaded."""
    dtypes: tuple[str, ...]
    """Dtypes of the model's tensors once loaded, by the number of bytes in each, largest first."""
    whole_bytes: int
    """Bytes on each rank if the model isn't sharded."""
    shard_bytes: int
    """Bytes on the rank with the most if the model is sharded."""
    gathered_bytes: int
    """Bytes of its largest FSDP2 group while that is gathered."""


@frozen(kw_only=True)
class PipelinePlan(Printed):
    """The cost of loading a diffusers pipeline on ``ranks`` ranks, computed from the plans of its models."""

    path: str
    pipeline_class: str
    ranks: int
    replicas: int
    components: tuple[ComponentPlan, ...]
    """The pipeline's models."""
    device_limit_bytes: int | None
    shard: tuple[str, ...] | None
    """The fewest models to shard so that all weights fit into ``device_limit_bytes``. None without a limit, or if they don't fit."""

    def held_bytes(self, shard: Sequence[str]) -> int:
        """Bytes on the device of a rank if the models in ``shard`` are sharded: all weights, and the FSDP2 groups gathered while a
        sharded model runs.

        The pipeline runs one model at a time, with at most three FSDP2 groups gathered, each counted like the largest one.
        """
        sharded = [one for one in self.components if one.name in shard]
        gathered = max((one.gathered_bytes for one in sharded), default=0)
        weights = sum(one.shard_bytes if one.name in shard else one.whole_bytes for one in self.components)
        return weights + GATHERED_GROUPS * gathered

    @property
    def least_bytes(self) -> int:
        """:meth:`held_bytes` of the models that are best sharded."""
        return min(map(self.held_bytes, _choices(self.components)))

    def rows(self) -> Mapping[str, str]:
        """The rows of the printed table. ``shardwise plan`` also shows each model."""
        found = {
            "path": self.path,
            "pipeline": self.pipeline_class,
            "ranks": f"{self.ranks}" + f" ({self.replicas} replicas)" * (self.replicas > 1),
            "a rank holds": f"{size(self.held_bytes(()))} with nothing sharded, at least {size(self.least_bytes)}",
            "shard": "" if self.shard is None else ", ".join(self.shard) or "nothing",
        }
        return {label: text for label, text in found.items() if text}


def plan_pipeline(
    path: str | os.PathLike[str],
    *,
    ranks: int | None = None,
    replicas: int = 1,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    policy: ShardPolicy | None = None,
    device_limit_bytes: int | None = None,
    io: IOOptions | None = None,
    **options: Unpack[FromPretrained],
) -> PipelinePlan:
    """Calculate what each model of the diffusers pipeline at ``path`` takes on a rank, whole and sharded, without loading anything.

    Each model is planned by :func:`plan`, which also proves that its load would be complete. With ``device_limit_bytes``, the report says which
    models to shard: ``load_pipeline(path, mesh, shard=report.shard)``. It counts weights only. Activations need memory, too; how much depends
    on the size of the images or videos. Memory: as for :func:`plan`, one model at a time. Call it in one process without a process group.

    Args:
        path: a local directory with ``model_index.json``, or the id of a pipeline on the Hugging Face hub. If the weights aren't in the
            cache, only their headers are downloaded.
        ranks: number of ranks. None: the smallest power of two, times ``replicas``, with which the weights fit.
        replicas: number of ranks that hold the same shard; must divide ``ranks``.
        dtype, policy, io, options: as for :func:`load_pipeline`.
        device_limit_bytes: bytes of one device that the weights may take.

    Raises :class:`PlanError`, with the name of each model that can't be loaded and why; :class:`SourceError` for a path that is not a
    pipeline; :class:`ValueError` for invalid counts.
    """
    path, hub = os.fspath(path), understand(options, "auto").hub
    if device_limit_bytes is None and ranks is None:
        raise ValueError(
            "ranks=None finds out how many ranks fit: pass device_limit_bytes, or pass a number of ranks"
        )
    pipeline = find_components(path, hub)
    if pipeline is None:
        raise SourceError(
            f"no {PIPELINE_NAME}, which a diffusers pipeline has; plan is for one model", path=path
        )

    def on(count: int) -> PipelinePlan:
        def component(one: Component) -> ComponentPlan:
            variant = one.variant(hub.variant)
            given: Any = {**options, "subfolder": one.name, "variant": variant}
            dtype_of_one = dtype_of(dtype, one.name)
            kind = component_class(one.library, one.class_name)
            found = plan(
                path,
                ranks=count,
                replicas=replicas,
                dtype=dtype_of_one,
                policy=policy,
                auto_class=kind,
                io=io,
                **given,
            )
            return ComponentPlan(
                name=one.name,
                class_name=found.model_class,
                variant=variant,
                dtypes=found.dtypes,
                whole_bytes=found.model_bytes,
                shard_bytes=found.max_shard_bytes,
                gathered_bytes=found.largest_group.gathered_bytes,
            )

        models = [one for one in pipeline.components.values() if one.variants or _is_model(one)]
        found, problems = _of_each(models, component)
        if problems:
            raise PlanError(f"{path}: {len(problems)} problems in its components", tuple(problems))
        report = PipelinePlan(
            path=path,
            pipeline_class=pipeline.class_name,
            ranks=count,
            replicas=replicas,
            components=tuple(found),
            device_limit_bytes=device_limit_bytes,
            shard=None,
        )
        if device_limit_bytes is None:
            return report
        fitting = [s for s in _choices(report.components) if report.held_bytes(s) <= device_limit_bytes]
        return replace(report, shard=min(fitting, key=lambda s: (len(s), report.held_bytes(s)), default=None))

    report = on(ranks or replicas)
    while ranks is None and report.shard is None and 2 * report.ranks <= _MOST_RANKS:
        without_shards = replace(
            report, components=tuple(replace(one, shard_bytes=0) for one in report.components)
        )
        if device_limit_bytes is None or without_shards.least_bytes > device_limit_bytes:
            break  # no number of ranks is enough
        report = on(2 * report.ranks)
    return report


def find_components(path: str, options: HubOptions) -> Pipeline | None:
    """The pipeline at a path, a URL, or of this id on the hub; None for anything else. Downloads ``model_index.json`` only. Rank-local."""
    if is_url(path) or os.path.lexists(path):
        return pipeline_at(path)
    found = pipeline_on_hub(path, options)
    return found and pipeline_of(read_shallow_json(join(found[0], PIPELINE_NAME)), found[1], path)


def _choices(components: Collection[ComponentPlan]) -> Iterator[tuple[str, ...]]:
    """All that may be sharded, the fewest models first."""
    names = [one.name for one in components]
    return chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))


def _is_model(one: Component) -> bool:
    kind = component_class(one.library, one.class_name)
    return isinstance(kind, type) and issubclass(kind, nn.Module)


def _of_each(components: Iterable[Component], work: Callable[[Component], T]) -> tuple[list[T], list[str]]:
    """The results of ``work`` by component; and for each component where it raises, the error with the component's name."""
    found, problems = list[T](), list[str]()
    for one in components:
        try:
            found.append(work(one))
        except ShardwiseError as error:
            lines = (error.problems if isinstance(error, PlanError) else ()) or (str(error),)
            problems += [f"{one.name}: {line}" for line in lines]
    return found, problems


# ----------------------------------------------------------------------------------------------------
# ``shardwise verify`` of a pipeline.


@frozen(kw_only=True)
class PipelineProof(Printed):
    """What was proved of a pipeline's files, and every problem that was found."""

    path: str
    problems: tuple[str, ...]
    components: int
    models: int
    """Models with weights; each of their variants was checked."""
    files: int
    tensors: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**Printed.to_json(self), "ok": not self.problems}


@announced("verify", "path")
def verify_pipeline(path: str) -> PipelineProof:
    """Prove that each component of a pipeline is whole, in every variant that is there, from headers and indexes alone. Rank-local.

    Of each model: its index names files that are there and hold what it says, every file is as long as its header says, and the files hold
    each tensor that the component's class wants, in its shape, and no other. Published weights have no checksums, so values aren't
    checked. Raises :class:`SourceError` or :class:`FormatError` for a path that is no pipeline.
    """
    started, pipeline = time.perf_counter(), pipeline_at(path)
    if pipeline is None:
        raise SourceError(f"no {PIPELINE_NAME}, which a diffusers pipeline has", path=path)
    found, problems = _of_each(pipeline.components.values(), lambda one: [*_checked(path, one)])
    counts = [pair for pairs in found for pair in pairs]
    return PipelineProof(
        path=path,
        problems=tuple(problems),
        components=len(pipeline.components),
        models=sum(bool(one.variants) for one in pipeline.components.values()),
        files=sum(files for files, _ in counts),
        tensors=sum(tensors for _, tensors in counts),
        seconds=time.perf_counter() - started,
    )


def _checked(path: str, one: Component) -> Iterator[tuple[int, int]]:
    """Prove each variant of a component; yields its numbers of files and of tensors."""
    if not one.is_here:
        raise SourceError(f"lost: {PIPELINE_NAME} lists it, and there is no such folder", path=one.folder)
    if not one.variants and _is_model(one):
        raise SourceError(
            f"lost: no weights that {one.class_name}.from_pretrained would find", path=one.folder
        )
    for variant in one.variants:
        request = Pretrained(
            path=path,
            dtype="auto",
            auto_class=component_class(one.library, one.class_name),
            config=None,
            trust_remote_code=False,
            key_mapping=None,
            allow_unused=(),
            allow_missing=(),
            adapter={},
            quantized="dequantize",
            options={"subfolder": one.name, "variant": variant},
        )
        with source_of(request) as source:
            lost = source.catalog.unheld
            if lost:
                raise FormatError(
                    f"its index lists tensors that its files don't hold: {some(lost)}", path=one.folder
                )
            prepared = source.prepared({})
            plan_load(describe(prepared.model), prepared.catalog, prepared.rules, io=IOOptions())
            yield len(source.catalog.files), len(source.catalog.tensors)
