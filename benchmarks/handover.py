"""Weights from a trainer to an engine on one machine: time, bytes and memory, of ours and of what people do today.

    python benchmarks/handover.py --mib 512 --trainers 2 --engines 2

All rows of a round run one after another in the same processes, rounds are interleaved, and the minimum counts. "floor" rows copy the
same bytes with nothing around it: through shared memory, and through a socket of the same process. "gather, broadcast, cut" is what people do
with torch alone: the trainer gathers each tensor on all of its ranks, rank 0 broadcasts it to all ranks of the engine, and each takes its slice
(in vLLM, ``load_weights``). The trainer's stall is the time of ``publish``; in that row, the trainer waits for all of it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw

COLUMNS = 2048


def shapes(mib: int) -> dict[str, tuple[int, int]]:
    """Matrices of 16 MiB in bf16."""
    return {f"layers.{k}.weight": (16 * 1024**2 // 2 // COLUMNS, COLUMNS) for k in range(max(1, mib // 16))}


class Model(nn.Module):
    """Linear layers whose parameters have one of the shapes each."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList()
        for rows, columns in shapes(mib).values():
            layer = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
            with torch.no_grad():
                layer.weight.copy_(torch.randn(rows, columns, generator=generator))
            self.layers.append(layer)


def meet(folder: str, name: str) -> None:
    """All processes of both programs wait for each other, by files."""
    path = Path(folder) / name
    path.mkdir(exist_ok=True)
    (path / str(os.getpid())).touch()
    while len(list(path.iterdir())) < int((Path(folder) / "count").read_text()):
        time.sleep(0.001)


def change(model: nn.Module, share: float) -> None:
    """Move a share of all elements to a neighboring value."""
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.to_local().view(torch.int16)
            bits += (torch.rand(bits.shape) < share).to(torch.int16)


def joint(folder: str, rank: int, size: int) -> Any:
    """A gloo group of the trainer's first rank and all ranks of the engine, which are in no process group together."""
    store = dist.FileStore(f"{folder}/joint", size)
    return dist.ProcessGroupGloo(store, rank, size, timedelta(minutes=5))


def trainer(rank: int, world: int, engines: int, folder: str, mib: int, rounds: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/trainer", rank=rank, world_size=world)
    torch.set_num_threads(1)
    model = Model(mib)
    for layer in model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    sender = sw.handover.WeightSender(model)
    if rank == 0:
        (Path(folder) / "url").write_text(sender.url)
    both = joint(folder, 0, 1 + engines) if rank == 0 else None
    meet(folder, "ready")
    buffers = [torch.empty_like(p.to_local()) for p in model.parameters()]
    version, stalls, copies, gathers = 0, [], [], []
    for k in range(rounds):
        for share in (1.0, 0.01, 0.03):
            change(model, share)
            started = time.perf_counter()
            for buffer, parameter in zip(buffers, model.parameters(), strict=True):
                buffer.copy_(parameter.to_local())
            copies.append(time.perf_counter() - started)
            version += 1
            stalls.append(sender.publish(version).seconds)
            meet(folder, f"published {k} {share}")
            meet(folder, f"pulled {k} {share}")
        meet(folder, f"gather {k}")
        started = time.perf_counter()
        for parameter in model.parameters():
            whole = parameter.full_tensor()
            if both is not None:
                both.broadcast(whole, 0).wait()
        gathers.append(time.perf_counter() - started)
    if rank == 0:
        print(
            f"publish (stall)                       {min(stalls):.3f} s; a plain copy of the shards {min(copies):.3f} s"
        )
        print(f"gather, broadcast, cut: trainer waits {min(gathers):.3f} s")
    meet(folder, "end")


def engine(rank: int, world: int, engines: int, folder: str, mib: int, rounds: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/engine", rank=rank, world_size=world)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))

    def empty() -> dict[str, torch.Tensor]:
        return {
            n: distribute_tensor(torch.zeros(s, dtype=torch.bfloat16), mesh, [Shard(1)])
            for n, s in shapes(mib).items()
        }

    both, slices = joint(folder, 1 + rank, 1 + world), empty()
    meet(folder, "ready")
    url = (Path(folder) / "url").read_text()
    by_memory, by_link = (
        sw.handover.WeightReceiver(empty(), url),
        sw.handover.WeightReceiver(empty(), url, carry="tcp"),
    )
    local = sum(torch.Size(s).numel() * 2 // world for s in shapes(mib).values())
    seconds: dict[str, list[float]] = {}
    moved: dict[str, int] = {}

    def timed(name: str, work: Callable[[], int]) -> None:
        dist.barrier()
        started = time.perf_counter()
        moved[name] = work()
        dist.barrier()
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    def pull(receiver: sw.handover.WeightReceiver) -> int:
        report = receiver.pull()
        assert report is not None
        return report.bytes_moved

    source, target = torch.ones(local, dtype=torch.uint8), torch.empty(local, dtype=torch.uint8)
    for k in range(rounds):
        for share in (1.0, 0.01, 0.03):
            meet(folder, f"published {k} {share}")
            word = "whole" if share == 1 else f"{share:.0%} changed"
            if share == 1:
                by_link._on = None  # or else changes come
                timed("floor: copy in memory", lambda: target.copy_(source).numel())
                timed("floor: socket", lambda: through_socket(source, target))
            timed(f"memory, {word}", lambda: pull(by_memory))
            timed(f"tcp, {word}", lambda: pull(by_link))
            meet(folder, f"pulled {k} {share}")
        meet(folder, f"gather {k}")
        timed("gather, broadcast, cut", lambda: through_broadcasts(both, slices))
    by_memory.verify()
    by_link.verify()
    if rank == 0:
        for name, found in seconds.items():
            print(
                f"{name:38}{min(found):.3f} s  {moved[name] / local:.4f} of this rank's {local / 1024**2:.0f} MiB"
            )
    meet(folder, "end")


def through_broadcasts(both: Any, slices: dict[str, torch.Tensor]) -> int:
    """Each tensor whole, and this rank's columns of it."""
    moved = 0
    for tensor in slices.values():
        whole, local = torch.empty(tensor.shape, dtype=tensor.dtype), tensor.to_local()
        both.broadcast(whole, 0).wait()
        moved += whole.nbytes
        local.copy_(whole.narrow(1, dist.get_rank() * local.shape[1], local.shape[1]))
    return moved


def through_socket(source: torch.Tensor, target: torch.Tensor) -> int:
    """Send bytes to this process."""
    first, second = socket.socketpair()
    thread = threading.Thread(target=lambda: first.sendall(memoryview(source.numpy())))
    thread.start()
    view = memoryview(target.numpy())
    while view.nbytes:
        view = view[second.recv_into(view) :]
    thread.join()
    first.close()
    second.close()
    return target.numel()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "count").write_text(str(options.trainers + options.engines))
        context = mp.get_context("spawn")
        processes = [
            context.Process(
                target=role, args=(rank, world, options.engines, folder, options.mib, options.rounds)
            )
            for role, world in ((trainer, options.trainers), (engine, options.engines))
            for rank in range(world)
        ]
        for one in processes:
            one.start()
        for one in processes:
            one.join()
        return max(abs(one.exitcode or 0) for one in processes)


if __name__ == "__main__":
    sys.exit(main())
