"""Peak memory of a rank while a model is loaded and sharded: plain `from_pretrained` and `fully_shard`, and shardwise.

    OMP_NUM_THREADS=1 python -m benchmarks.host_memory --json benchmarks/charts/host_memory.json
    OMP_NUM_THREADS=1 python -m benchmarks.host_memory --short

A Qwen3-like model of 376 M parameters, stored in bf16 and loaded in fp32, as for training. Fresh CPU ranks for each measurement. The peak
is anonymous memory above that of the process before the load, on the rank that takes most. A few minutes, and 14 GiB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from benchmarks.fresh import in_fresh_process, on_fresh_ranks
from benchmarks.loading.counters import anonymous_bytes, sampled

MIB = 2**20
WAYS = ("from_pretrained", "shardwise")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="PATH", help="default: print")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--short", action="store_true", help="tiny")
    args = parser.parse_args()
    _ = transformers.Qwen3ForCausalLM  # imported before ranks fork
    sizes = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 14}
    if args.short:
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as directory:
        in_fresh_process(_write, directory, sizes)
        stored = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
        peaks = {
            way: {str(n): max(on_fresh_ranks(n, _peak, way, directory)) for n in args.ranks} for way in WAYS
        }
    found = {
        "command": "python -m benchmarks.host_memory",
        "machine": f"{os.cpu_count()} CPU cores, {platform.system()}, CPU ranks, gloo",
        "versions": f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}",
        "stored, MiB": round(stored / MIB),
        "model in fp32, MiB": round(2 * stored / MIB),
        "peak of a rank, MiB": {
            way: {n: round(peak / MIB) for n, peak in each.items()} for way, each in peaks.items()
        },
    }
    text = json.dumps(found, indent=1) + "\n"
    if args.json:
        Path(args.json).write_text(text)
    else:
        sys.stdout.write(text)


def _write(directory: str, sizes: dict[str, int]) -> None:
    config = transformers.Qwen3Config(
        **sizes, num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True
    )
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu").tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model.save_pretrained(directory)


def _peak(rank: int, world_size: int, way: str, directory: str) -> int:
    mesh = init_device_mesh("cpu", (world_size,))
    before = anonymous_bytes()
    with sampled() as peak:
        model = _loaded(way, directory, mesh)
    del model
    return peak.nbytes - before


def _loaded(way: str, directory: str, mesh: Any) -> Any:
    if way == "shardwise":
        return sw.load_pretrained(directory, mesh, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    main()
