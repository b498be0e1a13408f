"""Runs all checks: two launches of ranks, with all devices visible and with one for each rank."""

from __future__ import annotations

import functools
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, Literal

import torch

from tests.gpu.checks import AGAIN, CHECKS, Check, Skipped

__all__ = ["Outcome", "run_checks", "summary"]

#: ``("ok", facts)``, ``("skipped", reason)`` or ``("failed", traceback)``, and seconds.
Outcome = tuple[str, Any, float]
MOST_RANKS = 2


def run_checks(kind: str, count: int, root: str) -> dict[str, list[Outcome]]:
    """Run them on at most two of ``count`` devices; the outcomes of each by rank.

    A rank that dies or hangs fails what its launch had not finished. Touches no device itself.
    """
    ranks = min(count, MOST_RANKS)
    found: dict[str, list[Outcome]] = {}
    launches: tuple[tuple[dict[str, Check], Literal["all", "own"], str], ...] = (
        (CHECKS, "all", ""),
        (AGAIN, "own", " in new processes that see one device each"),
    )
    from benchmarks.fresh import on_fresh_ranks

    for checks, visible, suffix in launches:
        try:
            by_rank = on_fresh_ranks(
                ranks, _on_rank, list(checks), visible, root, device=kind, visible=visible, timeout_s=300
            )
        except SystemExit as error:
            by_rank = [{name: ("failed", str(error), 0.0) for name in checks}] * ranks
        for name in checks:
            found[name + suffix] = [outcomes[name] for outcomes in by_rank]
    return found


def _on_rank(rank: int, world_size: int, names: list[str], visible: str, root: str) -> dict[str, Outcome]:
    checks, device = CHECKS if visible == "all" else AGAIN, torch.accelerator.current_accelerator()
    assert device is not None
    device = torch.device(device.type, torch.accelerator.current_device_index())
    warnings.simplefilter("ignore")  # those of torch about a backend
    found = {}
    for name in names:
        if rank == 0:
            print(f"check: {name}", flush=True)  # so that a hang has a name
        directory = Path(root) / name.replace(" ", "-")
        if checks is CHECKS and name in AGAIN:
            directory.mkdir(exist_ok=True)
        started = time.perf_counter()
        found[name] = (
            *_outcome(functools.partial(checks[name], str(directory), device)),
            time.perf_counter() - started,
        )
    return found


def _outcome(check: functools.partial[Any]) -> tuple[str, Any]:
    try:
        return "ok", check()
    except Skipped as reason:
        return "skipped", str(reason)
    except Exception:
        return "failed", traceback.format_exc()


def summary(outcomes: list[Outcome]) -> tuple[str, str]:
    """One word for all ranks, and what to show of them."""
    for wanted in ("failed", "skipped"):
        for rank, (status, detail, _) in enumerate(outcomes):
            if status == wanted:
                lines = [
                    line
                    for line in str(detail).strip().splitlines()
                    if not line.startswith("Causes and cures")
                ]
                last = lines[-1] if lines else "no message"
                return status, f"rank {rank}: {last}" if status == "failed" else last
    return "ok", ", ".join(f"{name} {value}" for name, value in outcomes[0][1].items())
