"""What the ranks of test_sharded_gradients.py run: which gradients wait, where they are DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw


class Net(nn.Module):
    """``c`` takes part where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False)
        self.c = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor, *, with_c: bool) -> torch.Tensor:
        x = self.b(torch.relu(self.a(x)))
        return self.c(x) if with_c else x


def make(layout: str, seed: int = 0) -> tuple[Net, torch.optim.Optimizer, sw.TrainState]:
    torch.manual_seed(seed)
    net, mesh = Net(), init_device_mesh("cpu", (dist.get_world_size(),))
    if layout == "tp":
        parallelize_module(
            net, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel(), "c": ColwiseParallel()}
        )
    else:
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    return net, optimizer, sw.TrainState(model=net, optimizer=optimizer)


def backward(net: Net, seed: int, *, with_c: bool = True) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    net(x, with_c=with_c).square().mean().backward()


def what_waits(layout: str, root: str) -> dict[str, int]:
    net, optimizer, state = make(layout)
    found: dict[str, int] = {}

    def save(name: str) -> None:
        found[name] = sw.save(state, f"{root}/{len(found)}").gradients

    backward(net, 1)
    save("before a step")
    optimizer.step()
    save("used")
    backward(net, 2)
    save("added to used ones")
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    save("set to zero")
    backward(net, 3)
    save("added to zeros")
    optimizer.step()
    optimizer.zero_grad()
    save("cleared")
    return found


def goes_on(layout: str, root: str) -> dict[str, Any]:
    """A save in the middle of an accumulation onto zeros, of which one gets no gradient any more."""
    net, optimizer, state = make(layout)
    backward(net, 1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    backward(net, 2, with_c=False)
    stored = sw.save(state, f"{root}/step").gradients
    other, other_optimizer, other_state = make(layout, seed=5)
    report = sw.restore(other_state, f"{root}/step")
    for model, its in ((net, optimizer), (other, other_optimizer)):
        backward(model, 3, with_c=False)
        its.step()
    return {"stored": stored, "exact": report.exact, "equal": sw.digest(net) == sw.digest(other)}
