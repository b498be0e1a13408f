"""Loads of quantized models beside a cast of as many elements, and FP8 beside torch's own reader of quantized files.

    OMP_NUM_THREADS=1 python benchmarks/quantized.py
    OMP_NUM_THREADS=1 python benchmarks/quantized.py --short

One process, one thread, warm page cache, all in turn. The contracts compare minima; medians of the rounds' ratios
stand beside them, because fresh pages cost more at some times. Every loader fills bf16 weights. ``cast``: the same model stored in
fp32. ``torch``: the FP8 model, in blocks of 128 x 128 as DeepSeek stores them, by torch's reader. Then 4 ranks on an FP8 tensor of 600 MiB (in
bf16): bytes read and anonymous memory. Prints JSON; the exit status is 1 if a contract is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from benchmarks.fresh import from_fresh_process, in_fresh_process, on_fresh_ranks
from benchmarks.loading.counters import anonymous_bytes, sampled
from benchmarks.quantized_formats import FORMATS, write

MIB = 2**20
_BLOCK = 128


class Layer(nn.Module):
    """One weight."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))


class Layers(nn.Module):
    """Weights of one shape."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(shape) for _ in range(count)])


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--short", action="store_true", help="tiny, once; no contract on seconds")
    args = parser.parse_args()
    count, rows, columns = (2, 256, 384) if args.short else (12, 4096, 7168)
    wide = (512, 256) if args.short else (122880, 2560)
    kinds = [*FORMATS, "cast", "torch"]
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as root:
        for kind in kinds[:-1]:
            in_fresh_process(write, f"{root}/{kind}", kind, count, rows, columns)
        in_fresh_process(write, f"{root}/wide", "fp8", 1, *wide)
        took: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(1 if args.short else args.rounds):
            first = turn % len(kinds)  # another one comes first in each round
            for kind in [*kinds[first:], *kinds[:first]]:
                if kind != "torch" or turn < 2:  # it takes many times as long
                    took[kind].append(from_fresh_process(_load, kind, root, count, rows, columns))
        ranks = on_fresh_ranks(4, _load_wide, f"{root}/wide", *wide)
    elements = count * rows * columns
    least = {kind: min(times) for kind, times in took.items()}
    stored = wide[0] * wide[1] + 4 * -(-wide[0] // _BLOCK) * -(-wide[1] // _BLOCK)
    beside = max(rank["peak"] - rank["shard"] for rank in ranks)
    read = sum(rank["read"] for rank in ranks) / stored
    print(
        json.dumps(
            {
                "elements": elements,
                "seconds, least": {kind: round(seconds, 3) for kind, seconds in least.items()},
                "bf16 GB/s": {kind: round(2 * elements / s / 1e9, 3) for kind, s in least.items()},
                "torch / fp8": round(least["torch"] / least["fp8"], 2),
                "cast / format": {kind: round(least["cast"] / least[kind], 2) for kind in FORMATS},
                "cast / format, median of the rounds": {
                    kind: round(median(map(truediv, took["cast"], took[kind])), 2) for kind in FORMATS
                },
                "4 ranks: bytes read / stored": round(read, 4),
                "4 ranks: anonymous memory beside the shard, MiB": round(beside / MIB, 1),
            },
            indent=1,
        )
    )
    holds = read <= 1.02 and beside <= 128 * MIB
    if not args.short:
        holds &= least["torch"] >= 10 * least["fp8"]
        holds &= all(least["cast"] >= 0.6 * least[kind] for kind in FORMATS)
    sys.exit(not holds)


def _load(kind: str, root: str, count: int, rows: int, columns: int) -> float:
    torch.set_num_threads(1)
    shape = (1, rows, columns) if kind == "gpt-oss" else (rows, columns)
    with sw.meta_init():
        model = Layers(count, shape)
    started = time.perf_counter()
    if kind == "torch":
        model.to_empty(device="cpu")
        reader = QuantizedHuggingFaceStorageReader(f"{root}/fp8", target_dtype=torch.bfloat16)
        dcp.load(dict(model.state_dict()), storage_reader=reader, no_dist=True)
    else:
        sw.load(model, f"{root}/{kind}", io=sw.IOOptions(read_threads=1))
    return time.perf_counter() - started


def _load_wide(rank: int, world_size: int, directory: str, rows: int, columns: int) -> dict[str, Any]:
    with sw.meta_init():
        model = Layers(1, (rows, columns))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    before = anonymous_bytes()
    with sampled() as peak:
        report = sw.load(model, directory)
    return {"peak": peak.nbytes - before, "shard": report.local_bytes, "read": report.bytes_read}


if __name__ == "__main__":
    main()
