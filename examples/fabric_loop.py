"""Lightning Fabric: its strategy, precision and launcher around a model that shardwise has sharded and filled.

    pip install lightning
    torchrun --nproc-per-node 2 examples/fabric_loop.py --out fabric-out --steps 4
    torchrun --nproc-per-node 3 examples/fabric_loop.py --out fabric-out --steps 8   # goes on at step 5, on 3 ranks

``ModelParallelStrategy`` makes the mesh and asks for a function that parallelizes: the model is parallel already, so
the function gives it back, and Fabric takes it as it is. A ``TrainState`` gets the model and the optimizer themselves,
not what ``setup_module`` and ``setup_optimizers`` return: a checkpoint then has the model's own names. The model is a
tiny one, made on the spot; give your own with ``--base``. Runs on CPUs; on GPUs give ``accelerator="cuda"``.
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

GLOBAL_BATCH = 12  # sequences of a step on all ranks: divides by the rank counts that may come
SAMPLES = [3 + (first + torch.arange(16)) % 90 for first in range(120)]  # tokens that count upwards


def train(
    fabric: Fabric, base: Path, out: Path, steps: int, checkpoints_at: str | None = None
) -> dict[int, float]:
    """From the newest published step, or the base, to ``steps``; exports what came out. The loss of each step."""
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
        resumed = checkpoints.resume(state)  # None on a first run
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
                checkpoints.save(state, step)  # is written behind the next step
                if step == steps:
                    break
    if not (export := out / f"export-{steps}").exists():
        sw.export_hf(model, export)
    return losses


def write_base(directory: Path) -> None:
    """A tiny model of noise in hub format. Rank 0's work."""
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
