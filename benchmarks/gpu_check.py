"""``make gpu-check``: what must hold on a real GPU, and how fast a load onto it is beside other loaders and the copy alone.

    make gpu-check
    PYTHONPATH=src python3 -m benchmarks.gpu_check                  # an image's own Python: no install, no network
    PYTHONPATH=src python3 -m benchmarks.gpu_check --only checks    # minutes less

Needs torch 2.11, safetensors and numpy; transformers 5.0 for models of transformers. Without a GPU it says so and exits 0.
Figures go to build/gpu-check: checks.json, load.json, report.md. The exit status is 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.gpu.image import complete, transformers_problem

STAND_INS = complete()  # before anything imports shardwise

from benchmarks.fresh import from_fresh_process
from benchmarks.loading.cases import Case
from benchmarks.loading.device_report import as_markdown, problems_of
from benchmarks.loading.rounds import Cell, Measured, Rounds, measure
from benchmarks.peers import ON_DEVICES
from tests.gpu.devices import SIMULATED, describe
from tests.gpu.run import Outcome, run_checks, summary
from tests.harness.page_cache import drops_pages


def main() -> None:
    """Check, measure, write, and say what does not hold."""
    args = _arguments()
    device = from_fresh_process(describe, args.device)
    if device is None:
        print(f"gpu-check: torch sees no {args.device or 'GPU'} here, so there is nothing to check")
        return
    device |= {"date": time.strftime("%Y-%m-%d"), **_versions(), "stand-ins": STAND_INS}
    if device["type"] == SIMULATED:
        from tests.device import build

        build.built()
    _import_once()
    root = tempfile.mkdtemp(prefix="shardwise-gpu-", dir=args.directory)
    try:
        checks = _checked(args, device, root)
        measured = _measured(args, device, root)
        problems = [name for name, found in checks.items() if summary(found)[0] == "failed"] + problems_of(
            measured
        )
        _write(Path(args.out), device, checks, measured, problems)  # asks for the sizes of the files
    finally:
        shutil.rmtree(root, ignore_errors=True)
    sys.exit(bool(problems))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        metavar="TYPE",
        help="cuda, xpu; simgpu or cpu to try this script; default: what torch has",
    )
    parser.add_argument("--only", choices=("checks", "load"))
    parser.add_argument(
        "--cells", nargs="+", default=[], help="those with one of these texts in their titles"
    )
    parser.add_argument("--peers", nargs="+", choices=ON_DEVICES, help="default: those of each cell")
    parser.add_argument("--rounds", type=int, default=5, help="of each loader at most (default: 5)")
    parser.add_argument("--minutes", type=float, default=10, help="of which slow loaders get what is left")
    parser.add_argument(
        "--short", action="store_true", help="tiny models: that everything runs, not how fast"
    )
    parser.add_argument("--directory", help="for the models, on the disk to be measured")
    parser.add_argument("--out", default="build/gpu-check")
    return parser.parse_args()


def _versions() -> dict[str, str]:
    import safetensors
    import torch

    found = {"torch": torch.__version__, "safetensors": safetensors.__version__}
    problem = transformers_problem()
    if problem is None:
        import transformers

        problem = transformers.__version__
    return {**found, "transformers": problem, "python": sys.version.split()[0]}


def _import_once() -> None:
    """What every rank would import: ranks are forks of this process."""
    if transformers_problem() is None:
        import transformers

        _ = transformers.Qwen3ForCausalLM, transformers.Qwen3MoeForCausalLM
        logging.getLogger("transformers").setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()


def _checked(args: argparse.Namespace, device: dict[str, Any], root: str) -> dict[str, list[Outcome]]:
    if args.only == "load" or device["type"] == "cpu":
        return {}
    found = run_checks(device["type"], device["count"], root)
    for name, outcomes in found.items():
        status, detail = summary(outcomes)
        print(f"{name}: {status} {detail}", flush=True)
        if status == "failed":
            print(next(text for one, text, _ in outcomes if one == "failed"), file=sys.stderr, flush=True)
    return found


def _measured(args: argparse.Namespace, device: dict[str, Any], root: str) -> list[Measured]:
    if args.only == "checks":
        return []
    cold = drops_pages(Path(root)) and not args.short
    rounds = (
        Rounds(1, least=1, seconds=0)
        if args.short
        else Rounds(args.rounds, least=2, seconds=args.minutes * 60)
    )
    cells = [
        cell
        for cell in _cells(root, device, cold)
        if not args.cells or any(text in cell.title for text in args.cells)
    ]
    if args.peers:
        cells = [
            replace(cell, peers=tuple(p for p in cell.peers if p in ("ours", *args.peers))) for cell in cells
        ]
    return measure(cells, rounds, short=args.short)


def _cells(root: str, device: dict[str, Any], cold: bool) -> list[Cell]:
    """One process and one for each device, at most 8, or two where there is one device; dense, MoE and dim-1 shards."""
    own = transformers_problem() is None
    dense, most = "dense" if own else "linear", min(device["count"], 8)

    def cell(model: str, layout: str, ranks: int, cold: bool = False, shared: bool = False) -> Cell:
        case = Case(model, f"{root}/{model}", layout, ranks, device["type"], shared)
        pinned = ("ours", "load_file", "host_to_device")
        peers = ("ours", "plain_floor", "load_file", "dcp") if cold else ON_DEVICES
        return Cell(case, cold, peers, pinned)

    warm = [cell(dense, "dim 0", ranks) for ranks in sorted({1, most})]
    warm += [cell("moe", "dim 0", most)] if own else []
    warm += [cell(dense, "dim 1", most)] if most > 1 else []
    warm += [cell(dense, "dim 0", 2, shared=True)] if most == 1 else []
    return warm + [cell(dense, "dim 0", ranks, cold=True) for ranks in sorted({1, most}) if cold]


def _write(
    out: Path,
    device: dict[str, Any],
    checks: dict[str, list[Outcome]],
    measured: list[Measured],
    problems: list[str],
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    cells = [one.to_json() for one in measured]
    (out / "checks.json").write_text(json.dumps({"device": device, "checks": checks}, indent=1, default=str))
    (out / "load.json").write_text(json.dumps({"device": device, "cells": cells}, indent=1, default=str))
    report = as_markdown(device, {name: summary(found) for name, found in checks.items()}, measured, problems)
    (out / "report.md").write_text(report)
    print(f"\n{report}\nwritten: {out}/checks.json, load.json, report.md")


if __name__ == "__main__":
    main()
