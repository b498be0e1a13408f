"""Functions that ranks run for test_promises.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

import shardwise as sw


def outcome(work: Any) -> tuple[str, str]:
    """Type and text of what ``work`` raises, or of what it returns."""
    try:
        return "ok", repr(work())
    except Exception as error:
        return type(error).__name__, str(error)


def sharded(*, hsdp: bool = False) -> nn.Module:
    torch.manual_seed(0)
    size = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (2, size // 2) if hsdp else (size,), mesh_dim_names=("r", "s") if hsdp else ("s",)
    )
    return fully_shard(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), mesh=mesh)


class RowWise(torch.optim.SGD):
    """Keeps a plain tensor of another shape for each sharded parameter, as Adafactor-like optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["row"] = torch.full((p._local_tensor.shape[0], 1), float(dist.get_rank()))
        return super().step(closure)


def per_rank_state(directory: str) -> Any:
    """Save state that differs between ranks: opaque optimizer state, an extra, buffers."""
    model = sharded()
    optimizer = RowWise(model.parameters(), lr=0.1)
    state = sw.TrainState(model=model, optimizer=optimizer, extra={"mine": dist.get_rank()})
    model(torch.ones(3, 4) * (dist.get_rank() + 1)).sum().backward()
    optimizer.step()
    sw.save(state, f"{directory}/all")
    sw.save(sw.TrainState(model=model, extra={"mine": dist.get_rank()}), f"{directory}/extra")
    sw.save(sw.TrainState(model=model), f"{directory}/buffers")
    again = sw.TrainState(model=sharded(), extra={"mine": -1})
    again.optimizer = RowWise(again.model.parameters(), lr=0.1)
    report = sw.restore(again, f"{directory}/all")
    rows = [s["row"].flatten().tolist() for s in again.optimizer.state.values()]
    return again.extra["mine"], rows, report.exact, again.model[1].running_mean.tolist()  # type: ignore[index]


def elsewhere(directory: str) -> Any:
    """Restore it on another number of ranks."""
    model = sharded()
    optimizer = RowWise(model.parameters(), lr=0.1)
    everything = outcome(
        lambda: sw.restore(sw.TrainState(model=model, optimizer=optimizer), f"{directory}/all")
    )
    extra = outcome(lambda: sw.restore(sw.TrainState(model=model, extra={"mine": -1}), f"{directory}/extra"))
    report = sw.restore(sw.TrainState(model=model), f"{directory}/buffers")
    return everything, extra, (report.exact, report.skipped)


def drifted_replicas(directory: str) -> Any:
    """Replicas that differ on one rank: a replicated DTensor, HSDP shards, momentum of a plain parameter."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    found = []
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    model.w._local_tensor.data.add_(rank)  # type: ignore[union-attr, operator]
    found.append(outcome(lambda: sw.save(sw.TrainState(model=model), f"{directory}/a")))
    found.append(outcome(lambda: sw.digest(model)))
    model = sharded(hsdp=True)
    if rank == size - 1:
        model[0].weight._local_tensor.data.add_(1)  # type: ignore[index, union-attr]
    found.append(outcome(lambda: sw.save(sw.TrainState(model=model), f"{directory}/b")))
    plain = nn.Linear(2, 2)
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0, momentum=0.9)
    plain(torch.ones(1, 2) * (rank + 1)).sum().backward()
    optimizer.step()
    found.append(outcome(lambda: sw.save(sw.TrainState(model=plain, optimizer=optimizer), f"{directory}/c")))
    return found


class Scaler:
    """State that differs between ranks, under the name of a buffer."""

    def __init__(self) -> None:
        self.scale = dist.get_rank()

    def state_dict(self) -> dict[str, int]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.scale = state["scale"]


def names_that_collide(directory: str) -> Any:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1)
    model.register_buffer("scaler", torch.zeros(1))
    model.register_buffer("step", torch.zeros(1))
    state = sw.TrainState(model=model, scaler=Scaler())
    sw.save(state, f"{directory}/d")
    state.scaler.scale = -1
    sw.restore(state, f"{directory}/d")
    negative = outcome(lambda: sw.save(state, f"{directory}/e", step=-1 if dist.get_rank() else 1))
    return state.scaler.scale, negative
