"""The records of ``plan``: the cost of a load on every rank, and of a training run by phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..loading.store_requests import StoreRequests
from ..objects import frozen
from ..operations.printed import Printed
from ..operations.records import size
from ..planning import Plan
from ..planning.casts import Cast, casts_of
from ..quantized.dequantized import Dequantized, described
from ..recipe.host_convert import Converted
from ..recipe.match import Declaration
from ..sharding.groups import Group, largest_group
from .fit import Search, Verdict
from .records import RunPlan

__all__ = ["PlanReport", "RankCost", "RanksPlanned"]


@frozen
class RankCost:
    """The cost of one rank's plan."""

    rank: int
    shard_bytes: int
    """Bytes of this rank's part of parameters and persistent buffers."""
    bytes_read: int
    """Bytes that the load reads from the source."""
    staging_bytes: int
    """Host memory besides the shards during the load, for a CPU target; of memory that ranks of a host share, this rank's part."""
    reads: int
    """Strided copies in the plan."""


@frozen(kw_only=True)
class RanksPlanned:
    """The plan of rank 0, and the cost of each rank that was planned; see :class:`PlanReport`."""

    ranks: int
    replicas: int
    tp: int
    ep: int
    first: Plan
    costs: tuple[RankCost, ...]
    total_shard_bytes: int
    store: StoreRequests | None


#: Fields that are tables of their own, or have a row with another text.
_NOT_SHOWN = {"per rank", "run", "verdict", "search", "largest group", "store"}


@frozen(kw_only=True)
class PlanReport(Printed):
    """The cost of loading (and training) a model with ``ranks`` ranks, computed from the plans that a real load would run."""

    path: str
    model_class: str
    """Class of the model; with adapters, that of the base."""
    dtypes: tuple[str, ...]
    """Dtypes of the model's tensors, by the number of bytes in each, largest first."""
    ranks: int
    replicas: int
    """Copies of the model across all ranks: 1 with FSDP, more with HSDP."""
    tp: int
    """Tensor-parallel ranks; 1 without tensor parallelism."""
    ep: int
    """Expert-parallel ranks; 1 without expert parallelism."""
    tensors: int
    model_bytes: int
    """Bytes of all parameters and persistent buffers, counting tied tensors once."""
    source_bytes: int
    per_rank: tuple[RankCost, ...]
    """Every rank, up to 64 ranks. Above that, only the rank that holds most (rank 0) and the one that holds least (the last)."""
    total_shard_bytes: int
    """Sum over all ranks."""
    total_bytes_read: int | None
    """Sum over all ranks. None if not every rank was planned."""
    groups: int
    """Number of FSDP2 groups of the model."""
    largest_group: Group
    """The group that takes the most memory while it is gathered."""
    replicated_bytes: int
    """Bytes on each rank of parameters that FSDP2 can't shard and that are therefore replicated."""
    unused: tuple[Declaration, ...]
    initialized: tuple[Declaration, ...]
    converted: tuple[Converted, ...]
    """Conversions that can't be compiled to byte ranges. Each rank that needs a part of a result runs them in full."""
    dequantized: tuple[Dequantized, ...]
    """Quantized formats in the source whose tensors will be dequantized."""
    casts: tuple[Cast, ...]
    """Casts that round stored values."""
    ignored_files: tuple[str, ...]
    store: StoreRequests | None
    """Requests to object stores during the load. None for local files."""
    from_config: bool = False
    """Planned from a config alone, assuming that the source contains the model's tensors in the model's dtypes."""
    run: RunPlan | None = None
    """The phases of the training. None without ``training=``."""
    verdict: Verdict | None = None
    """Whether the run fits. None without a limit."""
    search: Search | None = None
    """How many ranks the run needs. None if you passed a number."""

    def rows(self) -> Mapping[str, str]:
        """The rows of the printed table. ``shardwise plan`` also shows each rank and each phase."""
        most, largest = max(self.per_rank, key=lambda cost: cost.shard_bytes), self.largest_group
        rows = {name: text for name, text in Printed.rows(self).items() if name not in _NOT_SHOWN}
        rows["a rank holds"] = f"at most {size(most.shard_bytes)}"
        rows["largest group"] = (
            f"{size(largest.gathered_bytes)} while it is gathered ({largest.name or 'root'})"
        )
        if self.verdict is not None:
            rows["verdict"] = self.verdict.outcome
        return rows

    @classmethod
    def of(cls, path: str, model_class: str, groups: tuple[Group, ...], planned: RanksPlanned) -> PlanReport:
        """Create the report of the load alone, from the model's ``groups`` and the plans of its ranks."""
        first, costs = planned.first, planned.costs
        is_complete = len(costs) == planned.ranks
        assert not is_complete or planned.total_shard_bytes == sum(c.shard_bytes for c in costs)
        return cls(
            path=path,
            model_class=model_class,
            dtypes=_dtypes(first),
            ranks=planned.ranks,
            replicas=planned.replicas,
            tp=planned.tp,
            ep=planned.ep,
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
            casts=casts_of(first.rounded),
            ignored_files=first.ignored_files,
            store=planned.store,
        )

    @property
    def is_every_rank(self) -> bool:
        """Whether ``per_rank`` lists all ranks."""
        return len(self.per_rank) == self.ranks

    def host_bytes(self, ranks: int, *, shards: bool) -> int:
        """Host memory that ``ranks`` ranks on one host need at the peak of a load: staging, and ``shards`` on the CPU.

        Computed for the ranks that need most. The memory that their processes take even without a model is not included.
        """
        needs = sorted((c.staging_bytes + shards * c.shard_bytes for c in self.per_rank), reverse=True)
        return sum(needs[:ranks]) if self.is_every_rank else ranks * needs[0]

    @property
    def max_shard_bytes(self) -> int:
        """Shard bytes on the rank that holds most."""
        return max(cost.shard_bytes for cost in self.per_rank)

    @property
    def min_shard_bytes(self) -> int:
        """Shard bytes on the rank that holds least."""
        return min(cost.shard_bytes for cost in self.per_rank)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            **asdict(self),
            "run": None if self.run is None else self.run.to_json(),
            "max_shard_bytes": self.max_shard_bytes,
            "min_shard_bytes": self.min_shard_bytes,
        }


def _dtypes(plan: Plan) -> tuple[str, ...]:
    held: dict[str, int] = {}
    for wanted in plan.wanted:
        held[wanted.dtype] = held.get(wanted.dtype, 0) + wanted.nbytes
    return tuple(sorted(held, key=lambda code: -held[code]))
