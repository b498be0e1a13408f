"""How plans over many ranks shard a model: as ``fully_shard`` does, without its work for the other ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.internals.fsdp import lazy_chunks
from shardwise.internals.torch import fake_store, local_tensor


def shards(rank: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter's shard, made without and with lazy chunks."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
    try:
        found = []
        for lazy in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 11), nn.LayerNorm(1))
            mesh = init_device_mesh("cpu", (ranks,))
            if lazy:
                with lazy_chunks():
                    fully_shard(model, mesh=mesh)
            else:
                fully_shard(model, mesh=mesh)
            found.append([local_tensor(p).detach() for p in model.parameters()])
    finally:
        dist.destroy_process_group()
    return list(zip(*found, strict=True))


def test_lazy_chunks_are_the_same_shards() -> None:
    for ranks in (1, 2, 4, 5, 9, 16):
        for rank in (0, ranks // 2, ranks - 1):
            for own, lazy in shards(rank, ranks):
                assert torch.equal(own, lazy), (rank, ranks)
                assert own.stride() == lazy.stride()
