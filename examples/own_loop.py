"""A complete training run in your own loop: load, train, checkpoint, resume on a different number of ranks, export.

    torchrun --nproc-per-node 2 examples/own_loop.py --out own-out --steps 4
    torchrun --nproc-per-node 3 examples/own_loop.py --out own-out --steps 8   # resumes at step 5, on 3 ranks
    torchrun --nproc-per-node 3 examples/own_loop.py --out own-moe --model moe  # 8 experts, on ranks that don't divide them
    torchrun --nproc-per-node 2 examples/own_loop.py --out own-vlm --model vlm  # text only, with a frozen vision tower
    torchrun --nproc-per-node 2 examples/own_loop.py --out own-lora --lora      # trains and exports only the adapter

The losses are those of an uninterrupted run on any number of ranks, up to the order in which floats are added. ``from_pretrained``
opens the export in OUT/export-STEPS. The script creates a tiny model; to use your own, pass ``--base``. It runs on CPUs. On GPUs,
use "cuda" for the mesh and the backend, and move each batch there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

import shardwise as sw

GLOBAL_BATCH = 12  # sequences per step on all ranks; must be divisible by every number of ranks you use


class Sequences(Dataset[torch.Tensor]):
    """Sequences of tokens that count upwards, each from a different number."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> torch.Tensor:
        return 3 + (index + torch.arange(16)) % 90


def load_model(base: Path, *, lora: bool) -> tuple[Any, Any]:
    """The model that ``from_pretrained`` would return, but sharded: no rank ever has all of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    adapter = None
    if lora:
        from peft import LoraConfig

        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    # fp32 weights for the optimizer; on GPUs add policy=sw.ShardPolicy(mixed_precision=…) to compute in bf16
    model, report = sw.load_pretrained(base, mesh, dtype=torch.float32, adapter=adapter, return_report=True)
    if hasattr(model, "model") and hasattr(model.model, "vision_tower"):
        model.model.vision_tower.requires_grad_(False)
    return model, report


def train(
    base: Path, out: Path, steps: int, *, lora: bool = False, checkpoints_at: str | None = None
) -> dict[int, float]:
    """Train from the newest published step (or the base) to ``steps``, and export. Returns the loss of each step."""
    model, report = load_model(base, lora=lora)
    # Text gives a vision-language model's projector no gradient. That's fine: the optimizer skips it.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    samples = Sequences()
    sampler = sw.ElasticSampler(samples, global_batch_size=GLOBAL_BATCH, seed=0)
    loader = sw.ResumableLoader(DataLoader(samples, batch_sampler=sampler))  # tracks batches consumed
    state = sw.TrainState(model, optimizer, scheduler=schedule, dataloader=loader)

    losses: dict[int, float] = {}
    model.train()
    with sw.Checkpointer(checkpoints_at or out / "checkpoints", save_every=2, keep_last=2) as checkpoints:
        resumed = checkpoints.resume(state)  # None on the first run
        step = resumed.step if resumed else 0
        if dist.get_rank() == 0:
            whence = f"step {step} of {resumed.saved_world_size} ranks" if resumed else f"{base}"
            print(
                f"{dist.get_world_size()} ranks, from {whence}; read {report.bytes_read:,} bytes", flush=True
            )
        while step < steps:
            for ids in loader:
                step += 1
                losses[step] = train_one_step(model, optimizer, ids)
                schedule.step()
                if checkpoints.should_save(step) or step == steps:
                    checkpoints.save(state, step)  # atomic
                if step == steps:
                    break
    # Hugging Face names; with LoRA, the adapter in PEFT's format. Every rank writes its own part
    sw.export_hf(model, out / f"export-{steps}", overwrite=True)
    return losses


def train_one_step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(shown := loss.detach().clone())
    return shown.item() / dist.get_world_size()


def write_base(directory: Path, kind: str) -> None:
    """Write a tiny random model in Hugging Face format. Called on rank 0 only."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    body = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**body, "vocab_size": 101, "num_key_value_heads": 2}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model: Any
    if kind == "dense":
        model = Qwen3ForCausalLM(Qwen3Config(**text, head_dim=8))
    elif kind == "moe":  # stored one by one in the files, stacked in the model
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**text, **experts, head_dim=8))
    else:
        vision = CLIPVisionConfig(**body, image_size=12, patch_size=4)
        config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**text), image_token_index=100)
        model = LlavaForConditionalGeneration(config)
    model.save_pretrained(directory)


def main(arguments: list[str] | None = None) -> dict[int, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", help="directory or URL of checkpoints; default: OUT/checkpoints")
    parser.add_argument("--base", type=Path, help="model directory; default: a tiny one, made in OUT/base")
    parser.add_argument("--model", choices=["dense", "moe", "vlm"], default="dense", help="which tiny one")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    base = options.base or options.out / "base"
    if dist.get_rank() == 0 and not base.exists():
        write_base(base, options.model)
    dist.barrier()
    losses = train(base, options.out, options.steps, lora=options.lora, checkpoints_at=options.checkpoints)
    if dist.get_rank() == 0:
        print(json.dumps(losses), flush=True)
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
