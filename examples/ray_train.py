"""Ray Train with two workers that may die at any time. Ray restarts them, and they resume from shardwise's checkpoints.

    pip install 'ray[train]'
    python examples/ray_train.py --out ray-out

Kill a worker with `kill -9` (its process ID is in OUT/pids). Ray restarts all workers, up to `max_failures` times, and each one finds
the newest published step. OUT must be a directory that all hosts can access. The losses in OUT/losses.jsonl are bit-identical to
those of a run in which no worker died. Ray's own checkpoints aren't used. The script runs on CPUs. On GPUs, set `use_gpu=True`, and
use "cuda" for the mesh and "nccl" for the backend.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import shardwise as sw

GLOBAL_BATCH = 12  # samples per step on all workers


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of a function."""

    def __init__(self, count: int = 1000) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 16, generator=generator)
        self.y = self.x.sin().sum(dim=1, keepdim=True) / 4

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def build_model() -> nn.Module:
    """A model sharded over all workers, with the same initial values at every launch."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(config: dict[str, Any]) -> None:
    """Train from the newest published step to the last one. Ray calls this on each worker, after every restart."""
    out = Path(config["out"])
    rank = dist.get_rank()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = Samples()
    sampler = sw.ElasticSampler(samples, global_batch_size=GLOBAL_BATCH, seed=0)
    loader = sw.ResumableLoader(DataLoader(samples, batch_sampler=sampler))
    state = sw.TrainState(model=model, optimizer=optimizer, dataloader=loader)

    # No PreemptionPolicy: Ray calls this function in a thread, and only the main thread can handle signals.
    with sw.Checkpointer(out / "checkpoints", keep_last=3) as checkpoints:
        resumed = checkpoints.resume(state)  # None on the first run
        step = resumed.step if resumed else 0
        (out / "pids").mkdir(exist_ok=True)
        (out / "pids" / str(rank)).write_text(str(os.getpid()))
        log(out, resumed=step)
        while step < config["steps"]:
            for x, y in loader:
                step += 1
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(shown := loss.detach())
                log(out, step=step, loss=shown.item() / dist.get_world_size())
                time.sleep(config["step_seconds"])
                if step % config["save_every"] == 0 or step == config["steps"]:
                    checkpoints.save(state, step)
                if step == config["steps"]:
                    break


def log(out: Path, **what: object) -> None:
    """Write one line of JSON per event."""
    if dist.get_rank() == 0:
        with (out / "losses.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.2, help="pause after each step")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    ray.init(include_dashboard=False, num_cpus=args.workers + 1, object_store_memory=100 * 1024**2)
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(args), "out": str(out)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(
            name="run", storage_path=str(out / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
