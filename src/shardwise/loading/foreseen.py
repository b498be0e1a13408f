"""What the ranks of a load will stage, foreseen without them: it depends on the strategy that they choose together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from ..dtypes import itemsize
from ..objects import frozen
from ..transfer.shared import held_bytes
from .strategy import Choice, Facts, Planned, bucket_bytes_of, choose, facts_of

__all__ = ["StagingTally"]


@frozen
class _Staged:
    """What one rank stages beside buckets."""

    alone: int
    """If it reads its own ranges."""
    beside_buckets: int
    initialized: int
    """For a module that is initialized, after the reads."""


class StagingTally:
    """Host memory that a load over ``ranks`` ranks stages, rank by rank; rank 0 comes first. Looks at the sizes of the files.

    Ranks that are not added count as rank 0. Network file systems are those that this process sees.
    """

    def __init__(self, *, ranks: int, ranks_per_host: int) -> None:
        self._ranks, self._per_host = ranks, ranks_per_host
        self._first: Planned | None = None
        self._facts: dict[int, Facts] = {}
        self._found: dict[int, _Staged] = {}

    def add(self, rank: int, planned: Planned) -> None:
        """Note a rank's plan: it tells the other ranks of it, and stages memory for it."""
        plan = planned.plan
        self._first = self._first or planned
        self._facts[rank] = facts_of(planned, "", "")
        compared = max((t.span_numel * itemsize(t.source_dtype) for t in plan.checks), default=0)
        converted = max((host.staging_bytes for host in plan.conversions.values()), default=0)
        self._found[rank] = _Staged(plan.staging_bytes, converted + compared, plan.init_staging_bytes)

    def result(self) -> Sequence[int]:
        """Bytes of each rank that was added, in that order. Of buckets that ranks of a host share, each counts its own."""
        first = self._first
        assert first is not None
        choice = self._choice(first)
        buckets = _buckets_of(first, choice)
        if choice.strategy == "own":
            return [max(one.alone, one.initialized) for one in self._found.values()]
        most = first.io.staging_bytes
        return [max(min(buckets + one.beside_buckets, most), one.initialized) for one in self._found.values()]

    def _choice(self, first: Planned) -> Choice:
        """The strategy that the ranks will choose."""
        facts = self._facts
        told = [
            asdict(replace(facts.get(rank, facts[0]), host=str(rank // self._per_host)))
            for rank in range(self._ranks)
        ]
        return Choice(**choose("plan", first.io.strategy, first.catalog.nbytes, told))


def _buckets_of(planned: Planned, choice: Choice) -> int:
    """What rank 0 holds for buckets: no more than its part of the source, where it reads in turns with others."""
    readers = choice.readers or choice.peers_of(0)
    held = held_bytes(choice.strategy, bucket_bytes_of(planned, choice), readers=len(readers))
    return min(held, -(-planned.catalog.nbytes // max(1, len(readers)))) if choice.hosts else held
