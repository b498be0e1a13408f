"""A training run whose ranks are there to be killed; see test_kill.py."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import RankError

#: Sizes that no number of ranks divides; about 24 MiB of parameters and as much of momentum.
ROWS, COLUMNS = 1021, 1537
LAYERS = 4


class Run:
    """A small training run whose values say which step, of which line, they are of."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.model = nn.Sequential(*(nn.Linear(COLUMNS, ROWS, bias=k == 0) for k in range(LAYERS)))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = sw.TrainState(model=self.model, optimizer=self.optimizer, extra={"line": line})

    @torch.no_grad()
    def set_values(self, step: int) -> None:
        for k, parameter in enumerate(self.model.parameters()):
            parameter.fill_(_value(step, self.line, k))
            momentum = torch.full_like(parameter, -_value(step, self.line, k)).detach()
            self.optimizer.state[parameter]["momentum_buffer"] = momentum
        self.optimizer.param_groups[0]["lr"] = float(step)
        self.state.extra["line"] = self.line

    def check_values(self, step: int) -> None:
        """Everything is as this step, of the line that the checkpoint names, saved it."""
        line = self.state.extra["line"]
        for k, parameter in enumerate(self.model.parameters()):
            expected = _value(step, line, k)
            momentum = self.optimizer.state[parameter]["momentum_buffer"]
            assert isinstance(parameter, DTensor)
            assert isinstance(momentum, DTensor)
            assert bool((parameter._local_tensor == expected).all()), (step, line, k)
            assert bool((momentum._local_tensor == -expected).all()), (step, line, k)
        assert self.optimizer.param_groups[0]["lr"] == step


def _value(step: int, line: int, k: int) -> float:
    return step + 1000 * line + k / 8


def train(directory: Path, options: dict[str, Any]) -> None:
    """Resume, check, then save step after step until killed (or ``saves`` times). Writes events."""
    root = directory / "checkpoints"

    def event(kind: str, **facts: Any) -> None:
        with (directory / f"events-{dist.get_rank()}").open("a") as events:
            events.write(json.dumps({"kind": kind, "time": time.monotonic(), **facts}) + "\n")

    io = sw.IOOptions(timeout_s=options.get("timeout_s", 60.0))
    run = Run(options.get("line", 0))
    checkpoints = sw.Checkpointer(root, keep_last=options.get("keep_last", 2), io=io)
    report = checkpoints.resume(run.state, options.get("resume_step"))
    step, problems = 0, []
    if report is not None:
        step = report.step
        run.check_values(step)
        if dist.get_rank() == 0:
            published = [p for p in root.iterdir() if re.fullmatch(r"step-\d+", p.name)]
            problems = [p for path in published for p in sw.verify(path).problems]
    event(
        "resumed",
        step=step,
        line=run.state.extra["line"],
        problems=problems,
        damaged=dict(report.damaged) if report else {},
        superseded=report.superseded if report else (),
        names=sorted(p.name for p in root.iterdir()),
    )
    if options.get("die_at_fsync"):
        _die_at_fsync(options["die_at_fsync"])
    for k in range(options.get("saves", 10**6)):
        step += 1
        run.set_values(step)
        if k < 2:
            dist.barrier()  # so that an instant means about the same on every rank
        event("saving", step=step, number=k)
        try:
            if options.get("plain"):
                sw.save(run.state, root / f"step-{step:08d}", step=step, io=io)
            else:
                checkpoints.save(run.state, step)
        except RankError as error:
            event("failed", missing=error.missing, text=str(error))
            return
        event("saved", step=step, number=k)
    checkpoints.close()


def _die_at_fsync(count: int) -> None:
    """This process kills itself in place of its ``count``-th fsync of a slice from here on."""
    own, left = os.fsync, count

    def fsync(fd: int) -> None:
        nonlocal left
        left -= os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors")  # every rank writes some
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        own(fd)

    os.fsync = fsync
