"""Tiny models of diffusers, as the hub stores them, and the arguments of a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["ZOO", "Kind", "outputs", "sample", "write", "write_pipeline"]


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


def write_pipeline(kind: str, directory: Path, *, half: bool = False) -> None:
    """Save a pipeline of tiny components: ``flux`` with two text encoders, ``wan`` with two transformers. ``half``: as the variant fp16."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    if kind == "flux":
        clip = transformers.CLIPTextConfig(
            hidden_size=32,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=2,
            vocab_size=1000,
            bos_token_id=0,
            eos_token_id=2,
            projection_dim=32,
        )
        t5 = transformers.T5Config(vocab_size=256, d_model=32, d_ff=37, d_kv=8, num_layers=2, num_heads=4)
        pipeline = diffusers.FluxPipeline(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            vae=diffusers.AutoencoderKL(
                sample_size=32,
                block_out_channels=(4,),
                latent_channels=1,
                norm_num_groups=1,
                use_quant_conv=False,
                use_post_quant_conv=False,
                shift_factor=0.0609,
                scaling_factor=1.5035,
            ),
            text_encoder=transformers.CLIPTextModel(clip),
            tokenizer=_tokenizer(),
            text_encoder_2=transformers.T5EncoderModel(t5),
            tokenizer_2=_tokenizer(),
            transformer=ZOO["flux"].cls(**ZOO["flux"].config),
        )
    else:
        first, second = (ZOO["wan"].cls(**ZOO["wan"].config) for _ in range(2))
        umt5 = transformers.UMT5Config(vocab_size=256, d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2)
        pipeline = diffusers.WanPipeline(
            tokenizer=_tokenizer(),
            text_encoder=transformers.UMT5EncoderModel(umt5),
            transformer=first,
            transformer_2=second,
            vae=diffusers.AutoencoderKLWan(
                base_dim=3,
                z_dim=4,
                dim_mult=[1, 1, 1, 1],
                num_res_blocks=1,
                temperal_downsample=[False, True, True],
            ),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
            boundary_ratio=0.875,
        )
    if half:
        pipeline.to(torch.float16)
    pipeline.save_pretrained(directory, variant="fp16" if half else None, max_shard_size="50KB")


def _tokenizer() -> Any:
    """Of three words."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<pad>": 0, "a": 1, "cat": 2}, unk_token="<pad>")
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", model_max_length=8)


def sample(pipeline: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a pipeline makes of given embeddings and a seed, in two steps, as latents."""
    generator = torch.Generator().manual_seed(7)
    if type(pipeline).__name__ == "FluxPipeline":
        given = {
            "prompt_embeds": _drawn(1, 8, 32, seed=1).to(dtype),
            "pooled_prompt_embeds": _drawn(1, 32, seed=2).to(dtype),
            "height": 8,
            "width": 8,
        }
    else:
        given = {
            "prompt_embeds": _drawn(1, 6, 16, seed=1).to(dtype),
            "negative_prompt_embeds": _drawn(1, 6, 16, seed=2).to(dtype),
            "height": 16,
            "width": 16,
            "num_frames": 5,
        }
    found = pipeline(
        **given, num_inference_steps=2, generator=generator, output_type="latent", return_dict=False
    )
    result: torch.Tensor = found[0]
    return result
