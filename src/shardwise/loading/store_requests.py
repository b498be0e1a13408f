"""What a load asks object stores for: counted from its plan, request by request, before any is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from ..objects import frozen
from ..planning.buckets import Buckets, Span
from ..recipe.host_convert import HostConversion
from ..storage import Requests
from ..transfer.checked import boxes_of_spans
from ..transfer.converted import spans_of_tensors
from ..transfer.copy import spans_of
from ..transfer.decoded import spans_of_box
from ..transfer.objects import LAST_BYTES, requests_for
from ..transfer.shared import spans_in_turn
from .strategy import Choice, Planned, buckets_for, choose, facts_of

__all__ = ["RankRequests", "StoreRequests", "StoreTally"]


@frozen
class RankRequests:
    """The requests for payload of one rank."""

    rank: int
    requests: int
    nbytes: int
    """Bytes that it asks for, gaps between ranges included."""


@frozen(kw_only=True)
class StoreRequests:
    """The requests that a load makes to object stores, if none has to be made again.

    A load whose ranks can't share memory, which only the load finds out, makes those of ``strategy="own"``.
    """

    strategy: str
    """Who reads, and why, as in :class:`LoadReport`."""
    part_bytes: int
    """The most bytes of a request for payload."""
    looks: int
    """Requests that rank 0 makes before: lists, documents, headers. The plan has made the same ones."""
    look_bytes: int
    per_rank: tuple[RankRequests, ...]
    """For payload; the ranks of :attr:`PlanReport.per_rank`."""
    requests: int | None
    """For payload, of all ranks. None if ranks need different requests and not every rank was planned."""
    nbytes: int | None
    """Of these requests."""

    @property
    def total(self) -> int | None:
        """All requests of all ranks, with ``looks``."""
        return None if self.requests is None else self.requests + self.looks


class StoreTally:
    """Counts the requests of a load over ``ranks`` ranks, rank by rank; rank 0 comes first. Keeps rank 0's plan. Pure."""

    def __init__(self, first: Planned, *, ranks: int, ranks_per_host: int) -> None:
        self._first, self._ranks = first, ranks
        facts = facts_of(first, "", "")
        told = [asdict(replace(facts, host=str(rank // ranks_per_host))) for rank in range(ranks)]
        self._choice = Choice(**choose("plan", first.io.strategy, first.catalog.nbytes, told))
        self._buckets: dict[str, list[Buckets]] = {}  # by host
        self._readers: dict[str, Sequence[int]] = {}
        self._found: list[RankRequests] = []

    def add(self, rank: int, planned: Planned) -> None:
        """Count the requests of a rank, which has this plan."""
        plan = planned.plan
        reads = {"own": (plan.transfers, plan.checks), "node": (plan.checks,), "once": ()}
        alone = [spans_of(transfers) for transfers in reads[self._choice.strategy]]
        self._found.append(RankRequests(rank, *_count(planned, [*self._shared(rank), *alone])))

    def result(self, looks: Requests) -> StoreRequests:
        """The requests of the load. ``looks``: those that the plan has made."""
        found = self._of_all_ranks()
        return StoreRequests(
            strategy=self._choice.describe(),
            part_bytes=LAST_BYTES,
            looks=looks.total,
            look_bytes=looks.bytes_read,
            per_rank=tuple(self._found),
            requests=None if found is None else sum(one.requests for one in found),
            nbytes=None if found is None else sum(one.nbytes for one in found),
        )

    def _of_all_ranks(self) -> list[RankRequests] | None:
        """None if that would take a plan for each of them."""
        if len(self._found) == self._ranks:
            return self._found
        differ = len(set(self._choice.hosts)) > 1  # hosts read different bytes
        if self._choice.strategy == "own" or differ or self._first.plan.checks:
            return None
        return [RankRequests(k, *_count(self._first, self._shared(k))) for k in range(self._ranks)]

    def _shared(self, rank: int) -> list[Iterator[Span]]:
        """The spans that a rank reads for all: of the fill, and of second copies where these are shared too."""
        choice = self._choice
        if choice.strategy == "own":
            return []
        host = choice.hosts[rank] if choice.hosts else ""
        if host not in self._buckets:
            kinds = (False, True) if choice.strategy == "once" else (False,)
            made = [buckets_for(self._first, choice, rank, copies=copies) for copies in kinds]
            self._buckets[host] = [one for one in made if one is not None]
            self._readers[host] = choice.readers or choice.peers_of(rank)
        return [spans_in_turn(one.buckets, self._readers[host], rank) for one in self._buckets[host]]


def _count(planned: Planned, announced: Iterable[Iterable[Span]]) -> tuple[int, int]:
    """The requests for spans, and for the sources of the conversions whose results are among them; and their bytes."""
    conversions, stored = planned.plan.conversions, planned.catalog.tensors
    run: list[HostConversion] = []
    coded = planned.plan.coded

    def files(spans: Iterable[Span]) -> Iterator[Span]:
        in_parts: list[Span] = []
        for span in spans:
            host = conversions.get(span[0])
            if host is None and span[0] in coded:
                in_parts.append(span)
            elif host is None:
                yield span
            elif not run or run[-1] is not host:  # the reader keeps the results of the last one
                run.append(host)
        for one, box in boxes_of_spans(in_parts, coded, planned.io.parts_bytes):
            yield from spans_of_box(one, box)

    asked = [span for spans in announced for span in requests_for(files(spans))]
    for host in run:
        asked += requests_for(spans_of_tensors(stored[name] for name in host.sources))
    return len(asked), sum(stop - start for _, start, stop in asked)
