"""What the ranks of test_dcp.py run: torch's own saves, and our loads of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.models import Mixed


def sharded(seed: int, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Blocks and the rest sharded; one parameter that nobody shards, buffers, a 0-d one among them."""
    torch.manual_seed(seed)
    model = Mixed().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.gate})
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything, gathered."""
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in model.state_dict().items()
    }


def save_with_torch(folder: str, kind: str, dtype: str) -> dict[str, torch.Tensor]:
    """As Accelerate does (model in an entry of its own), as torch's examples do, or flat."""
    model = sharded(1, dtype=getattr(torch, dtype))
    if kind == "flat":
        state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions())
    else:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optim": of_optimizer, "step": 7, "rng": torch.get_rng_state()}
        state = {"app": state} if kind == "app" else state
    dcp.save(state, checkpoint_id=folder)
    return whole(model)


def load_with_us(folder: str, dtype: str) -> tuple[dict[str, torch.Tensor], int]:
    model = sharded(2, dtype=getattr(torch, dtype))
    report = sw.load(model, folder, ignored=("gate",))
    return whole(model), report.bytes_read


def error_of(folder: str) -> tuple[str, str]:
    model = sharded(2)
    try:
        sw.load(model, folder, ignored=("gate",))
    except ShardwiseError as error:
        return type(error).__name__, str(error)
    return "none", ""
