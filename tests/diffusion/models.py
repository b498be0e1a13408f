"""Tiny models of diffusers, as the hub stores them, and the arguments of a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["PIPELINES", "ZOO", "Kind", "outputs", "sample", "write", "write_pipeline"]


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
    "sdxl": Kind(
        "UNet2DConditionModel",
        {
            "block_out_channels": (16, 32),
            "layers_per_block": 1,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 * 8 + 32,
            "cross_attention_dim": 64,
            "attention_head_dim": (2, 4),
            "norm_num_groups": 8,
        },
        lambda: {
            "sample": _drawn(1, 4, 8, 8),
            "timestep": torch.tensor([5]),
            "encoder_hidden_states": _drawn(1, 6, 64, seed=1),
            "added_cond_kwargs": {"text_embeds": _drawn(1, 32, seed=2), "time_ids": torch.ones(1, 6)},
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


#: A pipeline's models that are trained, and the kind of each.
PIPELINES = {
    "flux": {"transformer": "flux"},
    "sd3": {"transformer": "sd3"},
    "wan-2.1": {"transformer": "wan"},
    "wan": {"transformer": "wan", "transformer_2": "wan"},
    "qwen-image": {"transformer": "qwen-image"},
    "hunyuan-video": {"transformer": "hunyuan-video"},
    "ltx": {"transformer": "ltx"},
    "sdxl": {"unet": "sdxl"},
}


def write_pipeline(kind: str, directory: Path, *, half: bool = False) -> None:
    """Save a pipeline of tiny components: ``flux`` with two text encoders, ``wan`` with two transformers. ``half``: as the variant fp16."""
    torch.manual_seed(0)
    pipeline = _pipeline(kind)
    if half:
        pipeline.to(torch.float16)
    pipeline.save_pretrained(directory, variant="fp16" if half else None, max_shard_size="50KB")


def _pipeline(kind: str) -> Any:
    import diffusers
    import transformers

    trained = {name: ZOO[of].cls(**ZOO[of].config) for name, of in PIPELINES[kind].items()}
    flow = diffusers.FlowMatchEulerDiscreteScheduler
    if kind == "flux":
        return diffusers.FluxPipeline(
            scheduler=flow(),
            vae=_autoencoder(1),
            text_encoder=_clip(),
            tokenizer=_tokenizer(),
            text_encoder_2=_t5(32),
            tokenizer_2=_tokenizer(),
            **trained,
        )
    if kind == "sd3":
        return diffusers.StableDiffusion3Pipeline(
            scheduler=flow(),
            vae=_autoencoder(4),
            text_encoder=_clip(projected=True),
            tokenizer=_tokenizer(),
            text_encoder_2=_clip(projected=True),
            tokenizer_2=_tokenizer(),
            text_encoder_3=_t5(32),
            tokenizer_3=_tokenizer(),
            **trained,
        )
    if kind == "sdxl":
        return diffusers.StableDiffusionXLPipeline(
            scheduler=diffusers.DDIMScheduler(),
            vae=_autoencoder(4),
            text_encoder=_clip(),
            tokenizer=_tokenizer(),
            text_encoder_2=_clip(projected=True),
            tokenizer_2=_tokenizer(),
            **trained,
        )
    if kind == "qwen-image":
        text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        text |= {"num_key_value_heads": 2, "vocab_size": 256}
        text["rope_scaling"] = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
        vision = {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
        }
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        vae = diffusers.AutoencoderKLQwenImage(
            base_dim=24,
            z_dim=4,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        )
        return diffusers.QwenImagePipeline(
            scheduler=flow(use_dynamic_shifting=True),
            vae=vae,
            text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
            tokenizer=_tokenizer(),
            **trained,
        )
    if kind == "hunyuan-video":
        llama = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=256
        )
        vae = diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4,
            block_out_channels=(8,) * 4,
            layers_per_block=1,
            norm_num_groups=4,
            mid_block_add_attention=True,
        )
        return diffusers.HunyuanVideoPipeline(
            text_encoder=transformers.LlamaModel(llama),
            tokenizer=_tokenizer(),
            vae=vae,
            scheduler=flow(shift=7.0),
            text_encoder_2=_clip(),
            tokenizer_2=_tokenizer(),
            **trained,
        )
    if kind == "ltx":
        vae = diffusers.AutoencoderKLLTXVideo(
            latent_channels=8,
            patch_size=1,
            block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4,
            layers_per_block=(1,) * 5,
            decoder_layers_per_block=(1,) * 5,
        )
        return diffusers.LTXPipeline(
            scheduler=flow(), vae=vae, text_encoder=_t5(16), tokenizer=_tokenizer(), **trained
        )
    umt5 = transformers.UMT5Config(vocab_size=256, d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2)
    return diffusers.WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=transformers.UMT5EncoderModel(umt5),
        vae=diffusers.AutoencoderKLWan(
            base_dim=3,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ),
        scheduler=flow(shift=7.0),
        boundary_ratio=0.875 if kind == "wan" else None,
        **trained,
    )


def _clip(*, projected: bool = False) -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=1000,
        bos_token_id=0,
        eos_token_id=2,
        projection_dim=32,
    )
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def _t5(width: int) -> Any:
    import transformers

    config = transformers.T5Config(vocab_size=256, d_model=width, d_ff=37, d_kv=8, num_layers=2, num_heads=4)
    return transformers.T5EncoderModel(config)


def _autoencoder(channels: int) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        sample_size=32,
        block_out_channels=(4,),
        latent_channels=channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )


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
    given = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in _PROMPTS[type(pipeline).__name__]().items()
    }
    pipeline.set_progress_bar_config(disable=True)
    found = pipeline(
        **given,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(7),
        output_type="latent",
        return_dict=False,
    )
    result: torch.Tensor = found[0]
    return result


def _both(prompt: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A prompt's embeddings, and the same as those of a negative prompt."""
    return {**prompt, **{f"negative_{name}": value.flip(-1) for name, value in prompt.items()}}


def _masked(*shape: int) -> dict[str, torch.Tensor]:
    """Embeddings of a prompt with a mask, which is all true."""
    mask = torch.ones(shape[:2], dtype=torch.bool)
    return {"prompt_embeds": _drawn(*shape, seed=1), "prompt_attention_mask": mask}


#: Arguments of a call of each pipeline.
_PROMPTS: dict[str, Callable[[], dict[str, Any]]] = {
    "FluxPipeline": lambda: {
        "prompt_embeds": _drawn(1, 8, 32, seed=1),
        "pooled_prompt_embeds": _drawn(1, 32, seed=2),
        "height": 8,
        "width": 8,
    },
    "StableDiffusion3Pipeline": lambda: {
        **_both({"prompt_embeds": _drawn(1, 8, 32, seed=1), "pooled_prompt_embeds": _drawn(1, 64, seed=2)}),
        "height": 8,
        "width": 8,
    },
    "StableDiffusionXLPipeline": lambda: {
        **_both({"prompt_embeds": _drawn(1, 8, 64, seed=1), "pooled_prompt_embeds": _drawn(1, 32, seed=2)}),
        "height": 8,
        "width": 8,
    },
    "WanPipeline": lambda: {
        "prompt_embeds": _drawn(1, 6, 16, seed=1),
        "negative_prompt_embeds": _drawn(1, 6, 16, seed=2),
        "height": 16,
        "width": 16,
        "num_frames": 5,
    },
    "QwenImagePipeline": lambda: {
        "prompt_embeds": _drawn(1, 7, 16, seed=1),
        "prompt_embeds_mask": torch.ones(1, 7, dtype=torch.int64),
        "true_cfg_scale": 1.0,
        "height": 16,
        "width": 16,
    },
    "HunyuanVideoPipeline": lambda: {
        **_masked(1, 6, 16),
        "pooled_prompt_embeds": _drawn(1, 8, seed=2),
        "height": 16,
        "width": 16,
        "num_frames": 5,
    },
    "LTXPipeline": lambda: {**_both(_masked(1, 6, 16)), "height": 32, "width": 32, "num_frames": 9},
}
