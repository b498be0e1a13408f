"""What was measured, as JSON, as Markdown tables and as a picture."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shardwise
from benchmarks.loading.contracts import Contract
from benchmarks.loading.rounds import Measured, Result
from benchmarks.peers import PEERS

__all__ = ["as_json", "as_table", "contract_lines", "draw", "huge_pages_on"]

MIB = 2**20
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_LEGEND = """Fresh processes for every run, forked from one that has imported everything; all peers in turn. Seconds go from when the
first rank leaves a barrier to when the last rank has its shards; config, model on meta and sharding are done before, except for
peers "from path", whose time includes them. CPU seconds, storage bytes, read calls and PSS are sums over the ranks: medians,
and for storage bytes the most. Read calls are system calls; pages of mapped files are not among them. Anonymous memory is that of
the worst rank, less its shard, MiB: its peak (RssAnon every 2 ms, in a run of its own) and what is left after the load. Below zero:
shards are maps of the files. PSS is what the load added to the node. Collectives: bytes that they gave to the ranks. All shards
were compared with ours, bit by bit. Peers that take long have fewer rounds."""


def huge_pages_on() -> bool:
    """Whether the kernel gives huge pages to memory that is advised so."""
    return _HUGE_PAGES.exists() and "[never]" not in _HUGE_PAGES.read_text()


def as_json(measured: Sequence[Measured], contracts: Sequence[Contract], seconds: float) -> dict[str, Any]:
    return {
        "machine": _machine(),
        "minutes": round(seconds / 60, 1),
        "cells": [one.to_json() for one in measured],
        "contracts": [
            {"promise": c.promise, "cell": c.cell, "value": c.value, "limit": c.limit, "verdict": c.verdict}
            for c in contracts
        ],
    }


def _machine() -> dict[str, Any]:
    packages = ("torch", "transformers", "accelerate", "safetensors")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "huge_pages": huge_pages_on(),
        "python": platform.python_version(),
        "shardwise": shardwise.__version__,
        **{package: importlib.metadata.version(package) for package in packages},
    }


def as_table(measured: Sequence[Measured], contracts: Sequence[Contract], seconds: float) -> str:
    """A page: the machine, a table for each cell, the contracts."""
    machine = ", ".join(f"{name} {value}" for name, value in _machine().items())
    lines = ["# Loads beside their floors and other loaders", ""]
    lines += ["Written by `make bench` (`benchmarks/load.py --table`), not by hand.", "", _LEGEND, ""]
    lines += [f"{machine}; {seconds / 60:.1f} minutes.", ""]
    for one in measured:
        lines += [f"## {one.cell.title} ({one.cell.case.nbytes / MIB:,.0f} MiB)", "", *_rows(one), ""]
        reasons: dict[str, list[str]] = {}
        for peer, result in one.results.items():
            if reason := result.not_supported or result.failed:
                reasons.setdefault(reason, []).append(PEERS[peer].NAME)
        lines += [f"Not here: {', '.join(names)} ({reason})." for reason, names in reasons.items()]
        lines += [""] if reasons else []
    return "\n".join([*lines, "## Contracts", "", *_contract_table(contracts), ""])


_COLUMNS = (
    *("peer", "rounds", "s, min", "median", "max / min", "min / plain floor", "CPU s", "storage MiB"),
    *("read calls", "peak − shard", "left − shard", "PSS MiB", "collectives MiB"),
)


def _rows(one: Measured) -> list[str]:
    rows = [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    floor = one.least_s("plain_floor")
    for peer, result in one.results.items():
        if result.runs:
            rows.append(f"| {PEERS[peer].NAME} | {' | '.join(_cells(result, floor))} |")
    return rows


def _cells(result: Result, floor: float | None) -> list[str]:
    seconds = result.seconds
    return [
        str(len(seconds)),
        f"{min(seconds):.3f}",
        f"{statistics.median(seconds):.3f}",
        f"{max(seconds) / min(seconds):.2f}",
        f"{min(seconds) / floor:.2f}" if floor else "–",
        f"{statistics.median(result.over_ranks('cpu_s')):.2f}",
        f"{max(result.over_ranks('storage_bytes')) / MIB:,.0f}",
        f"{statistics.median(result.over_ranks('read_calls')):,.0f}",
        f"{round(result.peak_beside_shard / MIB):,}",
        f"{round(result.left_beside_shard / MIB):,}",
        f"{statistics.median(result.over_ranks('pss_bytes')) / MIB:,.0f}",
        f"{sum(rank['collective_bytes'] for rank in result.inspection) / MIB:,.1f}",
    ]


def _contract_table(contracts: Sequence[Contract]) -> list[str]:
    """Each promise once: where it holds by least, and where it does not hold."""
    rows = ["| promise | cells | worst | at most | where | |", "|---|---|---|---|---|---|"]
    for promise in dict.fromkeys((c.promise, c.limit) for c in contracts):
        same = [c for c in contracts if (c.promise, c.limit) == promise]
        worst = max(same, key=lambda c: c.value)
        broken = [c.verdict for c in same if c.verdict != "holds"]
        verdict = f"{worst.verdict} ({len(broken)})" if broken else "holds"
        rows.append(
            f"| {worst.promise} | {len(same)} | {worst.value:.3f} | {worst.limit:g} | {worst.cell} | {verdict} |"
        )
    return rows


def contract_lines(contracts: Sequence[Contract]) -> list[str]:
    """The same for a terminal: each one that does not hold, and a count."""
    lines = [
        f"{c.verdict}: {c.promise} is {c.value:.3f}, at most {c.limit:g} ({c.cell})"
        for c in contracts
        if c.verdict != "holds"
    ]
    return [*lines, f"{sum(c.verdict == 'holds' for c in contracts)} of {len(contracts)} contracts hold"]


def draw(measured: Sequence[Measured], path: str) -> str:
    """Draw minima of seconds by cell and peer; returns what was done. Needs matplotlib, the extra ``plot``."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed (the extra `plot`)"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    peers = [peer for peer in PEERS if any(one.least_s(peer) for one in measured)]
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.9 * len(measured)), layout="constrained")
    height = 0.8 / len(peers)
    for k, peer in enumerate(peers):
        shown = [(i, one.least_s(peer)) for i, one in enumerate(measured) if one.least_s(peer)]
        axes.barh([i + k * height for i, _ in shown], [s for _, s in shown], height, label=PEERS[peer].NAME)
    axes.set_yticks([i + 0.4 for i in range(len(measured))], [one.cell.title for one in measured])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds, minimum (log scale)")
    figure.legend(loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=120)
    return f"picture: {path}"
