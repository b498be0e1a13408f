"""``plan``: the cost of a load on every rank, computed in one process without any ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..dtypes import named_dtype
from ..errors import ShardError
from ..internals.torch import fake_store
from ..layout.live import LiveModel, describe
from ..layout.model import local_tensor
from ..models.arguments import FromPretrained, Pretrained
from ..models.hub import find_for_all
from ..planning import IOOptions, Plan
from ..quantized.dequantized import Dequantized, described
from ..ranks.ranks import Ranks
from ..recipe.host_convert import Converted
from ..recipe.match import Declaration
from ..sharding.fsdp import shard
from ..sharding.groups import Group, ShardPolicy, describe_groups, largest_group
from ..storage import Requests, counting, is_url
from .load import plan_load
from .pretrained import Prepared, prepare
from .source import open_for_all
from .store_requests import StoreRequests, StoreTally

__all__ = ["EVERY_RANK_UP_TO", "MAX_RANKS", "PlanReport", "RankCost", "plan"]

#: Up to this number every rank is planned; above it, only the rank that holds most and the one that holds least.
EVERY_RANK_UP_TO = 64
#: Mistyped rank counts would fill the memory with meshes.
MAX_RANKS = 16_384


@dataclass(frozen=True, slots=True)
class RankCost:
    """The cost of one rank's plan."""

    rank: int
    shard_bytes: int
    """Bytes of this rank's part of parameters and persistent buffers."""
    bytes_read: int
    """Bytes that the load reads from the source."""
    staging_bytes: int
    """Host memory besides the shards during the load, for a CPU target."""
    reads: int
    """Strided copies in the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksPlanned:
    """The plan of rank 0, and the cost of each rank that was planned; see :class:`PlanReport`."""

    ranks: int
    replicas: int
    first: Plan
    costs: tuple[RankCost, ...]
    total_shard_bytes: int
    store: StoreRequests | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The cost of loading a model over ``ranks`` ranks, from the plans that a load would run."""

    path: str
    model_class: str
    """Class of the model; with adapters, of the base."""
    dtypes: tuple[str, ...]
    """Stored codes of the dtypes of the model's tensors, by falling bytes."""
    ranks: int
    replicas: int
    """Copies of the model over all ranks: 1 for FSDP, more for HSDP."""
    tensors: int
    model_bytes: int
    """Every distinct parameter and persistent buffer once."""
    source_bytes: int
    per_rank: tuple[RankCost, ...]
    """Every rank up to 64 ranks; above, the one that holds most (rank 0) and the one that holds least (the last)."""
    total_shard_bytes: int
    """Sum over all ranks."""
    total_bytes_read: int | None
    """Sum over all ranks; None if not every rank was planned."""
    groups: int
    """Number of FSDP2 groups of the model."""
    largest_group: Group
    """The group that takes the most memory while it is gathered."""
    replicated_bytes: int
    """Bytes, on each rank, of parameters that FSDP2 can't shard: they stay whole."""
    unused: tuple[Declaration, ...]
    initialized: tuple[Declaration, ...]
    converted: tuple[Converted, ...]
    """Conversions that can't be compiled to byte ranges. Each rank with a part of a result runs them whole."""
    dequantized: tuple[Dequantized, ...]
    """Formats of tensors that the source stores as codes and scales, and the ranks hold dequantised."""
    ignored_files: tuple[str, ...]
    store: StoreRequests | None
    """Requests of the load to object stores; None for local files."""

    @classmethod
    def of(cls, path: str, model_class: str, groups: tuple[Group, ...], planned: RanksPlanned) -> PlanReport:
        """The report of a model's ``groups`` and of the plans of its ranks."""
        first, costs = planned.first, planned.costs
        is_complete = len(costs) == planned.ranks
        assert not is_complete or planned.total_shard_bytes == sum(c.shard_bytes for c in costs)
        return cls(
            path=path,
            model_class=model_class,
            dtypes=_dtypes(first),
            ranks=planned.ranks,
            replicas=planned.replicas,
            tensors=len(first.wanted),
            model_bytes=sum(w.nbytes for w in first.wanted),
            source_bytes=first.source_bytes,
            per_rank=costs,
            total_shard_bytes=planned.total_shard_bytes,
            total_bytes_read=sum(c.bytes_read for c in costs) if is_complete else None,
            groups=len(groups),
            largest_group=largest_group(groups),
            replicated_bytes=sum(g.replicated_bytes for g in groups),
            unused=first.unused,
            initialized=first.initialized,
            converted=tuple(host.describe() for host in dict.fromkeys(first.conversions.values())),
            dequantized=described(first.coded.values(), first.kept),
            ignored_files=first.ignored_files,
            store=planned.store,
        )

    @property
    def is_every_rank(self) -> bool:
        """Whether ``per_rank`` lists all ranks."""
        return len(self.per_rank) == self.ranks

    def host_bytes(self, ranks: int, *, shards: bool) -> int:
        """Host memory that ``ranks`` ranks of one host need at the peak of a load: staging, and ``shards`` on the CPU.

        For the ranks that need most. What their processes take without a model comes on top.
        """
        needs = sorted((c.staging_bytes + shards * c.shard_bytes for c in self.per_rank), reverse=True)
        return sum(needs[:ranks]) if self.is_every_rank else ranks * needs[0]

    @property
    def max_shard_bytes(self) -> int:
        """Shard bytes of the rank that holds most."""
        return max(cost.shard_bytes for cost in self.per_rank)

    @property
    def min_shard_bytes(self) -> int:
        """Shard bytes of the rank that holds least."""
        return min(cost.shard_bytes for cost in self.per_rank)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            **asdict(self),
            "max_shard_bytes": self.max_shard_bytes,
            "min_shard_bytes": self.min_shard_bytes,
        }


def plan(
    path: str | os.PathLike[str],
    *,
    ranks: int,
    replicas: int = 1,
    ranks_per_host: int | None = None,
    dtype: torch.dtype | str = "auto",
    policy: ShardPolicy | None = None,
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

    Args:
        path: local directory with ``config.json`` and safetensors files, or a checkpoint of such a model, or the id of
            a model on the Hugging Face hub, which is downloaded if the cache lacks it.
        ranks: number of ranks of the load, at most 16,384.
        replicas: number of ranks that hold the same shard; divides ``ranks``.
        ranks_per_host: for the requests to a store, which ranks of one host share. Default: all.
        dtype: as for ``load_pretrained``.
        policy: how to wrap.
        auto_class, config, trust_remote_code, key_mapping, allow_unused, allow_missing, adapter, quantized, io, options: as for
            ``load_pretrained``.

    Raises :class:`ValueError` for invalid counts or an invalid dtype, :class:`PlanError` if the load can't be proved
    complete, :class:`SourceError`, :class:`ShardError` or :class:`LayoutError`.
    """
    _check_counts(ranks, replicas, ranks_per_host)
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
    asked = request.understood()
    _floating_dtype(asked.dtype)
    with counting() as looks:  # those of rank 0 of a load
        found = find_for_all(path, asked.hub, Ranks(), with_code=trust_remote_code)
        catalog = None if found.lent is None else open_for_all(found.lent, Ranks(), variant=asked.hub.variant)
    prepared = prepare(request, asked, found.directory, catalog=catalog)
    model_class = type(prepared.base).__name__  # before FSDP2 swaps it
    groups = describe_groups(prepared.model, policy)
    with _fake_ranks(ranks):
        shard(prepared.model, _mesh(ranks, replicas), policy)
        planned = _plan_ranks(prepared, io, looks, ranks, replicas, ranks_per_host or ranks)
    return PlanReport.of(prepared.catalog.root, model_class, groups, planned)


# ----------------------------------------------------------------------------------------------------
# Arguments


def _check_counts(ranks: int, replicas: int, ranks_per_host: int | None) -> None:
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks must be from 1 to {MAX_RANKS}, got {ranks}")
    if replicas < 1 or ranks % replicas:
        raise ValueError(f"replicas must be at least 1 and divide the {ranks} ranks, got {replicas}")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ValueError(f"ranks_per_host must be at least 1, got {ranks_per_host}")


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


def _dtypes(plan: Plan) -> tuple[str, ...]:
    held: dict[str, int] = {}
    for wanted in plan.wanted:
        held[wanted.dtype] = held.get(wanted.dtype, 0) + wanted.nbytes
    return tuple(sorted(held, key=lambda code: -held[code]))
