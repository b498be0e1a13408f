"""Which cells are measured, and their rounds: all peers in turn, fresh ranks for every run."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fresh import in_fresh_process, on_fresh_ranks
from benchmarks.loading.cases import Case, unsharded_before_ranks
from benchmarks.loading.models import write_model
from benchmarks.loading.rank import inspected, timed
from benchmarks.peers import FLOORS, ON_CPU, PEERS
from tests.gpu.devices import Visible
from tests.harness.page_cache import cached_bytes, drop

__all__ = ["Cell", "Measured", "Result", "Rounds", "cells", "measure"]

#: What the contracts on speed are about.
PINNED = ("ours", *FLOORS, "dcp")
#: What is measured with a cold page cache, where storage decides.
BY_STORAGE = ("ours", "plain_floor", "dcp")


@dataclass(frozen=True)
class Cell:
    """A case with the files in the page cache, or not in it, and the peers that are asked."""

    case: Case
    cold: bool = False
    peers: tuple[str, ...] = ON_CPU
    pinned: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        ranks = f"{self.case.ranks} rank{'s' * (self.case.ranks > 1)}"
        where = "" if self.case.device == "cpu" else f", {'one ' * self.case.shared}{self.case.device}"
        return f"{self.case.model}, {self.case.layout}, {ranks}, {'cold' if self.cold else 'warm'}{where}"


@dataclass
class Result:
    """What a peer did in a cell."""

    not_supported: str | None = None
    failed: str | None = None
    runs: list[list[dict[str, Any]]] = field(default_factory=list)
    inspection: list[dict[str, Any]] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    """Parameters whose shard on some rank differs from ours."""

    @property
    def seconds(self) -> list[float]:
        """By run, from when the first rank starts to when the last one ends."""
        return [max(r["ended"] for r in run) - min(r["started"] for r in run) for run in self.runs]

    def over_ranks(self, name: str) -> list[float]:
        """By run, the sum of a counter over the ranks."""
        return [sum(rank[name] for rank in run) for run in self.runs]

    @property
    def peak_beside_shard(self) -> int:
        """Peak of anonymous memory less the rank's shard, in bytes; of the worst rank."""
        return max(rank["peak_bytes"] - rank["shard_bytes"] for rank in self.inspection)

    @property
    def device_peak(self) -> int | None:
        """Peak of memory on the device, in bytes, of the worst rank; None where nothing counts it."""
        peaks = [rank["device_peak_bytes"] for rank in self.inspection]
        return None if None in peaks else max(peaks, default=None)

    @property
    def left_beside_shard(self) -> int:
        """The same after the load."""
        shards = [rank["shard_bytes"] for rank in self.inspection]
        return max(
            rank["anonymous_bytes"] - shard
            for run in self.runs
            for rank, shard in zip(run, shards, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        if self.not_supported or self.failed:
            return {"not supported": self.not_supported, "failed": self.failed}
        return {
            "rounds": len(self.runs),
            "seconds": _spread(self.seconds),
            **{name: _spread(self.over_ranks(name)) for name in ("cpu_s", "storage_bytes", "read_calls")},
            "pss_bytes_per_node": _spread(self.over_ranks("pss_bytes")),
            "anonymous_bytes_worst_rank": max(r["anonymous_bytes"] for run in self.runs for r in run),
            "anonymous_peak_bytes_worst_rank": max(r["peak_bytes"] for r in self.inspection),
            "anonymous_peak_beside_shard_bytes": self.peak_beside_shard,
            "device_peak_bytes_worst_rank": self.device_peak,
            "collective_bytes": sum(r["collective_bytes"] for r in self.inspection),
            "different_from_ours": self.different,
        }


@dataclass
class Measured:
    """A cell and its results by peer."""

    cell: Cell
    results: dict[str, Result]

    def least_s(self, peer: str) -> float | None:
        """The minimum of its seconds; None if the peer was not measured here."""
        result = self.results.get(peer)
        return min(result.seconds) if result and result.runs else None

    def to_json(self) -> dict[str, Any]:
        case = self.cell.case
        return {
            "model": case.model,
            "layout": case.layout,
            "ranks": case.ranks,
            "cold": self.cell.cold,
            "model_bytes": case.nbytes,
            "peers": {PEERS[peer].NAME: result.to_json() for peer, result in self.results.items()},
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def cells(root: str, *, short: bool, cold: bool) -> list[Cell]:
    """All cells of a benchmark, the contracts' own first."""

    def case(model: str, ranks: int, layout: str = "dim 0") -> Case:
        return Case(model, f"{root}/{model}", layout, ranks)

    some = 2 if short else 4
    dense = [case("dense", ranks) for ranks in ((some,) if short else (1, 2, 4, 8))]
    warm = [
        *(Cell(one, pinned=PINNED) for one in dense),
        *(Cell(case(model, some), pinned=PINNED) for model in ("moe", "small")),
        Cell(case("tied", some)),
        Cell(case("dense", some, "dim 1")),
        Cell(case("dense", 4, "FSDP × TP")),
        Cell(case("dense", 4, "HSDP"), peers=PINNED),
        Cell(case("wide", some), peers=("ours",)),
        Cell(case("wide", some, "dim 1"), peers=("ours",)),
    ]
    stored = [*dense, case("dense", some, "dim 1"), case("dense", 4, "HSDP")]
    return warm + [Cell(one, cold=True, peers=BY_STORAGE) for one in stored if cold]


@dataclass(frozen=True)
class Rounds:
    """How often a cell is measured: all peers ``most`` times, those that take more than their share of the time less often."""

    most: int
    least: int
    """Of every peer, however slow it is. Pinned peers are never measured less often than ``most``."""
    seconds: float
    """Of all cells together, about."""


def measure(cells: Sequence[Cell], rounds: Rounds, *, short: bool) -> list[Measured]:
    """Measure all cells; writes the models that are not there, tiny ones if ``short``."""
    deadline = time.monotonic() + rounds.seconds
    found: list[Measured] = []
    inspections: dict[tuple[Case, str], list[dict[str, Any]]] = {}
    shares = sum(len(cell.peers) for cell in cells)
    for cell in cells:
        if not Path(cell.case.directory).exists():
            in_fresh_process(_write, cell.case, short)
        unsharded_before_ranks(cell.case)
        results = {peer: Result(PEERS[peer].supports(cell.case)) for peer in cell.peers}
        for peer, result in results.items():
            _inspect(cell.case, peer, result, inspections)
        share_s = (deadline - time.monotonic()) / shares
        shares -= len(cell.peers)
        _rounds(cell, results, rounds, share_s)
        found.append(Measured(cell, results))
        print(_line(found[-1]), file=sys.stderr, flush=True)
    return found


def _on_ranks(case: Case, work: Callable[..., Any], peer: str) -> list[Any]:
    visible: Visible = "shared" if case.shared else "all"
    return on_fresh_ranks(case.ranks, work, peer, case, device=case.device, visible=visible)


def _write(case: Case, short: bool) -> None:
    write_model(case.model, case.directory, short=short)
    drop(*case.files)  # also writes them out, which would otherwise go on beside the first runs


def _inspect(
    case: Case, peer: str, result: Result, before: dict[tuple[Case, str], list[dict[str, Any]]]
) -> None:
    """Inspect a peer, unless it was in a cell ``before``, and compare its shards with ours."""
    if result.not_supported:
        return
    if (case, peer) not in before:
        try:
            before[case, peer] = _on_ranks(case, inspected, peer)
        except SystemExit as error:
            result.failed = str(error)
            return
    result.inspection = before[case, peer]
    if not getattr(PEERS[peer], "SHARDS", True):
        return
    theirs, ours = (
        [rank["hashes"] for rank in before.get((case, one), result.inspection)] for one in (peer, "ours")
    )
    names = {name for rank in (*theirs, *ours) for name in rank}
    result.different = sorted(
        name for name in names if any(a.get(name) != b.get(name) for a, b in zip(theirs, ours, strict=True))
    )


def _rounds(cell: Cell, results: dict[str, Result], rounds: Rounds, share_s: float) -> None:
    """Run the peers in turn: each round begins with another one, and every second goes backwards."""
    left = {peer: share_s for peer, result in results.items() if result.inspection}
    for turn in range(rounds.most):
        peers = list(left)
        if not peers:
            return
        order = peers[turn % len(peers) :] + peers[: turn % len(peers)]
        for peer in order[:: -1 if turn % 2 else 1]:
            each_s = (share_s - left[peer]) / max(turn, 1)
            if turn >= rounds.least and peer not in cell.pinned and each_s > left[peer]:
                del left[peer]
                continue
            started = time.monotonic()
            (_cool if cell.cold else _warm)(cell.case.files)
            try:
                results[peer].runs.append(_on_ranks(cell.case, timed, peer))
            except SystemExit as error:
                results[peer].failed = str(error)
                del left[peer]
                continue
            left[peer] -= time.monotonic() - started


def _cool(files: list[Path]) -> None:
    drop(*files)
    if left := cached_bytes(*files):
        raise SystemExit(
            f"{left} bytes of {files[0].parent} stay in the page cache; give --directory on a disk"
        )


def _warm(files: list[Path]) -> None:
    if cached_bytes(*files) >= sum(file.stat().st_size for file in files):
        return
    buffer = bytearray(8 * 2**20)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _line(measured: Measured) -> str:
    times = (f"{peer} {min(r.seconds):.3f}" for peer, r in measured.results.items() if r.runs)
    return f"{measured.cell.title}: {', '.join(times)}"
