"""Elastic training: workers may be killed at any time. torchrun restarts them, and the run resumes.

Launch this on one or two hosts (or twice on one host), with any rendezvous endpoint that all of them can reach:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint localhost:29400 --rdzv-id elastic \\
        examples/elastic.py --out elastic-out

Kill a worker, or a whole agent, with ``kill -9``. torchrun waits until it considers the dead agent gone and restarts the
group with the remaining ranks. Each rank then finds the newest published step. The output looks like this:

    running on 2 ranks from the start
    step 1 loss 0.1727 on 2 ranks
    ...
    step 12 loss 0.3457 on 2 ranks
    running on 1 ranks from step 10 (saved on 2 ranks)
    step 11 loss 0.3472 on 1 ranks

Steps 11 and 12 are repeated with the same samples as before, because the order of samples doesn't depend on the number of
ranks. The losses are those of an uninterrupted run, up to the order in which floats are added. An agent that you launch
later joins in: torchrun restarts the group with more ranks. `elastic-out/rank-R.jsonl` logs all events of rank R. The
script runs on CPUs. On GPUs, use "cuda" for the mesh and the backend.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each restart its own store. Without it, torch 2.13 uses one store for all
restarts, where new workers can find the addresses of killed ones ("Gloo connectFullMesh failed").
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import shardwise as sw

GLOBAL_BATCH = 12  # samples per step on all ranks; must be divisible by every number of ranks you use


class Samples(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Points of a function, with their indices."""

    def __init__(self, count: int = 1000) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 16, generator=generator)
        self.y = self.x.sin().sum(dim=1, keepdim=True) / 4

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


def build_model() -> nn.Module:
    """A model sharded over all ranks, with the same initial values on any number of ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(out: Path, checkpoints_at: str | Path, steps: int, save_every: int, step_seconds: float) -> None:
    """Train from the newest published step, or from the start, to ``steps``. Every rank calls it after every restart."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    samples = Samples()
    sampler = sw.ElasticSampler(samples, global_batch_size=GLOBAL_BATCH, seed=0)
    loader = sw.ResumableLoader(DataLoader(samples, batch_sampler=sampler))
    state = sw.TrainState(model=model, optimizer=optimizer, scheduler=schedule, dataloader=loader)

    with sw.Checkpointer(checkpoints_at, keep_last=3) as checkpoints:
        resumed = checkpoints.resume(state)  # None on the first run
        step = resumed.step if resumed else 0
        log = Log(out / f"rank-{rank}.jsonl")
        log.write(world_size=world_size, resumed=step, saved_on=resumed.saved_world_size if resumed else None)
        if rank == 0:
            whence = f"step {step} (saved on {resumed.saved_world_size} ranks)" if resumed else "the start"
            print(f"running on {world_size} ranks from {whence}", flush=True)
        while step < steps:
            for numbers, x, y in loader:
                step += 1
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                dist.all_reduce(shown := loss.detach())
                log.write(
                    step=step, world_size=world_size, loss=shown.item() / world_size, ids=numbers.tolist()
                )
                if rank == 0:
                    print(
                        f"step {step} loss {shown.item() / world_size:.4f} on {world_size} ranks", flush=True
                    )
                if step % save_every == 0 or step == steps:
                    checkpoints.save(state, step)
                time.sleep(step_seconds)
                if step == steps:
                    break


class Log:
    """A file with one line of JSON per event. Restarts append to it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **what: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(what) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", help="directory or URL of checkpoints; default: OUT/checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, default=0.2, help="pause after each step")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    try:
        train(
            args.out,
            args.checkpoints or args.out / "checkpoints",
            args.steps,
            args.save_every,
            args.step_seconds,
        )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
