"""The loss of a run whose rank is killed in a save, resumed with all of its state and without its optimizer's.

    OMP_NUM_THREADS=1 python -m benchmarks.crash_curves --json benchmarks/charts/crash.json

A byte-level Qwen3 of 0.9 M parameters learns Python's standard library on two CPU ranks, with FSDP2 and AdamW. Four runs: one that nothing
stops; one whose rank 1 is killed by SIGKILL in the save of step 120; the resume of that run, from step 90; and the same resume with
new optimizer state, as after a checkpoint that lost it. A few minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

import shardwise as sw
from shardwise.demo.course import die_in_next_save

STEPS, SAVE_EVERY, KILL_AT, RANKS = 180, 30, 120, 2
LENGTH, GLOBAL_BATCH = 96, 16


class Source(Dataset[torch.Tensor]):
    """Pieces of the standard library's modules, as bytes."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: STEPS * GLOBAL_BATCH * LENGTH]
        self.pieces = torch.tensor(list(text)).view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.pieces[index]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="PATH", help="default: print")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        train(*args.rank)
        return
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as work:
        whole = _launch(f"{work}/whole", "", "")
        killed = _launch(f"{work}/run", "kill", "")
        shutil.copytree(f"{work}/run", f"{work}/other")
        resumed = _launch(f"{work}/run", "", "")
        forgetful = _launch(f"{work}/other", "", "new optimizer")
    assert max(killed) == KILL_AT, killed
    assert min(resumed) == KILL_AT - SAVE_EVERY + 1, resumed
    assert min(forgetful) == min(resumed)
    found = {
        "command": "python -m benchmarks.crash_curves",
        "machine": f"{os.cpu_count()} CPU cores, {platform.system()}, {RANKS} CPU ranks, gloo",
        "versions": f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}",
        "killed in the save of step": KILL_AT,
        "resumed from step": min(resumed) - 1,
        "steps that differ from the run without a stop": sum(
            loss != whole[step] for run in (killed, resumed) for step, loss in run.items()
        ),
        "losses": {
            "never stopped": whole,
            "killed": killed,
            "resumed": resumed,
            "resumed without optimizer state": forgetful,
        },
    }
    text = json.dumps(found, indent=1) + "\n"
    if args.json:
        Path(args.json).write_text(text)
    else:
        sys.stdout.write(text)


def _launch(root: str, kill: str, forget: str) -> dict[int, float]:
    """The losses of one launch, by step."""
    log = Path(f"{root}.losses")
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(RANKS), "-m", "benchmarks.crash_curves"]
    done = subprocess.run([*command, "--rank", root, str(log), kill, forget], check=False)
    assert bool(done.returncode) == bool(kill), done.returncode
    return {int(step): float(loss) for step, loss in map(str.split, log.read_text().splitlines())}


def train(root: str, log: str, kill: str, forget: str) -> None:
    """One rank of one launch."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    with sw.meta_init():
        model = transformers.Qwen3ForCausalLM(_config())
    sw.shard(model, mesh)
    sw.init_weights(model, seed=0)
    model.train()
    optimizer = _adamw(model)
    source = Source()
    sampler = sw.ElasticSampler(source, global_batch_size=GLOBAL_BATCH, seed=0)
    loader = sw.ResumableLoader(DataLoader(source, batch_sampler=sampler))
    state = sw.TrainState(model=model, optimizer=optimizer, dataloader=loader)
    with sw.Checkpointer(root) as checkpoints, open(log, "a") as losses:
        resumed = checkpoints.resume(state)
        step, written = (resumed.step if resumed else 0), 1 << 20
        if forget:
            optimizer = _adamw(model)
        for batch in loader:
            step += 1
            loss = _step(model, optimizer, batch)
            if dist.get_rank() == 0:
                print(step, loss, file=losses, flush=True)
            if step % SAVE_EVERY == 0:
                if kill and step == KILL_AT and dist.get_rank() == 1:
                    die_in_next_save(root, 1, written)
                written = checkpoints.save(state, step).bytes_written
            if step == STEPS:
                break
    dist.destroy_process_group()


def _config() -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
    return transformers.Qwen3Config(
        **sizes, vocab_size=256, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True
    )


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(shown := loss.detach().clone())
    return shown.item() / RANKS


if __name__ == "__main__":
    main()
