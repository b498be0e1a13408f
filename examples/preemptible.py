"""Training that a scheduler may stop and restart at any moment: on SLURM, in a Kubernetes JobSet, or with torchrun.

    sbatch examples/slurm.sbatch --out runs/a
    kubectl apply -f examples/jobset.yaml
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 3 --nproc-per-node 2 examples/preemptible.py --out runs/a

A signal stops all ranks at the same step. They save it and exit with status 75. The job script, or the JobSet's policy, then restarts
them. So does torchrun, after `kill -USR1` to one of its ranks (elastic.py explains the variable). `runs/a/losses.jsonl` has the loss of
each step, and which launch of the run computed it ("life"). The losses are bit-identical to those of an uninterrupted run. The script
runs on CPUs. On GPUs, use "cuda" for the mesh and the backend.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import shardwise as sw

GLOBAL_BATCH = 12  # samples per step on all ranks


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


def join() -> None:
    """Create the process group. torchrun and the JobSet set torch's variables, ``srun`` sets SLURM's."""
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ:
        dist.init_process_group("gloo")
        return
    job = os.environ
    first_host = job["SLURM_LAUNCH_NODE_IPADDR"]  # runs the job script, and rank 0
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{first_host}:{20000 + int(job['SLURM_JOB_ID']) % 10000}",
        rank=int(job["SLURM_PROCID"]),
        world_size=int(job["SLURM_NTASKS"]),
    )


def build_model() -> nn.Module:
    """A model sharded over all ranks, with the same initial values at every launch."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(args: argparse.Namespace) -> int:
    """Train from the newest published step, or from the start, until ``args.steps`` or a signal. Returns the exit status."""
    checkpoints = sw.Checkpointer(
        args.out / "checkpoints",
        save_every=args.save_every,
        keep_last=3,
        preemption=sw.PreemptionPolicy(deadline_s=args.deadline_s, exit_status=args.exit_status),
    )
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = Samples()
    sampler = sw.ElasticSampler(samples, global_batch_size=GLOBAL_BATCH, seed=0)
    loader = sw.ResumableLoader(DataLoader(samples, batch_sampler=sampler))
    state = sw.TrainState(model, optimizer, dataloader=loader)

    resumed = checkpoints.resume(state)  # None on the first run
    step = resumed.step if resumed else 0
    log = Log(args.out / "losses.jsonl", resumed=step)
    while step < args.steps:
        for x, y in loader:
            step += 1
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(shown := loss.detach())
            log.write(step=step, loss=shown.item() / dist.get_world_size())
            time.sleep(args.step_seconds)
            if checkpoints.should_save(step) or step == args.steps:
                checkpoints.save(state, step)
            if checkpoints.should_stop(step):  # at the same step on every rank
                checkpoints.stop(state, step)
                log.write(stopped=step)
                return checkpoints.exit_code
            if step == args.steps:
                break
    checkpoints.close()
    return 0


class Log:
    """A file with one line of JSON per event, and the launch ("life") that it belongs to. Rank 0 writes it."""

    def __init__(self, path: Path, *, resumed: int) -> None:
        self._path = path
        self._life = path.read_text().count("resumed") if path.exists() else 0
        self.write(resumed=resumed, ranks=dist.get_world_size())

    def write(self, **what: object) -> None:
        if dist.get_rank() == 0:
            with self._path.open("a") as file:
                file.write(json.dumps({"life": self._life, **what}) + "\n")
            print(f"life {self._life}: {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=0.2, help="pause after each step")
    parser.add_argument(
        "--deadline-s", type=float, default=30.0, help="seconds from the scheduler's signal to SIGKILL"
    )
    parser.add_argument(
        "--exit-status",
        type=int,
        default=75,
        help="exit status after a stop; with torchrun, 0 prevents a restart",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    join()
    status = train(args)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
