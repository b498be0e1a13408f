"""Saving against the floor: a sharded state beside processes that only write and sync the same bytes; and behind training.

    make bench                                        # or
    OMP_NUM_THREADS=1 python benchmarks/save.py --ranks 4 --gib 5 --pairs 5

Fresh processes for every run, changing order, medians compared: both with ordinary writes and with O_DIRECT. The asynchronous save's stall is compared with
copying the same bytes into touched memory, and the steps of a training loop while it runs with those before it.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from benchmarks.fresh import on_fresh_ranks
from benchmarks.loading.counters import anonymous_bytes
from shardwise.tensors.live import local_tensor

MIB = 1024**2
TENSORS = 40
PIECE_BYTES = 16 * MIB


class State(nn.Module):
    """Parameters of so many bytes in all, with random content."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        rows = nbytes // TENSORS // (4096 * 4)
        self.parts = nn.ParameterList([nn.Parameter(torch.empty(rows, 4096)) for _ in range(TENSORS)])

    def forward(self) -> None:
        """Never called: FSDP2 wants one to hook into."""


def make_state(world_size: int, nbytes: int) -> State:
    """Sharded over all ranks; every rank fills its own part."""
    with torch.device("meta"):
        model = State(nbytes)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in model.parameters():
        local = local_tensor(parameter).detach()
        local.view(torch.int32).random_(generator=generator)
    return model


def save_worker(rank: int, world_size: int, kind: str, nbytes: int, folder: str) -> dict[str, Any]:
    """One rank of one synchronous run: the save, or its floor."""
    model = make_state(world_size, nbytes)
    content = aligned_copy([local_tensor(p).detach() for p in model.parameters()]) if kind != "save" else None
    gc.collect()
    dist.barrier()
    before, used = anonymous_bytes(), resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    if content is None:
        sw.save(sw.TrainState(model=model), os.path.join(folder, "checkpoint"))
    else:
        write_and_sync(content, f"{folder}/floor-{rank}", os.O_DIRECT if kind == "direct" else 0)
    seconds = time.perf_counter() - started
    now = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds,
        "cpu_seconds": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
        "anonymous_added": anonymous_bytes() - before,
    }


def aligned_copy(tensors: list[torch.Tensor]) -> memoryview:
    """The same bytes one after another, in memory that O_DIRECT takes."""
    found = mmap.mmap(-1, sum(t.nbytes for t in tensors))
    for tensor in tensors:
        found.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return memoryview(found)


def write_and_sync(content: memoryview, path: str, flags: int) -> None:
    """The least that a save must do."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    done = 0
    while done < content.nbytes:
        done += os.write(fd, content[done : done + PIECE_BYTES])
    os.fsync(fd)
    os.close(fd)


def behind_worker(rank: int, world_size: int, nbytes: int, folder: str, loop_s: float) -> dict[str, Any]:
    """One rank of the asynchronous run: stall beside a copy, and steps beside a save."""
    model = make_state(world_size, nbytes)
    state = sw.TrainState(model=model)
    locals_ = [local_tensor(p).detach() for p in model.parameters()]
    x = torch.randn(384, 384)

    def steps(seconds: float, until: Any = None) -> list[float]:
        """Seconds of each step of a loop that computes."""
        found, end = [], time.perf_counter() + seconds
        while (time.perf_counter() < end) if until is None else until():
            begun = time.perf_counter()
            for _ in range(10):
                torch.mm(x, x)
            found.append(time.perf_counter() - begun)
        return found

    copies, stalls, alone, beside, behind_s = [], [], [], [], []
    target = [torch.zeros_like(t) for t in locals_]
    for _ in range(3):
        dist.barrier()
        begun = time.perf_counter()
        for t, source in zip(target, locals_, strict=True):
            t.copy_(source)
        copies.append(time.perf_counter() - begun)
    del target
    with sw.Checkpointer(folder, mode="async", keep_last=1) as checkpointer:
        checkpointer.prepare(state)
        for step in (1, 2, 3):
            dist.barrier()
            alone += steps(loop_s)
            dist.barrier()
            begun = time.perf_counter()
            checkpointer.save(state, step)
            stalls.append(time.perf_counter() - begun)
            dist.barrier()  # as after a copy: else steps of the others are in the stall of the last one
            begun = time.perf_counter()
            beside += steps(0, lambda: checkpointer.is_saving)
            behind_s.append(time.perf_counter() - begun)
            checkpointer.wait()
        staging = checkpointer.staging_bytes
    return {
        "copies": copies,
        "stalls": stalls,
        "alone": statistics.mean(alone),
        "beside": statistics.mean(beside),
        "behind_s": behind_s,
        "staging": staging,
    }


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gib", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--loop-s", type=float, default=4.0, help="seconds of the loop without a save, three times"
    )
    parser.add_argument("--folder", help="where to write; default: a new temporary directory")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = {**measure_sync(args), **measure_behind(args)}
    broken = [name for name, value in result.items() if name.startswith("contract") and value != "holds"]
    print(json.dumps(result) if args.json else "\n".join(f"{k:50} {v}" for k, v in result.items()))
    sys.exit(1 if broken else 0)


def measure_sync(args: argparse.Namespace) -> dict[str, Any]:
    nbytes = int(args.gib * 2**30)
    kinds = ("save", "buffered", "direct")
    runs: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in kinds}
    for pair in range(args.pairs):
        for kind in kinds[pair % 3 :] + kinds[: pair % 3]:
            folder = tempfile.mkdtemp(prefix="shardwise-bench-", dir=args.folder)
            try:
                runs[kind].append(on_fresh_ranks(args.ranks, save_worker, kind, nbytes, folder))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                os.sync()
    slowest = {k: [max(r["seconds"] for r in ranks) for ranks in found] for k, found in runs.items()}
    cpu = {k: [sum(r["cpu_seconds"] for r in ranks) for ranks in found] for k, found in runs.items()}
    median = {k: statistics.median(v) for k, v in slowest.items()}
    ratios = {k: median["save"] / median[k] for k in kinds[1:]}
    staging = max(r["anonymous_added"] for ranks in runs["save"] for r in ranks) / MIB
    return {
        "ranks, GiB, rounds": f"{args.ranks}, {args.gib}, {args.pairs}",
        "save s, median (min, max)": _spread(slowest["save"]),
        "write + fsync s, median (min, max)": _spread(slowest["buffered"]),
        "write + fsync with O_DIRECT s, median (min, max)": _spread(slowest["direct"]),
        "save / write + fsync, medians": round(ratios["buffered"], 3),
        "save / write + fsync with O_DIRECT, medians": round(ratios["direct"], 3),
        "CPU s of all ranks: save, buffered, O_DIRECT": ", ".join(
            f"{statistics.median(cpu[k]):.2f}" for k in kinds
        ),
        "anonymous added by a save, worst MiB": round(staging, 1),
        "contract: save <= 1.3 x the faster one": "holds" if max(ratios.values()) <= 1.3 else "BROKEN",
        "contract: staging <= 128 MiB": "holds" if staging <= 128 else "BROKEN",
    }


def measure_behind(args: argparse.Namespace) -> dict[str, Any]:
    nbytes = int(args.gib * 2**30)
    folder = tempfile.mkdtemp(prefix="shardwise-bench-", dir=args.folder)
    try:
        ranks = on_fresh_ranks(args.ranks, behind_worker, nbytes, folder, args.loop_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stall = statistics.median(max(r["stalls"][k] for r in ranks) for k in range(3))
    copy = statistics.median(max(r["copies"][k] for r in ranks) for k in range(3))
    slower = statistics.mean(r["beside"] for r in ranks) / statistics.mean(r["alone"] for r in ranks) - 1
    return {
        "staging of an asynchronous save, MiB a rank": round(max(r["staging"] for r in ranks) / MIB, 1),
        "stall s / copy s, medians of 3": f"{stall:.3f} / {copy:.3f} = {stall / copy:.2f}",
        "behind s": ", ".join(f"{s:.1f}" for s in ranks[0]["behind_s"]),
        "steps beside a save, slower by": f"{slower:.1%}",
        "contract: stall <= 1.2 x copy": "holds" if stall <= 1.2 * copy else "BROKEN",
        "contract: steps slower by <= 15 %": "holds" if slower <= 0.15 else "BROKEN",
    }


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}, {max(values):.2f})"


if __name__ == "__main__":
    main()
