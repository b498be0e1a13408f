"""The demo's outcome: the report from the records of its processes, a table, and the loss curve."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..checkpoint.resume_report import ResumeReport
from ..operations.records import size

__all__ = ["draw_loss", "print_resume", "print_table", "read_losses", "records"]


def records(directory: Path, name: str) -> list[dict[str, Any]]:
    """The records that the ranks of one start wrote, by rank."""
    found = [json.loads(p.read_text(encoding="utf-8")) for p in directory.glob(f"{name}-rank-*.json")]
    return sorted(found, key=lambda record: int(record["rank"]))


def read_losses(directory: Path) -> dict[int, float]:
    """Loss by step of one start."""
    lines = (directory / "loss.jsonl").read_text(encoding="utf-8").splitlines()
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def print_resume(report: ResumeReport, console: Console) -> None:
    """Print the resume report of rank 0."""
    table = Table(title="Resume report", show_header=False, title_justify="left")
    for name, value in report.rows().items():
        table.add_row(name, value)
    console.print(table)


def print_table(report: Mapping[str, Any], console: Console) -> None:
    """Print the measured outcome. Each line comes from records of the processes."""
    table = Table(title="shardwise demo", show_header=False, title_justify="left")
    for section in (_load_rows(report), _crash_rows(report), _outcome_rows(report)):
        for name, value in section:
            table.add_row(name, value)
        table.add_section()
    console.print(table)


def _load_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    load = report["load"]
    rows = [
        ("model", f"{report['model']['class']}, {size(load['model_bytes'])} in fp32"),
        ("load", f"{load['seconds']:.2f} s on {_ranks(report['ranks'])}"),
        (
            "bytes read, all ranks",
            f"{size(load['bytes_read'])} = {load['bytes_read_ratio']:.3f} × the model",
        ),
    ]
    for rank in load["ranks"]:
        added = rank["memory_added"]
        peak = "not measured" if added is None else f"{size(added)}"
        rows.append(
            (
                f"peak memory added, rank {rank['rank']}",
                f"{peak} for a shard of {size(rank['local_bytes'])}",
            )
        )
    return rows


def _crash_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    crash, resume, twice = report["crash"], report["resume"], report["trained_twice"]
    return [
        (
            "killed",
            f"rank {crash['rank']} by {crash['signal']} while saving step {crash['step']}; "
            f"{size(crash['unpublished_bytes'])} were left unpublished",
        ),
        (
            "resumed",
            f"from step {resume['step']} on {resume['world_size']} ranks in {resume['seconds']:.1f} s",
        ),
        (
            "digests before and after",
            f"{_equal(report['digests']['resume_equal'])} ({report['digests']['tensors']} tensors)",
        ),
        (
            "steps trained twice",
            f"{_span(twice['steps'])}: losses differ by at most {twice['largest_difference']:.1e}",
        ),
        ("digests live and exported", _equal(report["digests"]["export_equal"])),
    ]


def _outcome_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    before, after, loss = report["before"], report["after"], report["loss"]
    return [
        ("training loss", f"{loss['first']:.3f} → {loss['last']:.3f} (mean of {loss['over']} steps)"),
        (f"held-out loss, {before['pairs']} pairs", f"{before['loss']:.3f} → {after['loss']:.3f}"),
        ("retrieval accuracy, held out", f"{before['accuracy']:.1%} → {after['accuracy']:.1%}"),
        ("the export was read by", "plain transformers, in a process without shardwise"),
        ("whole demo", f"{report['seconds']:.0f} s"),
    ]


def _equal(equal: bool) -> str:
    return "equal" if equal else "DIFFERENT"


def _span(steps: Sequence[int]) -> str:
    if len(steps) < 2:
        return str(steps[0]) if steps else "none"
    return f"{steps[0]} to {steps[-1]}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def draw_loss(
    path: Path, before: Mapping[int, float], after: Mapping[int, float], report: Mapping[str, Any]
) -> bool:
    """Draw the loss across the crash as a PNG. False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    resume, crash = report["resume"], report["crash"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        list(before),
        list(before.values()),
        "o-",
        markersize=5,
        color="tab:blue",
        label=_ranks(report["ranks"]),
    )
    axes.plot(
        list(after),
        list(after.values()),
        "x-",
        markersize=6,
        color="tab:orange",
        label=_ranks(resume["world_size"]),
    )
    axes.axvline(
        crash["step"], color="tab:red", linestyle="--", label=f"rank {crash['rank']} killed in a save"
    )
    axes.axvline(
        resume["step"], color="tab:green", linestyle=":", label=f"resumed from step {resume['step']}"
    )
    axes.axvline(
        report["pass_steps"] + 0.5, color="lightgray", zorder=0, label="second pass over the pairs begins"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("contrastive loss")
    axes.set_title("Training loss across kill -9 and a change of the number of ranks")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
