"""Tiny models of diffusers, as the hub stores them, and the arguments of a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["ZOO", "Kind", "outputs", "write"]


def _drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Kind:
    """A class of diffusers, the config of a tiny model, and what its forward takes."""

    name: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]

    @property
    def cls(self) -> Any:
        import diffusers

        return getattr(diffusers, self.name)


ZOO = {
    "flux": Kind(
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": [4, 4, 8],
            "guidance_embeds": True,
        },
        lambda: {
            "hidden_states": _drawn(2, 16, 4),
            "encoder_hidden_states": _drawn(2, 8, 32, seed=1),
            "pooled_projections": _drawn(2, 32, seed=2),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(8, 3),
            "timestep": torch.tensor([1.0, 1.0]),
            "guidance": torch.tensor([3.5, 3.5]),
        },
    ),
    "sd3": Kind(
        "SD3Transformer2DModel",
        {
            "sample_size": 32,
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 64,
            "out_channels": 4,
            "qk_norm": "rms_norm",
            "dual_attention_layers": (0,),
        },
        lambda: {
            "hidden_states": _drawn(2, 4, 8, 8),
            "encoder_hidden_states": _drawn(2, 8, 32, seed=1),
            "pooled_projections": _drawn(2, 64, seed=2),
            "timestep": torch.tensor([5, 5]),
        },
    ),
    "wan": Kind(
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 64,
            "ffn_dim": 32,
            "num_layers": 3,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 32,
        },
        lambda: {
            "hidden_states": _drawn(2, 4, 2, 8, 8),
            "encoder_hidden_states": _drawn(2, 6, 16, seed=1),
            "timestep": torch.tensor([5, 5]),
        },
    ),
    "qwen-image": Kind(
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
            "guidance_embeds": False,
        },
        lambda: {
            "hidden_states": _drawn(2, 16, 16),
            "encoder_hidden_states": _drawn(2, 7, 16, seed=1),
            "encoder_hidden_states_mask": torch.ones(2, 7, dtype=torch.bool),
            "timestep": torch.tensor([1.0, 1.0]),
            "img_shapes": [(1, 4, 4)] * 2,
        },
    ),
    "hunyuan-video": Kind(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "patch_size_t": 1,
            "guidance_embeds": True,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
        },
        lambda: {
            "hidden_states": _drawn(1, 4, 2, 4, 4),
            "timestep": torch.tensor([5]),
            "encoder_hidden_states": _drawn(1, 6, 16, seed=1),
            "pooled_projections": _drawn(1, 8, seed=2),
            "encoder_attention_mask": torch.ones(1, 6),
            "guidance": torch.tensor([3.0]),
        },
    ),
    "ltx": Kind(
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 8,
            "out_channels": 8,
            "patch_size": 1,
            "patch_size_t": 1,
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "cross_attention_dim": 32,
            "num_layers": 2,
            "caption_channels": 16,
        },
        lambda: {
            "hidden_states": _drawn(2, 32, 8),
            "encoder_hidden_states": _drawn(2, 6, 16, seed=1),
            "timestep": torch.tensor([5, 5]),
            "encoder_attention_mask": torch.ones(2, 6).bool(),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
    ),
    "unet": Kind(
        "UNet2DConditionModel",
        {
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
            "norm_num_groups": 8,
        },
        lambda: {
            "sample": _drawn(1, 4, 16, 16),
            "timestep": torch.tensor([5]),
            "encoder_hidden_states": _drawn(1, 6, 16, seed=1),
        },
    ),
    "vae": Kind(
        "AutoencoderKL",
        {
            "in_channels": 3,
            "out_channels": 3,
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "latent_channels": 4,
            "norm_num_groups": 8,
            "sample_size": 16,
        },
        lambda: {"sample": _drawn(1, 3, 16, 16)},
    ),
}


def write(kind: str, directory: Path, *, half: bool = False) -> Any:
    """Save a model with random weights in several files, with ``half`` also as the variant fp16, of other values; returns it."""
    torch.manual_seed(0)
    one = ZOO[kind]
    model = one.cls(**one.config)
    model.save_pretrained(directory, max_shard_size="60KB")
    if half:
        torch.manual_seed(1)
        one.cls(**one.config).half().save_pretrained(directory, variant="fp16", max_shard_size="60KB")
    return model


def outputs(kind: str, model: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a model makes of its kind's inputs, without gradients."""
    inputs = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in ZOO[kind].inputs().items()
    }
    with torch.no_grad():
        found = model(**inputs, return_dict=False)[0]
    result: torch.Tensor = found[0] if isinstance(found, list | tuple) else found
    return result
