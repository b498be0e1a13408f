"""What ranks on hosts run: a small training with dropout, saved, resumed, exported, verified, loaded by each strategy."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw

Strategy = Any


def build(width: int = 64) -> tuple[nn.Module, sw.TrainState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Dropout(0.2), nn.Linear(width, width), nn.Linear(width, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, sw.TrainState(model=model, optimizer=optimizer)


def train(model: nn.Module, state: sw.TrainState, steps: int) -> list[str]:
    losses = []
    optimizer = next(iter(state.optimizers.values()))
    for _ in range(steps):
        loss = model(torch.rand(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


def whole_way(folder: str, mode: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """Train 3, save, train 3; resume anew, train 3; export, verify. What it came to, on each rank."""
    root, io = Path(folder), sw.IOOptions(timeout_s=timeout_s)
    model, state = build()
    dist.barrier()  # a host that builds its model slowly is not late
    started = time.monotonic()
    with sw.Checkpointer(root / "run", mode=mode, io=io) as checkpoints:  # type: ignore[arg-type]
        train(model, state, 3)
        checkpoints.save(state, 3)
        after = train(model, state, 3)
    model, state = build()
    dist.barrier()  # a host that builds its model slowly is not late
    with sw.Checkpointer(root / "run", mode=mode, io=io) as checkpoints:  # type: ignore[arg-type]
        report = checkpoints.resume(state)
        assert report is not None
        again = train(model, state, 3)
    sw.export_hf(model, root / "hub")
    problems = sw.verify(root / "run" / "step-00000003").problems if dist.get_rank() == 0 else ()
    return {
        "host": socket.gethostname(),
        "same": after == again,
        "exact": report.exact,
        "digest": report.digest,
        "trained": f"{sw.digest(model)}",
        "problems": list(problems),
        "clock": time.time(),
        "seconds": time.monotonic() - started,
    }


def train_local(path: str, last: int, dies_after: int = 0) -> dict[str, Any]:
    """Train to step ``last`` on the hosts' own disks, from the newest step, with a save at each third one; or die like a host
    without power, after a step."""
    model, state = build()
    losses: dict[int, str] = {}
    with sw.Checkpointer(path, local=True, keep_last=3, io=sw.IOOptions(timeout_s=30)) as checkpoints:
        report = checkpoints.resume(state)
        first = report.step if report is not None else 0
        for step in range(first + 1, last + 1):
            losses[step] = train(model, state, 1)[0]
            if step % 3 == 0:
                checkpoints.save(state, step)
            if step == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
    return {
        "from": first,
        "losses": losses,
        "exact": report is None or report.exact,
        "damaged": {} if report is None else dict(report.damaged),
        "files": sorted(str(p.relative_to(path)) for p in Path(path).glob("step-*/*/*")),
    }


def resume_shared(path: str) -> dict[str, Any]:
    """An ordinary resume of a directory that all ranks see, and what ``verify`` says of its newest step."""
    model, state = build()
    with sw.Checkpointer(path, io=sw.IOOptions(timeout_s=30)) as checkpoints:
        report = checkpoints.resume(state)
    assert report is not None
    problems = sw.verify(report.path).problems if dist.get_rank() == 0 else ()
    return {"from": report.step, "losses": train(model, state, 3), "problems": list(problems)}


def write_source(path: str) -> None:
    torch.manual_seed(1)
    Path(path).mkdir(parents=True, exist_ok=True)
    save_file(
        {n: torch.rand_like(t) for n, t in plain().state_dict().items()}, Path(path) / "model.safetensors"
    )


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 16))


def load(path: str, strategy: str) -> dict[str, Any]:
    """A load of a model on meta; what this rank read and sent."""
    with sw.meta_init():
        model = plain()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    report = sw.load(model, path, io=sw.IOOptions(strategy=strategy, timeout_s=30))  # type: ignore[arg-type]
    return {
        "host": socket.gethostname(),
        "read": report.bytes_read,
        "strategy": report.strategy,
        "digest": f"{sw.digest(model)}",
    }


def error_of(fn: str, *args: Any) -> dict[str, Any]:
    """How a call fails on this rank, and after how many seconds."""
    started = time.monotonic()
    try:
        globals()[fn](*args)
    except sw.errors.ShardwiseError as error:
        return {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
    return {"type": "", "text": "", "seconds": time.monotonic() - started}


def open_run(path: str) -> None:
    with sw.Checkpointer(path, io=sw.IOOptions(timeout_s=30)):
        pass


def resume_run(path: str) -> tuple[int, str]:
    _, state = build(512)
    with sw.Checkpointer(path, io=sw.IOOptions(timeout_s=60)) as checkpoints:
        report = checkpoints.resume(state)
    assert report is not None
    return report.step, report.digest


def save_until_lost(path: str) -> dict[str, Any]:
    """Save step after step until a save fails; the last step that was promised, and the failure."""
    _, state = build(512)
    promised, started = 0, time.monotonic()
    checkpoints = sw.Checkpointer(path, keep_last=3, io=sw.IOOptions(timeout_s=5))
    try:
        for step in range(1, 10_000):
            started = time.monotonic()
            print(f"saving {step}", flush=True)
            checkpoints.save(state, step)
            promised = step
    except sw.errors.ShardwiseError as error:
        return {"promised": promised, "text": str(error), "seconds": time.monotonic() - started}
    raise AssertionError("no save failed")
