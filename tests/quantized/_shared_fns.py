"""On ranks: loads of one tensor in codes by each strategy."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.planning.plan import LEAST_STAGING_BYTES

__all__ = ["Layers", "loaded"]


class Layers(nn.Module):
    """Weights called ``layers.K.weight``."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module() for _ in range(count)])
        for layer in self.layers:
            layer.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))


def loaded(directory: str, count: int, shape: tuple[int, ...], strategy: Any) -> tuple[int, str]:
    """Bytes that this rank read, and the digest of the model."""
    with sw.meta_init():
        model = Layers(count, shape)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    io = sw.IOOptions(strategy=strategy, staging_bytes=LEAST_STAGING_BYTES)
    report = sw.load(model, directory, io=io)
    assert report.strategy.startswith(strategy), report.strategy
    return report.bytes_read, str(sw.digest(model))
