"""What ``benchmarks/gpu_check.py`` found, as Markdown, and what of it does not hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.loading.rounds import Measured, Result
from benchmarks.peers import PEERS
from shardwise import IOOptions

__all__ = ["as_markdown", "problems_of"]

MIB = 2**20
#: What an allocator adds by rounding, and FSDP2 by padding uneven shards.
_ROUNDING_BYTES = 2 * MIB

_LEGEND = """Fresh processes for every run, all loaders in turn. Seconds go from when the first rank leaves a barrier to when the
last rank's device has finished. GB/s is what one rank loads: its shards, or the whole model where the loader says "whole". "Of
the copy" is the time that copying a rank's shards from pinned memory takes, divided by the loader's. Device memory is the worst rank's peak,
anonymous memory the host's."""


def problems_of(measured: Sequence[Measured]) -> list[str]:
    """What does not hold: failures and memory of ours, and shards of other loaders that differ from ours."""
    found = []
    for one in measured:
        ours, title = one.results["ours"], one.cell.title
        if ours.failed:
            found.append(f"{title}: the load failed: {ours.failed}")
            continue
        shard = max(rank["shard_bytes"] for rank in ours.inspection)
        most = shard + IOOptions().staging_bytes + _ROUNDING_BYTES
        if ours.device_peak is not None and ours.device_peak > most:
            found.append(
                f"{title}: {ours.device_peak} bytes on the device at the peak, expected at most {most}"
            )
        for peer, result in one.results.items():
            if result.different:
                found.append(f"{title}: {len(result.different)} parameters unlike {PEERS[peer].NAME}'s")
    return found


def as_markdown(
    device: Mapping[str, Any],
    checks: Mapping[str, tuple[str, str]],
    measured: Sequence[Measured],
    problems: Sequence[str],
) -> str:
    """The device with its versions and the date, the checks, a table for each cell, and what does not hold."""
    lines = [f"# {device['count']} × {device['name']}", ""]
    lines += [
        ", ".join(f"{name} {value}" for name, value in device.items() if name not in ("name", "count")),
        "",
    ]
    if checks:
        lines += ["| check | | |", "|---|---|---|"]
        lines += [f"| {name} | {status} | {_cell(detail)} |" for name, (status, detail) in checks.items()] + [
            ""
        ]
    if measured:
        lines += [_LEGEND, ""]
    for one in measured:
        lines += [f"## {one.cell.title} ({one.cell.case.nbytes / MIB:,.0f} MiB)", "", *_rows(one), ""]
        for peer, result in one.results.items():
            if reason := result.not_supported or result.failed:
                lines.append(f"Not here: {PEERS[peer].NAME} ({reason}).")
        lines.append("")
    return "\n".join([*lines, *(f"DOES NOT HOLD: {problem}" for problem in problems), ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


_COLUMNS = (
    "loader",
    "rounds",
    "s, min",
    "median",
    "GB/s",
    "of the copy",
    "device MiB",
    "anonymous MiB",
    "CPU s",
)


def _rows(one: Measured) -> list[str]:
    rows = [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    copy_s = one.least_s("host_to_device")
    for peer, result in one.results.items():
        if result.runs:
            whole = not getattr(PEERS[peer], "SHARDS", True) and peer != "host_to_device"
            nbytes = one.cell.case.nbytes // (1 if whole else one.cell.case.ranks)
            rows.append(f"| {PEERS[peer].NAME} | {' | '.join(_values(result, nbytes, copy_s))} |")
    return rows


def _values(result: Result, nbytes: int, copy_s: float | None) -> list[str]:
    least = min(result.seconds)
    return [
        str(len(result.runs)),
        f"{least:.3f}",
        f"{statistics.median(result.seconds):.3f}",
        f"{nbytes / least / 1e9:.2f}",
        f"{copy_s / least:.0%}" if copy_s else "–",
        "–" if result.device_peak is None else f"{result.device_peak / MIB:,.0f}",
        f"{max(rank['peak_bytes'] for rank in result.inspection) / MIB:,.0f}",
        f"{statistics.median(result.over_ranks('cpu_s')):.2f}",
    ]
