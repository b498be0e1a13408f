"""On fresh ranks: a run, and the memory that it takes beside what its process held before."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from benchmarks.loading.counters import anonymous_bytes, sampled

__all__ = ["taken"]


def taken(path: str, changed: list[bool], batch: int, length: int) -> list[int]:
    """For each run, with or without activation checkpointing: its peak of anonymous memory, above that before it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = torch.randint(0, 512, (batch, length))
    train(path, mesh, ids[:1, :8], checkpointing=True)  # what kernels and gloo keep belongs to the process
    found = []
    for checkpointing in changed:
        gc.collect()
        dist.barrier()
        before = anonymous_bytes()
        with sampled() as peak:
            train(path, mesh, ids, checkpointing=checkpointing)
        found.append(peak.nbytes - before)
    return found


def train(path: str, mesh: DeviceMesh, ids: torch.Tensor, *, checkpointing: bool) -> None:
    """Load, and two steps."""
    model = sw.load_pretrained(path, mesh, dtype="float32")
    model.train()
    if checkpointing:
        is_new = hasattr(model, "activation_checkpointing_enable")  # transformers 5.23
        named = "activation_checkpointing_enable" if is_new else "gradient_checkpointing_enable"
        getattr(model, named)({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    dist.barrier()
