"""An optimizer that is made between a forward pass without gradients and the next one, of what FSDP2 has gathered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.errors import StateError
from tests.harness.on_ranks import on_ranks


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@on_ranks(2)
def test_it_is_refused_before_it_trains(tmp_path: Path) -> None:
    model = sharded()
    with torch.no_grad():
        model(torch.ones(1, 4))
    with pytest.raises(StateError, match=r"optimizer was made after .*4 of its 6 .*reshard\(\)"):
        sw.TrainState(model=model, optimizer=adam(model))
    model.reshard()
    state = sw.TrainState(model=model, optimizer=adam(model))
    first = [p.full_tensor().clone() for p in model.parameters()]
    model(torch.ones(1, 4)).sum().backward()
    state.optimizer.step()
    assert all(not torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), first, strict=True))
    sw.save(state, tmp_path / "step")


@on_ranks(2)
def test_one_that_was_made_before_is_right() -> None:
    """Whatever ran since."""
    model = sharded()
    optimizer = adam(model)
    with torch.no_grad():
        model(torch.ones(1, 4))
    sw.TrainState(model=model, optimizer=optimizer)
