"""Runs all checks: ranks that see all devices, then ranks that see one each; on a machine with one device, two share it."""

from __future__ import annotations

import functools
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.gpu.checks import AGAIN, CHECKS, Check, Skipped
from tests.gpu.devices import Visible

__all__ = ["Outcome", "run_checks", "summary"]

#: ``("ok", facts)``, ``("skipped", reason)`` or ``("failed", traceback)``, and seconds.
Outcome = tuple[str, Any, float]
MOST_RANKS = 2


def run_checks(kind: str, count: int, root: str) -> dict[str, list[Outcome]]:
    """Run them on at most two of ``count`` devices; the outcomes of each by rank. Of a single device, two ranks share it too.

    A rank that dies or hangs fails what its launch had not finished. Touches no device itself.
    """
    from benchmarks.fresh import on_fresh_ranks

    found: dict[str, list[Outcome]] = {}
    most = min(count, MOST_RANKS)
    launches: list[tuple[dict[str, Check], Visible, int, str]] = [
        (CHECKS, "all", most, ""),
        (AGAIN, "own", most, " in new processes that see one device each"),
    ]
    if count == 1:
        launches.append((CHECKS, "shared", 2, ", two processes on one device"))
        launches.append((AGAIN, "shared", 2, " in new processes, two on one device"))
    for checks, visible, ranks, suffix in launches:
        directory = Path(root, str(ranks))
        directory.mkdir(exist_ok=True)
        try:
            by_rank = on_fresh_ranks(
                ranks, _on_rank, checks, str(directory), device=kind, visible=visible, timeout_s=300
            )
        except SystemExit as error:
            by_rank = [{name: ("failed", str(error), 0.0) for name in checks}] * ranks
        for name in checks:
            found[name + suffix] = [outcomes[name] for outcomes in by_rank]
    return found


def _on_rank(rank: int, world_size: int, checks: dict[str, Check], root: str) -> dict[str, Outcome]:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    device = torch.device(device.type, torch.accelerator.current_device_index())
    warnings.simplefilter("ignore")  # those of torch about a backend
    found = {}
    for name in checks:
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
                    if not line.startswith("Causes and fixes")
                ]
                last = lines[-1] if lines else "no message"
                return status, f"rank {rank}: {last}" if status == "failed" else last
    return "ok", ", ".join(f"{name} {value}" for name, value in outcomes[0][1].items())
