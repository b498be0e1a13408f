"""Loads of an FP8 model beside torch's own reader of quantised files, and beside a cast of as many elements.

    OMP_NUM_THREADS=1 python benchmarks/quantized.py
    OMP_NUM_THREADS=1 python benchmarks/quantized.py --short

One process, one thread, warm page cache, all in turn, minima compared. Codes in blocks of 128 x 128 as DeepSeek stores them; every loader fills bf16
weights. ``cast``: the same model stored in fp32. Then 4 ranks on a tensor of 600 MiB (in bf16): bytes read and anonymous memory. Prints
JSON; the exit status is 1 if a contract is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from benchmarks.fresh import from_fresh_process, in_fresh_process, on_fresh_ranks
from benchmarks.loading.counters import anonymous_bytes, sampled

MIB = 2**20
_BLOCK = 128


class Layers(nn.Module):
    """Matrices of one shape."""

    def __init__(self, count: int, rows: int, columns: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16) for _ in range(count)]
        )


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--short", action="store_true", help="tiny, once; no contract on seconds")
    args = parser.parse_args()
    count, rows, columns = (2, 256, 384) if args.short else (12, 4096, 7168)
    wide = (512, 256) if args.short else (122880, 2560)
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as root:
        in_fresh_process(_write, f"{root}/model", count, rows, columns)
        in_fresh_process(_write, f"{root}/wide", 1, *wide)
        took: dict[str, list[float]] = {"shardwise": [], "cast": [], "torch": []}
        for turn in range(1 if args.short else args.rounds):
            for kind in list(took)[turn % 3 :] + list(took)[: turn % 3]:
                if kind != "torch" or turn < 2:  # it takes many times as long
                    took[kind].append(from_fresh_process(_load, kind, f"{root}/model", count, rows, columns))
        ranks = on_fresh_ranks(4, _load_wide, f"{root}/wide/fp8", *wide)
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
                "torch / shardwise": round(least["torch"] / least["shardwise"], 2),
                "cast / shardwise": round(least["cast"] / least["shardwise"], 2),
                "4 ranks: bytes read / stored": round(read, 4),
                "4 ranks: anonymous memory beside the shard, MiB": round(beside / MIB, 1),
            },
            indent=1,
        )
    )
    holds = read <= 1.02 and beside <= 128 * MIB
    if not args.short:
        holds &= least["torch"] >= 10 * least["shardwise"] and least["cast"] >= 0.6 * least["shardwise"]
    sys.exit(not holds)


def _write(directory: str, count: int, rows: int, columns: int) -> None:
    """Codes and scales for ``fp8``, and as many elements in fp32 for ``cast``."""
    for kind in ("fp8", "cast"):
        Path(directory, kind).mkdir(parents=True)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}}
    Path(directory, "fp8", "config.json").write_text(json.dumps(config))
    codes, plain, index = {}, {}, {}
    for k in range(count):
        name = f"layers.{k}.weight"
        codes[name] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        codes[f"{name}_scale_inv"] = torch.rand(-(-rows // _BLOCK), -(-columns // _BLOCK)) + 0.5
        plain[name] = codes[name].to(torch.float32)
    index = dict.fromkeys(codes, "model.safetensors")
    save_file(codes, f"{directory}/fp8/model.safetensors")
    Path(directory, "fp8", "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file(plain, f"{directory}/cast/model.safetensors")


def _load(kind: str, directory: str, count: int, rows: int, columns: int) -> float:
    torch.set_num_threads(1)
    with sw.meta_init():
        model = Layers(count, rows, columns)
    started = time.perf_counter()
    if kind == "torch":
        model.to_empty(device="cpu")
        reader = QuantizedHuggingFaceStorageReader(f"{directory}/fp8", target_dtype=torch.bfloat16)
        state = dict(model.state_dict())
        dcp.load(state, storage_reader=reader, no_dist=True)
    else:
        source = f"{directory}/{'fp8' if kind == 'shardwise' else 'cast'}"
        sw.load(model, source, io=sw.IOOptions(read_threads=1))
    return time.perf_counter() - started


def _load_wide(rank: int, world_size: int, directory: str, rows: int, columns: int) -> dict[str, Any]:
    with sw.meta_init():
        model = Layers(1, rows, columns)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    before = anonymous_bytes()
    with sampled() as peak:
        report = sw.load(model, directory)
    return {"peak": peak.nbytes - before, "shard": report.local_bytes, "read": report.bytes_read}


if __name__ == "__main__":
    main()
