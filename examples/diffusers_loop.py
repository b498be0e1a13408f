"""Fine-tunes the transformer of a diffusers pipeline with flow matching: load sharded, train, checkpoint, resume, sample, export.

    torchrun --nproc-per-node 2 examples/diffusers_loop.py --out flux-out --steps 4
    torchrun --nproc-per-node 3 examples/diffusers_loop.py --out flux-out --steps 8    # resumes at step 5, on 3 ranks
    torchrun --nproc-per-node 2 examples/diffusers_loop.py --out wan-out --model wan   # a video model
    torchrun --nproc-per-node 2 examples/diffusers_loop.py --out lora-out --lora       # trains and exports only the adapter

Text encoders aren't loaded: the script trains on embeddings, as you'd compute them once for your data set. Here both the latents
and the embeddings are random numbers. The script creates a tiny pipeline; to use your own, pass ``--base`` and replace ``batch_of``.
``from_pretrained`` opens the export in OUT/export-STEPS, and ``load_lora_weights`` the one of ``--lora``. The script runs on CPUs.
On GPUs, use "cuda" for the mesh and the backend, and move each batch there.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw

GLOBAL_BATCH = 12  # samples per step on all ranks; must be divisible by every number of ranks you use
WITHOUT = {
    "flux": ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
    "wan": ("text_encoder", "tokenizer"),
}
WITHOUT["wan"] += ("transformer_2",)

# Flux's blocks return views of their inputs, which FSDP2 warns about. They are never changed in place.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")


def batch_of(kind: str, step: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """This rank's part of a step's latents and text embeddings, with noise and times. The same rows on any number of ranks."""
    rows = torch.Generator().manual_seed(step)
    shape = (
        (16, 4) if kind == "flux" else (4, 2, 8, 8)
    )  # 16 packed patches of an image; channels, frames, height, width
    batch = {
        "latents": torch.randn(GLOBAL_BATCH, *shape, generator=rows) / 4 + 1,
        "noise": torch.randn(GLOBAL_BATCH, *shape, generator=rows),
        "sigma": torch.rand(GLOBAL_BATCH, generator=rows),
        "text": torch.randn(GLOBAL_BATCH, 8, 32, generator=rows),
        "pooled": torch.randn(GLOBAL_BATCH, 32, generator=rows),
    }
    return {name: values[rank::ranks] for name, values in batch.items()}


def flow_matching_loss(kind: str, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean squared error of the predicted velocity, from the data to the noise."""
    latents, noise = batch["latents"], batch["noise"]
    sigma = batch["sigma"].view(-1, *(1,) * (latents.ndim - 1))
    given: dict[str, Any] = {"hidden_states": (1 - sigma) * latents + sigma * noise, "return_dict": False}
    given["encoder_hidden_states"] = batch["text"]
    if kind == "flux":
        given |= {"pooled_projections": batch["pooled"], "guidance": torch.full_like(batch["sigma"], 3.5)}
        given |= {
            "img_ids": torch.zeros(latents.shape[1], 3),
            "txt_ids": torch.zeros(batch["text"].shape[1], 3),
        }
    timestep = batch["sigma"] if kind == "flux" else 1000 * batch["sigma"]
    velocity = model(timestep=timestep, **given)[0]
    return torch.nn.functional.mse_loss(velocity, noise - latents)


def sample(kind: str, pipeline: Any) -> torch.Tensor:
    """Latents that the pipeline draws for fixed embeddings. All ranks call it, with the same seed."""
    text = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {"prompt_embeds": torch.randn(1, 8, 32, generator=text)}
    if kind == "flux":
        given |= {"pooled_prompt_embeds": torch.randn(1, 32, generator=text), "height": 8, "width": 8}
    else:
        given |= {"negative_prompt_embeds": torch.zeros(1, 8, 32), "height": 16, "width": 16, "num_frames": 5}
    pipeline.set_progress_bar_config(disable=True)
    drawn = {"num_inference_steps": 2, "output_type": "latent", "return_dict": False}
    latents: torch.Tensor = pipeline(**given, **drawn, generator=torch.Generator().manual_seed(1))[0]
    return latents


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, init_lora_weights="gaussian", target_modules=["to_q", "to_k", "to_v", "to_out.0"])


def train(base: Path, out: Path, kind: str, steps: int, *, lora: bool) -> dict[int, float]:
    """Train from the newest published step (or the base) to ``steps``, and export."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    # fp32 weights for the optimizer; on GPUs add policy=sw.ShardPolicy(mixed_precision=…) to compute in bf16
    pipeline = sw.load_pipeline(
        base,
        mesh,
        shard=("transformer",),
        components=dict.fromkeys(WITHOUT[kind]),
        adapter={"transformer": lora_config()} if lora else None,
    )
    model = pipeline.transformer
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    state = sw.TrainState(model, optimizer)
    losses: dict[int, float] = {}
    before = sample(kind, pipeline)
    with sw.Checkpointer(out / "checkpoints", save_every=2, keep_last=2) as checkpoints:
        resumed = checkpoints.resume(state)  # None on the first run
        step = resumed.step if resumed else 0
        while step < steps:
            step += 1
            model.train()
            loss = flow_matching_loss(kind, model, batch_of(kind, step, rank, ranks))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(shown := loss.detach().clone())
            losses[step] = shown.item() / ranks
            if checkpoints.should_save(step) or step == steps:
                checkpoints.save(state, step)  # atomic
    model.eval()
    after = sample(kind, pipeline)
    # With --lora the adapter, in a file for load_lora_weights; otherwise the pipeline. Every rank writes its own part
    if not (export := out / f"export-{steps}").exists():
        sw.export_hf(model if lora else pipeline, export)
    if rank == 0:
        torch.save({"before": before, "after": after}, out / f"samples-{steps}.pt")
        print(json.dumps(losses), flush=True)
    return losses


def write_base(directory: Path, kind: str) -> None:
    """Write a tiny random pipeline without text encoders. Called on rank 0 only."""
    import diffusers

    torch.manual_seed(0)
    none = dict.fromkeys(WITHOUT[kind])
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline: Any
    if kind == "flux":
        transformer = diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        )
        vae = diffusers.AutoencoderKL(block_out_channels=(4,), latent_channels=1, norm_num_groups=1)
        pipeline = diffusers.FluxPipeline(scheduler=scheduler, vae=vae, transformer=transformer, **none)
    else:
        wan = diffusers.WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=64,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        )
        video = diffusers.AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1)
        pipeline = diffusers.WanPipeline(scheduler=scheduler, vae=video, transformer=wan, **none)
    pipeline.save_pretrained(directory)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="pipeline directory; default: a tiny one, made in OUT/base")
    parser.add_argument("--model", choices=list(WITHOUT), default="flux", help="the kind of pipeline")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    base = options.base or options.out / "base"
    if dist.get_rank() == 0 and not base.exists():
        write_base(base, options.model)
    dist.barrier()
    train(base, options.out, options.model, options.steps, lora=options.lora)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
