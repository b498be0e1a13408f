"""``plan``: the cost of a load on every rank, and of a training run by phases, in one process without any ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..dtypes import named_dtype
from ..errors import ShardError
from ..internals.torch import fake_store
from ..layout.live import LiveModel, describe
from ..layout.model import local_tensor
from ..loading.load import plan_load
from ..loading.pretrained import Prepared
from ..loading.store_requests import StoreTally
from ..models.arguments import FromPretrained, Pretrained
from ..planning import IOOptions, Plan
from ..sharding.fsdp import shard
from ..sharding.groups import ShardPolicy, describe_groups
from ..storage import Requests, is_url
from .activations import step_of
from .estimate import run_plan
from .fit import Limits, Variant, verdict_of
from .held import held_by_first
from .records import RunPlan
from .report import PlanReport, RankCost, RanksPlanned
from .source import Source, source_of
from .training import Training

__all__ = ["EVERY_RANK_UP_TO", "MAX_RANKS", "plan"]

#: Up to this number every rank is planned; above it, only the rank that holds most and the one that holds least.
EVERY_RANK_UP_TO = 64
#: Mistyped rank counts would fill the memory with meshes.
MAX_RANKS = 16_384


def plan(
    path: str | os.PathLike[str],
    *,
    ranks: int,
    replicas: int = 1,
    ranks_per_host: int | None = None,
    dtype: torch.dtype | str = "auto",
    policy: ShardPolicy | None = None,
    training: Training | None = None,
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
    """Plan ``load_pretrained`` of the model at ``path`` for every one of ``ranks`` ranks; loads nothing.

    Builds the model on meta, shards it over a fake process group, 1-D, or 2-D with ``replicas`` rows, and makes the
    plan of each rank as that rank would make it. Allocates the model's buffers and the plans. Call it in one process
    without a process group; afterwards it has none either. Not thread-safe.

    With ``training`` the report says for each phase of a run (build, load, steps, saves, resume, export) what a rank holds,
    with formulas and error bars: ``report.run``. With a limit, too, it says whether that fits, and if not which changes make
    it fit, the cheapest first, each of them planned as well: ``report.verdict``.

    Args:
        path: local directory with ``config.json`` and safetensors files, or a checkpoint of such a model, or the id of
            a model on the Hugging Face hub, which is downloaded if the cache lacks it. With ``training`` also a config
            alone: a JSON file, or a directory that holds config.json and no weights.
        ranks: number of ranks of the load, at most 16,384.
        replicas: number of ranks that hold the same shard; divides ``ranks``.
        ranks_per_host: ranks that share the memory of a host, and a store's requests. Default: all.
        dtype: as for ``load_pretrained``.
        policy: how to wrap; with mixed precision and offload of the training.
        training: batch, optimizer and device of a run. None: the load alone.
        device_limit_bytes, host_limit_bytes: memory of one device, and of one host; with ``training``.
        auto_class, config, trust_remote_code, key_mapping, allow_unused, allow_missing, adapter, quantized, io, options: as for
            ``load_pretrained``.

    Raises :class:`ValueError` for invalid counts or an invalid dtype, :class:`PlanError` if the load can't be proved
    complete, :class:`SourceError`, :class:`ShardError` or :class:`LayoutError`.
    """
    _check_counts(ranks, replicas, ranks_per_host)
    _check_limits(training, device_limit_bytes, host_limit_bytes)
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
    policy, io = policy or ShardPolicy(), io or IOOptions()
    _floating_dtype(request.understood().dtype)
    per_host = min(ranks, ranks_per_host or ranks)
    with source_of(request, may_lack_weights=training is not None) as source:
        prepared = source.prepared(adapter)
        model_class = type(prepared.base).__name__  # before FSDP2 swaps it
        groups = describe_groups(prepared.model, policy)
        this = Variant(ranks, replicas, per_host, policy, training or Training(), adapter)
        step = None
        if training is not None:
            step = step_of(prepared.model, policy, ranks // replicas, training, replicas=replicas)
        with _fake_ranks(ranks):
            shard(prepared.model, _mesh(ranks, replicas), policy)
            planned = _plan_ranks(prepared, io, source.looks, ranks, replicas, ranks_per_host or ranks)
            reached = None if step is None else step.reached
            held = held_by_first(describe(prepared.model), this.training, reached)
        report = PlanReport.of(source.shown, model_class, groups, planned)
        report = replace(report, from_config=source.is_config_alone)
        if step is None:
            return report
        staging = planned.costs[0].staging_bytes
        report = replace(report, run=run_plan(held, step, this, io, load_staging_bytes=staging))
        if device_limit_bytes is None and host_limit_bytes is None:
            return report
        limits = Limits(device_limit_bytes, host_limit_bytes)
        del prepared, step
        assert report.run is not None
        return replace(
            report, verdict=verdict_of(report.run, limits, this, lambda other: _run_of(source, other, io))
        )


def _run_of(source: Source, variant: Variant, io: IOOptions) -> RunPlan:
    """The phases of a run that is another one than asked for."""
    prepared = source.prepared(variant.adapter)
    step = step_of(
        prepared.model, variant.policy, variant.shards, variant.training, replicas=variant.replicas
    )
    with _fake_ranks(variant.ranks):
        shard(prepared.model, _mesh(variant.ranks, variant.replicas), variant.policy)
        held = held_by_first(describe(prepared.model), variant.training, step.reached)
    return run_plan(held, step, variant, io)


# ----------------------------------------------------------------------------------------------------
# Arguments


def _check_counts(ranks: int, replicas: int, ranks_per_host: int | None) -> None:
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks must be from 1 to {MAX_RANKS}, got {ranks}")
    if replicas < 1 or ranks % replicas:
        raise ValueError(f"replicas must be at least 1 and divide the {ranks} ranks, got {replicas}")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ValueError(f"ranks_per_host must be at least 1, got {ranks_per_host}")


def _check_limits(training: Training | None, *limits: int | None) -> None:
    for limit in limits:
        if limit is not None and training is None:
            raise ValueError("a limit needs training=sw.Training(…): what is to fit")
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


def _mesh(ranks: int, replicas: int) -> DeviceMesh:
    # Boxes depend only on the sizes of the axes: a CPU mesh gives the same ones as GPUs.
    if replicas == 1:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def _ranks_to_plan(ranks: int) -> list[int]:
    """All ranks, or the first and the last: torch.chunk never gives a later shard more than an earlier one."""
    return list(range(ranks)) if ranks <= EVERY_RANK_UP_TO else [0, ranks - 1]


# ----------------------------------------------------------------------------------------------------
# Plans and what they cost


def _plan_ranks(
    prepared: Prepared, io: IOOptions, looks: Requests, ranks: int, replicas: int, ranks_per_host: int
) -> RanksPlanned:
    """Make each rank's plan as ``load_pretrained`` makes it there. Keeps rank 0's plan, and the cost of each plan."""
    live, catalog = describe(prepared.model), prepared.catalog
    in_store = any(is_url(file.path) for file in catalog.files)
    costs, first, tally = [], None, None
    for rank in _ranks_to_plan(ranks):
        # None for the rank that this process plays: its boxes are also checked against what torch allocated.
        planned = plan_load(live, catalog, prepared.rules, io=io, rank=rank or None)
        first = first or planned.plan
        costs.append(_cost(rank, planned.plan))
        if in_store:
            tally = tally or StoreTally(planned, ranks=ranks, ranks_per_host=ranks_per_host)
            tally.add(rank, planned)
    assert first is not None
    return RanksPlanned(
        ranks=ranks,
        replicas=replicas,
        first=first,
        costs=tuple(costs),
        total_shard_bytes=_over_all_ranks(live, ranks, replicas),
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


def _over_all_ranks(live: LiveModel, ranks: int, replicas: int) -> int:
    """Bytes that all ranks hold together: sharded tensors count once per replica, plain tensors once per rank."""
    total = 0
    for entry in live.stored:
        is_plain = local_tensor(entry.tensor) is entry.tensor
        nbytes = entry.tensor.numel() * entry.tensor.dtype.itemsize
        total += nbytes * (ranks if is_plain else replicas)
    return total
