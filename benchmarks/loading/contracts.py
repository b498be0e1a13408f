"""What a load promises, held against what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.loading.rounds import Measured
from benchmarks.peers import FLOORS, PEERS

__all__ = ["Contract", "contracts"]

MIB = 2**20
#: A floor whose seconds spread more than this (maximum / minimum) decides nothing: other programs took the cores.
MOST_SPREAD = 1.5


@dataclass(frozen=True)
class Contract:
    """One promise in one cell."""

    promise: str
    cell: str
    value: float
    limit: float
    floor_spread: float = 1.0

    @property
    def verdict(self) -> Literal["holds", "BROKEN", "open"]:
        """``open``: above the limit, but the floor's own times spread too much to say so."""
        if self.value <= self.limit:
            return "holds"
        return "open" if self.floor_spread > MOST_SPREAD else "BROKEN"


def contracts(measured: Sequence[Measured], *, huge_pages: bool, speed: bool) -> list[Contract]:
    """All contracts that the cells allow to judge; those on seconds only if ``speed``."""
    found = []
    for one in measured:
        found += list(_exact(one))
        if speed and not one.cell.cold:
            found += list(_speed(one, huge_pages=huge_pages))
    return found


def _exact(one: Measured) -> Iterator[Contract]:
    """Bits, bytes, memory: these hold on a busy machine, too."""
    title, ours = one.cell.title, one.results["ours"]
    for peer, result in one.results.items():
        if result.failed:
            yield Contract(f"failures of {PEERS[peer].NAME}: {result.failed}", title, 1, 0)
        elif peer != "ours" and not result.not_supported:
            yield Contract(f"parameters unlike {PEERS[peer].NAME}'s", title, len(result.different), 0)
    if ours.failed:
        return
    if one.cell.cold:
        ratio = max(ours.over_ranks("storage_bytes")) / one.cell.case.nbytes
        yield Contract("storage bytes / model", title, ratio, 1.02)
    yield Contract("peak of anonymous memory less shard, MiB", title, ours.peak_beside_shard / MIB, 128)
    sent = sum(rank["collective_bytes"] for rank in ours.inspection)
    yield Contract("bytes in collectives", title, sent, 0)


def _speed(one: Measured, *, huge_pages: bool) -> Iterator[Contract]:
    model, layout, ours = one.cell.case.model, one.cell.case.layout, one.least_s("ours")
    if not ours:
        return
    limits = {"dense": (0.85 if huge_pages else 1.1, 1.15), "moe": (1.0, None), "small": (1.3, None)}
    for floor, limit in zip(FLOORS, limits.get(model, ()), strict=False):
        least = one.least_s(floor)
        if limit and least and layout == "dim 0" and (huge_pages or floor == "plain_floor"):
            seconds = one.results[floor].seconds
            yield Contract(
                f"seconds / {PEERS[floor].NAME}'s", one.cell.title, ours / least, limit, max(seconds) / least
            )
    for peer, module in PEERS.items():
        compared = "ours_whole" if module.WHOLE else "ours"
        mine, theirs = one.least_s(compared), one.least_s(peer)
        if peer not in (*FLOORS, "ours", "ours_whole") and mine and theirs:
            seconds = one.results[peer].seconds
            yield Contract(
                f"seconds / {module.NAME}'s", one.cell.title, mine / theirs, 1.0, max(seconds) / theirs
            )
