"""``diffusers_loop.py`` with Accelerate's FSDP2 plugin: load sharded, train, save and load the state, sample, export.

    PYTHONPATH=. torchrun --nproc-per-node 2 examples/diffusers_accelerate.py --out out --steps 4
    PYTHONPATH=. torchrun --nproc-per-node 2 examples/diffusers_accelerate.py --out out --steps 8   # resumes at step 5
    PYTHONPATH=. torchrun --nproc-per-node 2 examples/diffusers_accelerate.py --out lora-out --lora

Lines that differ from a script without shardwise are marked with ``# <-``. The plugin's settings are in the script; ``accelerate launch``
with a YAML works, too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import diffusers
import torch
from accelerate import FullyShardedDataParallelPlugin

import shardwise as sw
from examples.diffusers_loop import WITHOUT, batch_of, flow_matching_loss, lora_config, sample, write_base
from shardwise.integrations.accelerate import ShardwiseAccelerator as Accelerator  # <- for accelerate's

BLOCKS = {"flux": ["FluxTransformerBlock", "FluxSingleTransformerBlock"], "wan": ["WanTransformerBlock"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="pipeline directory; default: a tiny one, made in OUT/base")
    parser.add_argument("--model", choices=list(WITHOUT), default="flux", help="the kind of pipeline")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    kind, out = options.model, options.out

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=BLOCKS[kind],
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    base = options.base or out / "base"
    if accelerator.is_main_process and not base.exists():
        write_base(base, kind)
    accelerator.wait_for_everyone()

    model = (
        accelerator.load_pretrained(  # <- instead of FluxTransformer2DModel.from_pretrained and add_adapter
            base,
            subfolder="transformer",
            dtype=torch.float32,
            adapter=lora_config() if options.lora else None,
        )
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(
        base, **dict.fromkeys(WITHOUT[kind]), transformer=None
    )
    pipeline.register_modules(transformer=model)
    before = sample(kind, pipeline)

    step = 0
    if newest := accelerator.newest_checkpoint(out):  # <- the newest complete one
        accelerator.load_state(newest)
        step = int(newest.rpartition("-")[2])
    losses = {}
    rank, ranks = accelerator.process_index, accelerator.num_processes
    while step < options.steps:
        step += 1
        model.train()
        loss = flow_matching_loss(kind, model, batch_of(kind, step, rank, ranks))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = float(accelerator.reduce(loss.detach(), "mean"))
        if step % 2 == 0 or step == options.steps:
            accelerator.save_state(out / f"checkpoint-{step}")
    model.eval()
    after = sample(kind, pipeline)
    if not (export := out / f"export-{options.steps}").exists():
        sw.export_hf(model if options.lora else pipeline, export)  # <- every rank writes its own part
    if accelerator.is_main_process:
        torch.save({"before": before, "after": after}, out / f"samples-{options.steps}.pt")
        print(json.dumps(losses), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
