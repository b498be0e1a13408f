"""What ranks run in test_failing_saves.py, on a small disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError


def state_of(step: int, width: int) -> Any:
    """4 × width bytes of weights whose values say the step."""
    model = nn.Linear(width, 1, bias=False)
    nn.init.constant_(model.weight, float(step))
    return sw.TrainState(model=model)


def train_on(disk: str, elsewhere: str | None, mode: Any) -> dict[str, Any]:
    """Step 1 fits, 2 and 3 do not, 4 does, 5, 6 and 7 do not. What each save said, and what a resume finds."""
    found: dict[str, Any] = {}
    small, large = 10_000, 400_000
    checkpoints = sw.Checkpointer(
        Path(disk) / "run", mode=mode, failures=sw.FailurePolicy(fallback=elsewhere), keep_last=2
    )
    for step, width in enumerate((small, large, large, small, large, large, large), start=1):
        try:
            report = checkpoints.save(state_of(step, width), step)
            found[f"save {step}"] = report.failure
            found[f"failed in {step}"] = report.failed_step
            if mode == "async":
                checkpoints._settle()
        except ShardwiseError as error:
            found["raised"] = (step, type(error).__name__, str(error))
            break
    found["failures"] = checkpoints._failures.total
    checkpoints.close()
    dist.barrier()
    width = small if elsewhere is None else large
    with sw.Checkpointer(Path(disk) / "run", failures=sw.FailurePolicy(fallback=elsewhere)) as again:
        state = state_of(0, width)
        report = again.resume(state)
        assert report is not None
        found["resumed"] = report.step
        value = state.model.weight
        assert bool(torch.all(value == float(report.step))), value
    return found


def train_in_background(disk: str) -> dict[str, Any]:
    """Step 2 does not fit. What the report of each save said."""
    found: dict[str, Any] = {}
    small, large = 10_000, 400_000
    with sw.Checkpointer(
        Path(disk) / "run", mode="async", failures=sw.FailurePolicy(), keep_last=1
    ) as checkpoints:
        for step, width in enumerate((small, large, small, small), start=1):
            report = checkpoints.save(state_of(step, width), step)
            found[f"save {step}"] = [report.failed_step, report.failure]
    found["kept"] = checkpoints.staging_bytes
    return found
