"""Programs that fail as people's do, each in a process of its own: ``python failing.py NAME``. What they print is a log."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


def mixed_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    print(distribute_tensor(torch.ones(4, 4), mesh) @ torch.ones(4, 4))


def tied_groups() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model[0])
    fully_shard(model)
    model(torch.arange(4))


def gloo_loopback() -> None:
    """The host's name can't be resolved: the caller gave it one of its own."""
    dist.init_process_group("gloo")


def oom_kill() -> None:
    """As the kernel's OOM killer ends a process."""
    os.kill(os.getpid(), signal.SIGKILL)


class _Images(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.ones(4 * 1024**2)


def shared_memory() -> None:
    """Workers whose batches do not fit in /dev/shm: the caller made it small."""
    for _ in torch.utils.data.DataLoader(_Images(), batch_size=2, num_workers=1):
        time.sleep(0.1)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
