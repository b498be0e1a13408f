"""Ranks in fresh processes, forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["on_fresh_ranks"]


def on_fresh_ranks(
    world_size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 600.0
) -> list[Any]:
    """``work(rank, world_size, *args)`` on each rank of a new gloo group; what it returns, by rank.

    Raises SystemExit if a rank fails; the others are killed.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(work, rank, world_size, port, args, out))
        for rank in range(world_size)
    ]
    for p in processes:
        p.start()
    for rank, p in enumerate(processes):
        p.join(timeout_s)
        if p.exitcode != 0:
            for other in processes:
                other.kill()
            raise SystemExit(f"{work.__name__}: rank {rank} ended with {p.exitcode}")
    return [result for _, result in sorted(out.get() for _ in processes)]


def _rank(
    work: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple[Any, ...], out: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    result = work(rank, world_size, *args)
    dist.barrier()
    out.put((rank, result))
    dist.destroy_process_group()
