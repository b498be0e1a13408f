"""A pipeline with a large transformer on 4 ranks: memory of a load with the transformer sharded, and the time of an export.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py
    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --short

A Flux pipeline without text encoders, with a transformer of 1.3 GiB in bf16. Each way runs on fresh CPU ranks: diffusers without the transformer;
``load_pipeline`` with the transformer sharded; ``from_pretrained`` on every rank and ``fully_shard`` over it; NeMo Automodel's loader for
fine-tuning, where it's installed (0.7.0: ``pip install --no-deps nemo-automodel``). The peak is anonymous memory and
this process's part of shared memory, above that of the process before the load, on the rank that takes most. Then all ranks export the
transformer, in turns with a plain write and fsync of as many bytes by as many processes, buffered and with O_DIRECT; the fastest of the rounds
counts, and the faster of the two writes is the floor. A minute, and 8 GiB of memory and disk. Prints JSON; the exit status is 1 if a contract is broken.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import diffusers
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from benchmarks.fresh import in_fresh_process, on_fresh_ranks
from benchmarks.loading.counters import charged_bytes, marked

MIB = 2**20
NONE = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
NEMO = "NeMo Automodel"
WAYS = ("without the transformer", "shardwise", "from_pretrained and fully_shard", NEMO)


def main() -> None:
    """Measure and print; exit status 1 if a contract is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; default: the system's temporary directory")
    parser.add_argument("--short", action="store_true", help="tiny")
    args = parser.parse_args()
    heads, blocks = (2, 2) if args.short else (16, 10)
    _ = diffusers.FluxPipeline, diffusers.FluxTransformer2DModel  # imported before ranks fork
    ways = WAYS if importlib.util.find_spec("nemo_automodel") and args.ranks > 1 else WAYS[:-1]
    if NEMO in ways:
        importlib.import_module("nemo_automodel._diffusers.auto_diffusion_pipeline")
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-", dir=args.folder) as directory:
        in_fresh_process(_write, f"{directory}/source", heads, blocks)
        transformer = f"{directory}/source/transformer"
        stored = sum(e.stat().st_size for e in os.scandir(transformer) if e.name.endswith(".safetensors"))
        peaks = {way: max(on_fresh_ranks(args.ranks, _peak, way, f"{directory}/source")) for way in ways}
        times = on_fresh_ranks(args.ranks, _exports, directory, stored, args.rounds)
    export, *writes = (min(max(r[kind][k] for r in times) for k in range(args.rounds)) for kind in range(3))
    floor = min(writes)
    over = peaks["shardwise"] - peaks["without the transformer"] - stored / args.ranks
    holds = (over <= 128 * MIB, export <= 1.2 * floor)
    found = {
        "versions": f"torch {torch.__version__.split('+')[0]}, diffusers {diffusers.__version__}",
        "transformer, MiB": round(stored / MIB),
        "peak of a rank, MiB": {way: round(peak / MIB) for way, peak in peaks.items()},
        "shardwise, above the shard and the process without the transformer, MiB": round(over / MIB, 1),
        "plain write s, buffered and O_DIRECT": f"{writes[0]:.2f}, {writes[1]:.2f}",
        "export s / the faster plain write s": f"{export:.2f} / {floor:.2f} = {export / floor:.2f}",
        "contract: at most 128 MiB above": "holds" if holds[0] else "BROKEN",
        "contract: export <= 1.2 x the faster plain write": "holds" if holds[1] else "BROKEN",
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    sys.exit(not (holds[0] and (holds[1] or args.short)))


def _write(directory: str, heads: int, blocks: int) -> None:
    """Random weights, drawn in place in bf16."""
    torch.manual_seed(0)
    config = {
        "in_channels": 64,
        "num_layers": blocks,
        "num_single_layers": 2 * blocks,
        "attention_head_dim": 64,
        "num_attention_heads": heads,
        "joint_attention_dim": 1024,
        "pooled_projection_dim": 768,
        "axes_dims_rope": (8, 28, 28),
    }
    with torch.device("meta"):
        transformer = diffusers.FluxTransformer2DModel(**config).to(torch.bfloat16)
    transformer.to_empty(device="cpu")
    for parameter in transformer.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), latent_channels=1, norm_num_groups=1)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.FluxPipeline(scheduler=scheduler, vae=vae, transformer=transformer, **NONE)
    pipeline.save_pretrained(directory)


def _peak(rank: int, world_size: int, way: str, directory: str) -> int:
    mesh = init_device_mesh("cpu", (world_size,))
    before = charged_bytes()
    with marked() as peak:
        pipeline = _loaded(way, directory, mesh)
    del pipeline
    return peak.nbytes - before


def _loaded(way: str, directory: str, mesh: Any) -> Any:
    if way == "shardwise":
        shard = ("transformer",)
        return sw.load_pipeline(directory, mesh, shard=shard, components=NONE, dtype=torch.bfloat16)
    if way == NEMO:
        return _loaded_by_nemo(directory, mesh.size())
    without = {"transformer": None} if way == "without the transformer" else {}
    pipeline: Any = diffusers.FluxPipeline.from_pretrained(directory, dtype=torch.bfloat16, **NONE, **without)
    if not without:
        for block in (
            *pipeline.transformer.transformer_blocks,
            *pipeline.transformer.single_transformer_blocks,
        ):
            fully_shard(block, mesh=mesh)
        fully_shard(pipeline.transformer, mesh=mesh)
    return pipeline


def _loaded_by_nemo(directory: str, ranks: int) -> Any:
    """As NeMo Automodel's recipe for diffusion models loads before it trains."""
    from nemo_automodel._diffusers.auto_diffusion_pipeline import NeMoAutoDiffusionPipeline
    from nemo_automodel.components.distributed import MeshContext, ParallelismSizes
    from nemo_automodel.components.distributed.config import FSDP2Config

    context = MeshContext.build(FSDP2Config(), ParallelismSizes(dp_size=ranks), world_size=ranks)
    pipeline = NeMoAutoDiffusionPipeline.from_pretrained(
        directory, mesh_context=context, components_to_load=["transformer"], load_for_training=True, **NONE
    )
    assert all(isinstance(p, DTensor) for p in pipeline.transformer.parameters())
    return pipeline


def _exports(rank: int, world_size: int, directory: str, stored: int, rounds: int) -> list[list[float]]:
    """Seconds of this rank's exports, and of plain writes, in turns."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = sw.load_pretrained(f"{directory}/source", mesh, subfolder="transformer", dtype=torch.bfloat16)
    block = memoryview(mmap.mmap(-1, 8 * MIB))  # where O_DIRECT can read it
    block[:] = os.urandom(len(block))
    nbytes = -(-stored // world_size // 4096) * 4096
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for kind in range(3):
            dist.barrier()
            start = time.perf_counter()
            if kind == 0:
                sw.export_hf(model, f"{directory}/out")
            else:
                _plain_write(f"{directory}/plain-{rank}", block, nbytes, os.O_DIRECT if kind == 2 else 0)
            dist.barrier()
            times[kind].append(time.perf_counter() - start)
            if kind:
                os.unlink(f"{directory}/plain-{rank}")
            elif rank == 0:
                shutil.rmtree(f"{directory}/out")
    return times


def _plain_write(path: str, block: memoryview, nbytes: int, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    while nbytes > 0:
        nbytes -= os.write(fd, block[: min(len(block), nbytes)])
    os.fsync(fd)
    os.close(fd)


if __name__ == "__main__":
    main()
