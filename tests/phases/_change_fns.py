"""On ranks: a run, and the memory that it takes beside what its process held before."""

from __future__ import annotations

import ctypes
import gc

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from benchmarks.loading.counters import anonymous_bytes, sampled

__all__ = ["taken"]

#: As benchmarks/phases.py sets them by the environment: freed memory goes back at once.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1


def taken(path: str, changed: list[bool], batch: int, length: int) -> list[int]:
    """For each run, with or without activation checkpointing: its peak of anonymous memory, above that before it. glibc."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = torch.randint(0, 512, (batch, length))
    train(path, mesh, ids[:1, :8], checkpointing=True)  # what kernels and gloo keep belongs to the process
    found = []
    glibc = ctypes.CDLL("libc.so.6")
    glibc.mallopt(M_MMAP_THRESHOLD, 65536)
    glibc.mallopt(M_TRIM_THRESHOLD, 0)
    for checkpointing in changed:
        gc.collect()
        glibc.malloc_trim(0)
        dist.barrier()
        before = anonymous_bytes()
        with sampled() as peak:
            train(path, mesh, ids, checkpointing=checkpointing)
        found.append(peak.nbytes - before)
    for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        glibc.mallopt(parameter, 128 * 1024)  # as they are by default
    return found


def train(path: str, mesh: DeviceMesh, ids: torch.Tensor, *, checkpointing: bool) -> None:
    """Load, and two steps."""
    model, _ = sw.load_pretrained(path, mesh, dtype="float32")
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
