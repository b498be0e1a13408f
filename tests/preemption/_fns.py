"""What ranks run in test_preemption.py: a small training with AdamW, dropout and a DataLoader, which signals stop."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import shardwise as sw

STEPS, BATCHES, WARM_UP = 24, 6, 4


class Samples(Dataset[torch.Tensor]):
    """Items draw from the worker's random numbers: an inexact resume shows."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 4 * BATCHES * dist.get_world_size()

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.full((16,), float(index)) + torch.rand(16)


class Training:
    """The objects of one life of a run."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        width = options.get("width", 16)
        layers = [nn.Linear(16, width), nn.Dropout(0.2), nn.Linear(width, width), nn.Linear(width, 1)]
        self.model = nn.Sequential(*layers)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.pause_s = options.get("pause_s", 0.01)
        data = Samples(self.pause_s / 4)
        workers = options.get("workers", 0)
        context = "fork" if workers else None
        loader = DataLoader(
            data,
            batch_size=4,
            sampler=DistributedSampler(data, shuffle=True),
            num_workers=workers,
            multiprocessing_context=context,
        )
        self.loader = sw.ResumableLoader(loader)
        self.state = sw.TrainState(model=self.model, optimizer=self.optimizer, dataloader=self.loader)

    def step(self, batch: torch.Tensor) -> str:
        loss = self.model(batch / 100).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(self.pause_s)
        return float(loss.detach()).hex()

    @torch.no_grad()
    def evaluate_one(self) -> None:
        self.model.eval()
        self.model(torch.ones(4, 16))
        self.model.train()
        time.sleep(self.pause_s)


def train(root: Path, options: dict[str, Any]) -> None:
    """Resume, warm up, train with an evaluation every 4 steps and a save every 5; stop where it is asked to, and exit so."""
    rank, life = dist.get_rank(), options.get("life", 0)
    training = Training(options)
    log = (root / f"log-{life}-{rank}").open("a", buffering=1)

    def event(kind: str, **facts: Any) -> None:
        log.write(json.dumps({"kind": kind, "time": time.monotonic(), **facts}) + "\n")

    checkpoints = sw.Checkpointer(
        root / "run",
        keep_last=2,
        mode=options.get("mode", "sync"),
        stop_on=("SIGTERM", "SIGUSR1"),
        deadline_s=options.get("deadline_s", 30.0),
        io=sw.IOOptions(timeout_s=60.0),
    )

    def end(step: int) -> None:
        event("stopping", step=step)
        event("stopped", step=step, newest=checkpoints.stop(training.state, step))
        sys.stdout.flush()
        os._exit(checkpoints.exit_code)  # without atexit, so that the time is the library's own

    resumed = checkpoints.resume(training.state)
    step = resumed.step if resumed else 0
    event("resumed", step=step, exact=resumed is None or resumed.exact, pid=os.getpid())
    for _ in range(WARM_UP):
        event("warm-up", step=step)
        training.evaluate_one()
        if checkpoints.should_stop(step):
            end(step)
    while step < STEPS:
        for batch in training.loader:
            loss = training.step(batch)
            step += 1
            event("step", step=step, loss=loss)
            if step % 5 == 0:
                event("saving", step=step)
                checkpoints.save(training.state, step)
                event("saved", step=step)
            if checkpoints.should_stop(step):
                end(step)
            if step % 4 == 0:
                for _ in range(3):
                    event("evaluation", step=step)
                    training.evaluate_one()
                    if checkpoints.should_stop(step):
                        end(step)
            if step >= STEPS:
                break
    checkpoints.stop(training.state, step)
    event("done", step=step)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    dist.barrier()
