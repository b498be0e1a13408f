"""Lightning Fabric with a model that shardwise has sharded and loaded: its strategy, precision and launcher still apply.

    pip install lightning
    torchrun --nproc-per-node 2 examples/fabric_loop.py --out fabric-out --steps 4
    torchrun --nproc-per-node 3 examples/fabric_loop.py --out fabric-out --steps 8   # resumes at step 5, on 3 ranks

``ModelParallelStrategy`` creates the mesh and asks for a function that parallelizes the model. The model is already
sharded, so the function returns it unchanged. Give ``TrainState`` the model and optimizer themselves, not the results of
``setup_module`` and ``setup_optimizers``, so that checkpoints have the model's own names. The script creates a tiny
model; to use your own, pass ``--base``. It runs on CPUs. On GPUs, use ``accelerator="cuda"``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

import shardwise as sw

GLOBAL_BATCH = 12  # sequences per step on all ranks; must be divisible by every number of ranks you use
SAMPLES = [3 + (first + torch.arange(16)) % 90 for first in range(120)]  # tokens that count upwards


def train(
    fabric: Fabric, base: Path, out: Path, steps: int, checkpoints_at: str | None = None
) -> dict[int, float]:
    """Train from the newest published step (or the base) to ``steps``, and export. Returns the loss of each step."""
    mesh = fabric.strategy.device_mesh["data_parallel"]  # type: ignore[attr-defined]  # of ModelParallelStrategy
    model, report = sw.load_pretrained(base, mesh, return_report=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = sw.ElasticSampler(SAMPLES, global_batch_size=GLOBAL_BATCH, seed=0)
    loader = sw.ResumableLoader(DataLoader(SAMPLES, batch_sampler=sampler))  # type: ignore[arg-type]
    state = sw.TrainState(model=model, optimizer=optimizer, dataloader=loader)
    fabric_model = fabric.setup_module(model)
    fabric_optimizer: Any = fabric.setup_optimizers(optimizer)
    fabric_model.train()

    losses: dict[int, float] = {}
    with sw.Checkpointer(checkpoints_at or out / "checkpoints", mode="async", keep_last=2) as checkpoints:
        resumed = checkpoints.resume(state)  # None on the first run
        step = resumed.step if resumed else 0
        fabric.print(f"{fabric.world_size} ranks, from step {step}; rank 0 read {report.bytes_read:,} bytes")
        while step < steps:
            for ids in loader:
                step += 1
                ids = fabric.to_device(ids)
                loss = fabric_model(input_ids=ids, labels=ids).loss
                fabric.backward(loss)
                fabric.clip_gradients(fabric_model, fabric_optimizer, max_norm=1.0)
                fabric_optimizer.step()
                fabric_optimizer.zero_grad()
                losses[step] = float(fabric.all_reduce(loss.detach()))  # type: ignore[arg-type]
                fabric.print(f"step {step}: loss {losses[step]:.4f}")
                checkpoints.save(state, step)  # written in the background
                if step == steps:
                    break
    if not (export := out / f"export-{steps}").exists():
        sw.export_hf(model, export)
    return losses


def write_base(directory: Path) -> None:
    """Write a tiny random model in Hugging Face format. Called on rank 0 only."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    Qwen3ForCausalLM(config).save_pretrained(directory)


def main(arguments: list[str] | None = None) -> dict[int, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", help="directory or URL of checkpoints; default: OUT/checkpoints")
    parser.add_argument("--base", type=Path, help="model directory; default: a tiny one, made in OUT/base")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])  # torchrun's
    strategy = ModelParallelStrategy(
        lambda model, mesh: model, data_parallel_size=ranks, tensor_parallel_size=1
    )
    fabric = Fabric(accelerator="cpu", devices=here, num_nodes=ranks // here, strategy=strategy)
    fabric.launch()
    base = options.base or options.out / "base"
    if fabric.is_global_zero and not base.exists():
        write_base(base)
    fabric.barrier()
    return train(fabric, base, options.out, options.steps, options.checkpoints)


if __name__ == "__main__":
    main()
