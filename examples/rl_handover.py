"""A small RL loop in two programs: a sharded trainer, and an inference engine that pulls its weights.

    torchrun --nproc-per-node 2 examples/rl_handover.py trainer --out rl --steps 40
    torchrun --nproc-per-node 1 examples/rl_handover.py engine --out rl      # in another terminal, on any number of ranks

The engine samples sequences with the weights that it has, and writes them to a folder; the trainer updates the policy with the newest ones,
and publishes. The reward counts small token numbers, so it's easy to see it rise. Kill either program at any time and start it again: the
trainer resumes from its last checkpoint, on any number of ranks, and the engine pulls the newest version. The script runs on CPUs. On GPUs, use "cuda"
for the mesh and the backend.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3Config

import shardwise as sw
from shardwise.errors import CheckpointError

VOCABULARY, LENGTH, SEQUENCES = 64, 12, 64


def new_model() -> Any:
    """The policy, on the meta device."""
    config = Qwen3Config(
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCABULARY},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    )
    with sw.meta_init():
        return AutoModelForCausalLM.from_config(config)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file at once, so that nobody reads half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


# ----------------------------------------------------------------------------------------------------
# The engine: samples with the weights that it has.


@torch.no_grad()
def sample(model: Any, seed: int) -> torch.Tensor:
    """Sequences that begin with token 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(SEQUENCES, 1, dtype=torch.long)
    for _ in range(LENGTH):
        probabilities = model(input_ids=ids).logits[:, -1].float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return ids


def is_done(out: Path) -> bool:
    """Whether the trainer is done, as rank 0 sees it: all ranks go the same way."""
    found = torch.tensor(int((out / "done").exists()))
    dist.broadcast(found, src=0)
    return bool(found)


def engine(out: Path) -> None:
    """Pull, sample, write; until the trainer says that it is done."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sw.shard(new_model(), mesh).eval()  # any layout: this one, or tensor parallelism
    while not (out / "url").exists():
        time.sleep(0.1)
    receiver = sw.handover.WeightReceiver(model, (out / "url").read_text())
    while not is_done(out):
        try:
            report = receiver.pull(wait_s=5)
        except CheckpointError as error:  # the trainer is away
            print(error, flush=True)
            continue
        if report is None:
            continue
        ids = sample(model, seed=report.version)
        if dist.get_rank() == 0:
            content = {"version": report.version, "ids": ids.tolist()}
            write_whole(out / "samples.json", json.dumps(content).encode())
            print(f"version {report.version}: {report.bytes_moved:,} bytes", flush=True)


# ----------------------------------------------------------------------------------------------------
# The trainer: updates the policy with what the engine sampled, and publishes.


def newest_samples(out: Path, version: int) -> torch.Tensor:
    """The sequences that were sampled with this version. Waits for them."""
    path = out / "samples.json"
    while True:
        if path.exists():
            found = json.loads(path.read_text())
            if found["version"] == version:
                return torch.tensor(found["ids"])
        time.sleep(0.02)


def update(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    """One policy gradient step. Returns the mean reward."""
    reward = (ids[:, 1:] < VOCABULARY / 4).float().sum(-1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    logits = model(input_ids=ids[:, :-1]).logits.float()
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    (-(chosen * advantage[:, None]).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(reward.mean())


def trainer(out: Path, steps: int, port: int) -> None:
    """Train for so many steps in all; continues a run that was stopped."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sw.shard(new_model(), mesh)
    sw.init_weights(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = sw.TrainState(model=model, optimizer=optimizer)
    # A fixed address and secret, so that engines find a trainer that was restarted.
    if dist.get_rank() == 0 and not (out / "url").exists():
        write_whole(out / "url", f"shardwise://127.0.0.1:{port}/{secrets.token_hex(16)}".encode())
    dist.barrier()
    with (
        sw.Checkpointer(out / "checkpoints", keep_last=2) as checkpoints,
        sw.handover.WeightSender(model, url=(out / "url").read_text(), dtype=torch.bfloat16) as sender,
    ):
        resumed = checkpoints.resume(state)
        first = resumed.step + 1 if resumed else 1
        for step in range(first, steps + 1):
            sender.publish(step)
            reward = update(model, optimizer, newest_samples(out, step))
            checkpoints.save(state, step)
            if dist.get_rank() == 0:
                with (out / "rewards.txt").open("a") as file:
                    file.write(f"{step} {reward}\n")
        if dist.get_rank() == 0:
            write_whole(out / "done", b"")
        dist.barrier()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", choices=("trainer", "engine"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--port", type=int, default=29611, help="where the trainer serves its weights")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if options.role == "engine":
        engine(options.out)
    else:
        trainer(options.out, options.steps, options.port)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
    dist.destroy_process_group()
