"""What ranks run for test_parts.py: a transformers model, saved by three hosts with disks of their own."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw


def save(model: str, hosts: str) -> None:
    """Steps 1 and 2; each rank is a host."""
    live = sw.load_pretrained(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(live.parameters())
    live(torch.arange(8)[None]).logits.float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with sw.Checkpointer(os.path.join(hosts, f"host-{dist.get_rank()}", "run"), local=True) as checkpoints:
        for step in (1, 2):
            checkpoints.save(sw.TrainState(model=live, optimizer=optimizer), step)
