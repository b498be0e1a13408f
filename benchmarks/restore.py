"""A restore of model and optimizer, with all digests compared, beside ranks that only read the same bytes into fresh memory.

    OMP_NUM_THREADS=1 python benchmarks/restore.py --ranks 4 --gib 1.5 --rounds 9

The state is a model in bf16 and AdamW's two moments. Fresh processes for every run, both in turn, files in the page cache, minima
compared. The live state that a restore fills is there already, as in a run that goes on; its memory has been touched.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from benchmarks.fresh import on_fresh_ranks
from shardwise.tensors.live import local_tensor

PARTS, WIDTH = 24, 4096
_READ_BYTES = 8 * 2**20


class State(nn.Module):
    """Parameters of so many bytes in all, in bf16."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        rows = max(1, nbytes // PARTS // WIDTH // 2)
        empty = [torch.empty(rows, WIDTH, dtype=torch.bfloat16) for _ in range(PARTS)]
        self.parts = nn.ParameterList([nn.Parameter(one) for one in empty])

    def forward(self) -> None:
        """Never called: FSDP2 wants one to hook into."""


def train_state(world_size: int, nbytes: int) -> sw.TrainState:
    """A third of the bytes are parameters, two thirds AdamW's moments. Random content."""
    with torch.device("meta"):
        model = State(nbytes // 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        local_tensor(parameter).detach().normal_(generator=generator)
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return sw.TrainState(model=model, optimizer=optimizer)


def write(rank: int, world_size: int, nbytes: int, step: str) -> None:
    sw.save(train_state(world_size, nbytes), step)


def restore(rank: int, world_size: int, nbytes: int, step: str) -> tuple[float, float, int]:
    state = train_state(world_size, nbytes)
    gc.collect()
    dist.barrier()
    started = time.perf_counter()
    report = sw.restore(state, step)
    return started, time.perf_counter(), report.bytes_read


def floor(rank: int, world_size: int, nbytes: int, step: str) -> tuple[float, float, int]:
    """Read this rank's slice files, a tensor's worth at a time, into fresh memory."""
    files = sorted(Path(step).glob(f"*/shard-{rank + 1:05d}-*.safetensors"))
    dist.barrier()
    started, done = time.perf_counter(), 0
    kept = []
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        size, at = os.fstat(fd).st_size, 0
        while at < size:
            piece = torch.empty(min(_READ_BYTES, size - at), dtype=torch.uint8)
            at += os.preadv(fd, [memoryview(piece.numpy())], at)
            kept.append(piece)
        os.close(fd)
        done += size
    return started, time.perf_counter(), done


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    nbytes = int(args.gib * 2**30)
    folder = tempfile.mkdtemp(prefix="shardwise-bench-")
    try:
        step = os.path.join(folder, "step")
        on_fresh_ranks(args.ranks, write, nbytes, step)
        seconds: dict[str, list[float]] = {"restore": [], "plain floor": []}
        read = {}
        for turn in range(args.rounds):
            for name in list(seconds)[:: -1 if turn % 2 else 1]:
                runs = on_fresh_ranks(args.ranks, restore if name == "restore" else floor, nbytes, step)
                seconds[name].append(max(r[1] for r in runs) - min(r[0] for r in runs))
                read[name] = sum(r[2] for r in runs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Of the floor, headers too.
    if not read["restore"] <= read["plain floor"] <= 1.01 * read["restore"]:
        raise SystemExit(f"not the same bytes were read: {read}")
    least = {name: min(found) for name, found in seconds.items()}
    report = {
        "ranks, GiB, rounds": [args.ranks, args.gib, args.rounds],
        "seconds, least": least,
        "seconds, median": {name: statistics.median(found) for name, found in seconds.items()},
        "bytes read": read,
        "restore / plain floor, minima": round(least["restore"] / least["plain floor"], 3),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
