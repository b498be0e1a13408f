"""Ranks in fresh processes, forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

import shardwise.api
from tests.gpu.devices import Visible, enter

_ = shardwise.api  # all public names, which are otherwise imported when they are used

__all__ = ["from_fresh_process", "in_fresh_process", "on_fresh_ranks"]


def on_fresh_ranks(
    world_size: int,
    work: Callable[..., Any],
    *args: Any,
    timeout_s: float = 600.0,
    device: str = "cpu",
    visible: Visible = "all",
) -> list[Any]:
    """``work(rank, world_size, *args)`` on each rank of a new group; what it returns, by rank.

    The group's backend is that of a type of ``device`` (gloo for the CPU, and for a GPU that ranks share); each rank sees
    ``visible`` ones.
    Raises SystemExit if a rank fails or all together take longer than ``timeout_s``; the other ranks are killed.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(
            target=_rank, args=(work, rank, world_size, port, args, pipes[rank][1], device, visible)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()  # so that the end of a rank is the end of its pipe
    results: dict[int, Any] = {}
    try:
        receivers: dict[Any, int] = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
        deadline = time.monotonic() + timeout_s
        while receivers:
            ready = wait(list(receivers), timeout=deadline - time.monotonic())
            if not ready:
                raise SystemExit(
                    f"{work.__name__}: ranks {sorted(receivers.values())} took more than {timeout_s} s"
                )
            for receiver in ready:
                rank = receivers.pop(receiver)
                try:
                    results[rank] = receiver.recv()  # type: ignore[union-attr]
                except EOFError:
                    processes[rank].join()
                    raise SystemExit(
                        f"{work.__name__}: rank {rank} ended with {processes[rank].exitcode}"
                    ) from None
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    return [results[rank] for rank in range(world_size)]


def in_fresh_process(work: Callable[..., None], *args: Any) -> None:
    """``work(*args)`` in a process of its own, so that memory it frees is not there for later ranks to use again."""
    process = multiprocessing.get_context("fork").Process(target=work, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{work} ended with {process.exitcode}")


def from_fresh_process(work: Callable[..., Any], *args: Any) -> Any:
    """What ``work(*args)`` gives in a process of its own: asking for a device would spoil this one for forks."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(work(*args)))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise SystemExit(f"{work.__name__} failed in a process of its own") from None
    finally:
        process.join()


def _rank(
    work: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    args: tuple[Any, ...],
    out: Connection,
    device: str,
    visible: Visible,
) -> None:
    torch.set_num_threads(1)
    # As torchrun sets them; transformers and Accelerate read them.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    enter(device, rank, world_size, port, visible)
    result = work(rank, world_size, *args)
    dist.barrier()
    out.send(result)
    dist.destroy_process_group()
