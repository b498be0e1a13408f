"""Accelerate with FSDP2, your own model class, and an unchanged YAML (docs/howto/accelerate.md).

    accelerate launch --config_file examples/accelerate_fsdp.yaml examples/accelerate_fsdp.py --out out

The model has persistent buffers, tied weights and an unsharded parameter. With Accelerate alone,
``fsdp_cpu_ram_efficient_loading`` fails for it with ``'Tensor' object has no attribute 'device_mesh'``. Lines that differ
from a script without shardwise are marked with ``# <-``. Run the script again with more ``--steps`` or another
``--num_processes``, and it resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.integrations import accelerate as swa

#: Rows per step on all ranks together. They are the same on any number of ranks that divides this.
GLOBAL_BATCH = 12


class Block(nn.Module):
    """The class in the YAML's ``fsdp_transformer_layer_cls_to_wrap``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) + self.shift


class Gate(nn.Module):
    """An unsharded parameter: the YAML lists it in ``fsdp_ignored_modules``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.to(x.dtype)


class Model(nn.Module):
    """Blocks between an embedding and a head with tied weights."""

    def __init__(self, vocabulary: int = 96, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.gate = Gate(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.gate(x))


def make_weights(path: Path) -> None:
    """Write random weights, in place of pretrained ones."""
    torch.manual_seed(0)
    tensors = {
        name: torch.randn_like(t) * 0.05 for name, t in Model().state_dict().items() if name != "head.weight"
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")


def train(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, log: Path
) -> None:
    """Train one step, and log its loss."""
    rows = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 96, (GLOBAL_BATCH, 16), generator=rows)[
        accelerator.process_index :: accelerator.num_processes
    ]
    tokens = tokens.to(accelerator.device)
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean")
    if accelerator.is_main_process:
        with log.open("a") as file:
            row = {"step": step, "loss": float(mean), "ranks": accelerator.num_processes}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", help="directory or URL of checkpoints; default: OUT/checkpoints")
    parser.add_argument("--steps", type=int, default=5, help="train up to this step")
    args = parser.parse_args()

    accelerator = Accelerator()
    weights = args.out / "weights"
    if accelerator.is_main_process and not weights.exists():
        make_weights(weights)
    accelerator.wait_for_everyone()

    with sw.meta_init():  # <- uses no memory and no random numbers
        model = Model()
    swa.load(accelerator, model, weights)  # <- instead of load_state_dict
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)

    state = swa.train_state(accelerator)  # <- everything that was prepared
    with sw.Checkpointer(args.checkpoints or args.out / "checkpoints", keep_last=2) as checkpoints:
        report = checkpoints.resume(state)  # <- instead of accelerator.load_state
        done = report.step if report else 0
        if report:
            accelerator.print(f"resumed from step {done}; exact: {report.exact}")
        for step in range(done, args.steps):
            train(accelerator, model, optimizer, step, args.out / "losses.jsonl")
        if args.steps > done:
            checkpoints.save(state, args.steps)  # <- instead of accelerator.save_state
    accelerator.end_training()


if __name__ == "__main__":
    main()
