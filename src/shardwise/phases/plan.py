"""``plan``: the cost of a load on every rank, and of a training run by phases, in one process without any ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist

from ..dtypes import named_dtype
from ..errors import ShardError
from ..internals.torch import fake_store
from ..layout.live import LiveModel, describe
from ..loading.foreseen import StagingTally
from ..loading.load import plan_load
from ..loading.pretrained import Prepared
from ..loading.store_requests import StoreTally
from ..models.arguments import FromPretrained, Pretrained
from ..objects import gc_paused
from ..planning import IOOptions, Plan
from ..sharding.groups import ShardPolicy, describe_groups
from ..storage import Requests, is_url
from .activations import Measurements, step_of
from .estimate import run_plan
from .files import files_of
from .fit import RANKS_PER_HOST, Limits, smallest_ranks, verdict_of
from .held import held_by_first
from .network import flows_of
from .records import Flow, RunPlan
from .report import PlanReport, RankCost, RanksPlanned
from .source import Source, source_of
from .spread import Spread
from .training import TrainingSpec
from .variant import Variant

__all__ = ["EVERY_RANK_UP_TO", "MAX_RANKS", "plan"]

#: Up to this number every rank is planned; above it, only the rank that holds most and the one that holds least.
EVERY_RANK_UP_TO = 64
#: Mistyped rank counts would fill the memory with meshes.
MAX_RANKS = 16_384


def plan(
    path: str | os.PathLike[str],
    *,
    ranks: int | None = None,
    nodes: int = 1,
    replicas: int = 1,
    tp: int = 1,
    ep: int = 1,
    dtype: torch.dtype | str = "auto",
    policy: ShardPolicy | None = None,
    training: TrainingSpec | None = None,
    device_limit_bytes: int | None = None,
    host_limit_bytes: int | None = None,
    auto_class: Any = None,
    config: Any = None,
    trust_remote_code: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    allow_unused: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    adapter: Any = None,
    quantized: Any = "dequantize",
    io: IOOptions | None = None,
    **options: Unpack[FromPretrained],
) -> PlanReport:
    """Calculate what ``load_pretrained`` of the model at ``path`` takes on each of ``ranks`` ranks, without loading anything.

    Builds the model on meta, shards it over a fake process group (1-D, or 2-D with ``replicas`` rows), and creates the plan that each rank
    would create. With ``tp`` or ``ep``, the model class's own plans split the model first, as transformers'
    ``DistributedConfig(tp_size=…, ep_size=…)`` does. FSDP2 then shards each slice across the groups, if there are several. :func:`load` can load
    such models.
    Memory: the model's buffers and the plans. Call it in one process without a process group; it leaves none behind. Not thread-safe.

    With ``training``, the report also says what a rank holds in each phase of a run (build, load, steps, saves, resume, export), with
    formulas and error bars: ``report.run``. If you also pass a limit, it says whether the run fits, and if not, which changes would make it
    fit, cheapest first, each of them planned as well: ``report.verdict``.

    Args:
        path: a local directory with ``config.json`` and safetensors files, or a checkpoint of such a model, or the id of a model on the
            Hugging Face hub. If the model isn't in the cache, its config and the headers of its weights are downloaded, but not the
            weights. A config alone is enough: a JSON file, or a directory or hub model with config.json and no weights.
        ranks: number of ranks, at most 16,384. None: the smallest number with which the run fits into ``device_limit_bytes``, on hosts with
            8 devices; ``report.search`` lists the numbers that were tried.
        nodes: number of hosts. Each has the same number of consecutive ranks, except that the last may have fewer. The ranks of a host
            share its memory, and the requests to a store.
        replicas: number of ranks that hold the same shard; must divide ``ranks``.
        tp: ranks for tensor parallelism, which process the same batch; must divide the ranks of a replica.
        ep: ranks for expert parallelism; a multiple of ``tp`` that divides the ranks of a replica.
        dtype: as for ``load_pretrained``.
        policy: how to wrap the model, including the mixed precision and offload of the training.
        training: batch, optimizer and device of the run. None: plan the load only.
        device_limit_bytes, host_limit_bytes: memory of one device and of one host; only with ``training``.
        auto_class, config, trust_remote_code, key_mapping, allow_unused, allow_missing, adapter, quantized, io, options: as for
            ``load_pretrained``.

    Raises :class:`ValueError` for invalid counts or an invalid dtype, :class:`PlanError` if the load wouldn't be complete,
    :class:`SourceError`, :class:`ShardError` or :class:`LayoutError`.
    """
    if ranks is None:
        if device_limit_bytes is None:
            raise ValueError(
                "ranks=None asks how many ranks fit: give device_limit_bytes, or a number of ranks"
            )
        training = training or TrainingSpec()
    else:
        _check_counts(ranks, nodes)
    _check_limits(training, device_limit_bytes, host_limit_bytes)
    first, per_host = (
        (ranks, -(-ranks // nodes)) if ranks is not None else (replicas * max(tp, ep), RANKS_PER_HOST)
    )
    this = Variant(
        first, replicas, per_host, policy or ShardPolicy(), training or TrainingSpec(), adapter, tp, ep
    )
    this.check()
    dtype = _floating_dtype(dtype)
    request = Pretrained(
        path=path,
        dtype=dtype,
        auto_class=auto_class,
        config=config,
        trust_remote_code=trust_remote_code,
        key_mapping=key_mapping,
        allow_unused=allow_unused,
        allow_missing=allow_missing,
        adapter=adapter,
        quantized=quantized,
        options=options,
    )
    io = io or IOOptions()
    _floating_dtype(request.understood().dtype)
    with source_of(request) as source:
        this = replace(this, adapter=source.request.adapter)  # maybe one in the model's directory

        measurements: Measurements = {}
        known: list[tuple[Variant, RunPlan]] = []

        def other_run(variant: Variant) -> RunPlan:
            for one, run in known:
                if one == variant:
                    return run
            is_alike = variant.adapter is this.adapter and not variant.is_parallel
            found = _report_of(source, variant, io, measurements if is_alike else {}, every_rank=False)[1]
            assert found is not None
            known.append((variant, found))
            return found

        limits, search = Limits(device_limit_bytes, host_limit_bytes), None
        if ranks is None:
            search = smallest_ranks(lambda n: other_run(replace(this, ranks=n)), limits, unit=first)
            if search.ranks is None and search.below is not None and not this.training.checkpointing:
                leaner = replace(this, training=replace(this.training, checkpointing=True))
                again = smallest_ranks(lambda n: other_run(replace(leaner, ranks=n)), limits, unit=first)
                if again.ranks is not None:
                    need = search.below.binds[0]
                    this, search = leaner, replace(again, change="activation checkpointing", unchanged=need)
            this = replace(this, ranks=search.ranks or search.tried[-1].ranks)
        report, run = _report_of(source, this, io, None if training is None else measurements)
        report = replace(report, from_config=source.is_config_alone, run=run, search=search)
        if run is None or (device_limit_bytes is None and host_limit_bytes is None):
            return report
        return replace(report, verdict=verdict_of(run, limits, this, other_run))


@gc_paused()
def _report_of(
    source: Source,
    variant: Variant,
    io: IOOptions,
    measurements: Measurements | None,
    *,
    every_rank: bool = True,
) -> tuple[PlanReport, RunPlan | None]:
    """The load of a variant and, with ``measurements`` of other variants, the phases of its run.

    ``every_rank``: False plans the load of the first and the last rank alone, for a run whose load nobody looks at.
    """
    prepared = source.prepared(variant.adapter)
    model_class = type(prepared.base).__name__  # before FSDP2 swaps it
    step, network, compute = None, tuple[Flow, ...](), _compute_dtype(prepared.model, variant.policy)
    with _fake_ranks(variant.ranks):
        spread = Spread.cut(prepared.model, variant)
        whole = spread.whole_gradients()
        with spread.as_one_rank() as exchange:
            groups = describe_groups(prepared.model, variant.policy)
            if measurements is not None:
                shards = variant.shards, variant.training, variant.expert_shards
                step = step_of(
                    prepared.model,
                    variant.policy,
                    *shards,
                    replicas=variant.replicas,
                    is_wrapped=variant.is_wrapped,
                    whole_gradients=whole,
                    known=measurements,
                )
                step = exchange.counted(step, is_wrapped=variant.is_wrapped)
                network = flows_of(step, variant, exchange.sent, compute.itemsize)
        spread.shard()
        live = describe(prepared.model)
        ranks = _ranks_to_plan(variant.ranks) if every_rank else sorted({0, variant.ranks - 1})
        planned = _plan_ranks(live, prepared, io, source.looks, variant, ranks)
        report = PlanReport.of(source.shown, model_class, groups, planned)
        if step is None:
            return report, None
        held = held_by_first(live, variant.training, step.reached, {} if variant.is_wrapped else whole)
    files = files_of(held, variant, [cost.bytes_read for cost in planned.costs])
    staging = planned.costs[0].staging_bytes
    return report, run_plan(
        held, step, variant, io, network, files, compute_dtype=compute, load_staging_bytes=staging
    )


def _compute_dtype(model: Any, policy: ShardPolicy) -> torch.dtype:
    """The dtype of the forward."""
    precision = policy.mixed_precision
    given: torch.dtype | None = precision.param_dtype if precision is not None else None
    return given or next(
        (p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype()
    )


# ----------------------------------------------------------------------------------------------------
# Arguments


def _check_counts(ranks: int, nodes: int) -> None:
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks must be from 1 to {MAX_RANKS}, got {ranks}")
    if not 1 <= nodes <= ranks:
        raise ValueError(f"nodes must be from 1 to the {ranks} ranks, got {nodes}")


def _check_limits(training: TrainingSpec | None, *limits: int | None) -> None:
    for limit in limits:
        if limit is not None and training is None:
            raise ValueError("a limit needs training=sw.TrainingSpec(…): what is to fit")
        if limit is not None and limit < 1:
            raise ValueError(f"a limit must be at least 1 byte, got {limit}")


def _floating_dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    """``"auto"`` or a floating dtype."""
    if dtype == "auto":
        return dtype
    found = named_dtype(dtype)
    if found is None or not found.is_floating_point:
        raise ValueError(f"dtype must be 'auto', a floating torch dtype or its name, got {dtype!r}")
    return found


# ----------------------------------------------------------------------------------------------------
# Fake ranks


@contextmanager
def _fake_ranks(ranks: int) -> Iterator[None]:
    """A process group of ``ranks`` ranks. This process is rank 0; the other ranks do not exist."""
    if dist.is_initialized():
        raise ShardError(
            "planning makes a process group of its own, and this process is in one already; plan in a process "
            "without one (`shardwise plan`), or before init_process_group"
        )
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _ranks_to_plan(ranks: int) -> list[int]:
    """All ranks, or the first and the last: torch.chunk never gives a later shard more than an earlier one."""
    return list(range(ranks)) if ranks <= EVERY_RANK_UP_TO else [0, ranks - 1]


# ----------------------------------------------------------------------------------------------------
# Plans and what they cost


def _plan_ranks(
    live: LiveModel,
    prepared: Prepared,
    io: IOOptions,
    looks: Requests,
    variant: Variant,
    to_plan: Sequence[int],
) -> RanksPlanned:
    """Make each rank's plan as ``load_pretrained`` makes it there. Keeps rank 0's plan, and the cost of each plan."""
    catalog, ranks = prepared.catalog, variant.ranks
    in_store = any(is_url(file.path) for file in catalog.files)
    costs, first, tally = [], None, None
    staging = StagingTally(ranks=ranks, ranks_per_host=variant.ranks_per_host)
    for rank in to_plan:
        # None for the rank that this process plays: its boxes are also checked against what torch allocated.
        planned = plan_load(live, catalog, prepared.rules, io=io, rank=rank or None)
        first = first or planned.plan
        costs.append(_cost(rank, planned.plan))
        staging.add(rank, planned)
        if in_store:
            tally = tally or StoreTally(planned, ranks=ranks, ranks_per_host=variant.ranks_per_host)
            tally.add(rank, planned)
    assert first is not None
    return RanksPlanned(
        ranks=ranks,
        replicas=variant.replicas,
        tp=variant.tp,
        ep=variant.ep,
        first=first,
        costs=tuple(
            replace(cost, staging_bytes=nbytes) for cost, nbytes in zip(costs, staging.result(), strict=True)
        ),
        total_shard_bytes=_over_all_ranks(live, ranks),
        store=None if tally is None else tally.result(looks),
    )


def _cost(rank: int, plan: Plan) -> RankCost:
    return RankCost(
        rank=rank,
        shard_bytes=plan.local_nbytes,
        bytes_read=plan.bytes_to_read,
        staging_bytes=max(plan.staging_bytes, plan.init_staging_bytes),
        reads=len(plan.transfers) + len(plan.checks),
    )


def _over_all_ranks(live: LiveModel, ranks: int) -> int:
    """Bytes that all ranks hold together: a tensor counts once for each set of ranks that share its shards."""
    total = 0
    for entry in live.stored:
        geometry = live.geometries[entry.name]
        cuts = zip(geometry.axis_sizes, geometry.cuts, strict=True)
        shards = math.prod(size for size, cut in cuts if cut.kind != "replicate")
        total += entry.tensor.numel() * entry.tensor.dtype.itemsize * (ranks // shards)
    return total
