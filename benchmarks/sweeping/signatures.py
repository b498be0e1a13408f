"""Small models of diffusers, by the signature of a class: its defaults, shrunk by rule, and a table of what rules can't know."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.sweeping.shrink import shrunk

__all__ = ["defaults", "ways"]

#: Widths of a stack of blocks, one for each.
_WIDTHS = re.compile(r"(^|_)(out_)?channels$|_channel_sizes$|^decoder_stage_channels$")
#: The width that a list of factors multiplies.
_BASE = re.compile(
    r"^(ch|channels|base_channels|base_dim|decoder_base_dim|(en|de)coder_dim|dec_dim|enc_dim|decoder_hidden_dim"
    r"|decoder_channels|encoder_channels|hidden_channels|upsample_initial_channel|encoder_hidden_size)$"
)
_GROUPS = re.compile(r"num_groups|^groups$")
#: What multiplies it, one for each block.
_FACTORS = re.compile(r"(^|_)(ch_mult|c_mults|dim_mult|channel_multiples|channel_multipliers)$")
#: Numbers of equal layers: in each block, or in the stacks that the names of transformers' configs don't cover.
_DEPTHS = re.compile(
    r"layers_per_(down_|up_)?block$|_depths$|^num_res(net)?_blocks$|^num_\w+_blocks$|^nlayers$|_layers$"
)
#: Dims of what conditions a model, that the names of transformers' configs don't cover.
_CONDITION = re.compile(
    r"^time_(\w+_)?dim|^pooled_projection_dim$|_t5$|text_dim2$|^image_dim$|^image_embed_dim$|^motion_\w+_sizes$"
)
_AXES = re.compile(r"axes_dims?|^rope_(axes_dim|dim|dim_list)$|mrope_section")


def defaults(kind: Any) -> dict[str, Any]:
    """The arguments of a class that have defaults, as in its signature, and those that must be given.

    Raises ValueError if diffusers doesn't register them, so that no config holds them.
    """
    if not hasattr(kind.__init__, "__wrapped__"):
        names = ", ".join(inspect.signature(kind).parameters)
        raise ValueError(
            f"a wrapper for other models ({names}); it has no config, and each of them has a folder"
        )
    fields = {
        name: copy.deepcopy(parameter.default)
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if parameter.default is not parameter.empty
    }
    return fields | copy.deepcopy(GIVEN.get(kind.__name__, {}))


def ways(kind: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Small values of a class's arguments, the smallest first: widths from 16 or 32 (which some classes need), or divided."""
    fields = defaults(kind)
    for base in (16, 32):
        yield f"from {base}", _given(kind, _leveled(fields, base))
    for factor in (16, 8, 4, 2, 1):
        yield f"divided by {factor}", _given(kind, _in_groups(shrunk(fields, f"scaled {factor}")))


def _given(kind: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return fields | copy.deepcopy(GIVEN.get(kind.__name__, {}))


def _leveled(fields: dict[str, Any], base: int) -> dict[str, Any]:
    """Widths in the ratios that they have, the first ``base``, none above four times that; axes as large as a head."""
    small = shrunk(fields, "fixed")
    for name, value in fields.items():
        if _is_numbers(value) and _DEPTHS.search(name):
            small[name] = [min(v, 1) for v in value]
        elif _is_numbers(value) and _FACTORS.search(name):
            small[name] = [min(v, 2) for v in value]
        elif type(value) is int and _DEPTHS.search(name):
            small[name] = min(value, 1 if "per" in name else 2)
        elif type(value) is int and _CONDITION.search(name):
            small[name] = min(value, 32)
        elif _is_numbers(value) and _WIDTHS.search(name) and min(value) > 4:
            least = min(value)
            small[name] = [min(base * v // least, 4 * base) for v in value]
        elif type(value) is int and _BASE.match(name) and value > base:
            small[name] = base
    heads = ("attention_head_dim", "head_dim")
    axes = [name for name, value in fields.items() if _AXES.search(name) and _is_numbers(value)]
    if axes:
        for name in heads:
            if type(fields.get(name)) is int:
                small[name] = fields[name] // 4
        for name in axes:
            small[name] = [v // 4 for v in fields[name]]
        heads_of = next((n for n in ("num_attention_heads", "n_heads", "num_heads") if n in fields), None)
        for name in ("hidden_size", "dim", "model_dim"):
            if type(fields.get(name)) is int and heads_of is not None and not any(h in fields for h in heads):
                small[name] = small[heads_of] * sum(small[axes[0]])
    return _in_groups(small)


def _in_groups(fields: dict[str, Any]) -> dict[str, Any]:
    """Groups of a norm that divide all widths."""
    widths = [
        v for name, value in fields.items() if _WIDTHS.search(name) and _is_numbers(value) for v in value
    ]
    widths = [v for v in widths if v > 4]
    for name, value in fields.items():
        if type(value) is int and value > 4 and _GROUPS.search(name):
            fields[name] = math.gcd(4, *widths)
    return fields


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(type(v) is int for v in value)


#: Arguments that have no default, or one that fits only the large model, by class.
GIVEN: dict[str, dict[str, Any]] = {
    "AudioLDM2ProjectionModel": {"text_encoder_dim": 16, "text_encoder_1_dim": 16, "langauge_model_dim": 16},
    "AutoencoderKLHunyuanImage": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 16,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "spatial_compression_ratio": 2,
        "sample_size": 32,
    },
    "StableAudioProjectionModel": {
        "text_encoder_dim": 16,
        "conditioning_dim": 16,
        "min_value": 0,
        "max_value": 512,
    },
    "UniDiffuserTextDecoder": {"prefix_length": 4, "prefix_inner_dim": 32, "prefix_hidden_dim": 16},
    "Transformer2DModel": {"in_channels": 32},
    "TransformerTemporalModel": {"in_channels": 32},
    "DreamLiteTransformer2DModel": {"in_channels": 32},
    "UniDiffuserModel": {
        "in_channels": 4,
        "out_channels": 4,
        "patch_size": 2,
        "sample_size": 16,
        "num_layers": 2,
    },
    "EasyAnimateTransformer3DModel": {"in_channels": 4, "out_channels": 4, "patch_size": 2},
    "LatteTransformer3DModel": {"in_channels": 4, "patch_size": 2, "caption_channels": 32},
    "HunyuanDiT2DModel": {"in_channels": 4, "patch_size": 2},
    "HunyuanDiT2DControlNetModel": {"in_channels": 4, "patch_size": 2, "transformer_num_layers": 4},
    "LuminaNextDiT2DModel": {"num_kv_heads": 2},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2,
        "caption_channels": [32, 32],
        "llama_layers": [0, 1],
        "axes_dims_rope": (4, 4),
        "attention_head_dim": 8,
    },
    "OmniGenTransformer2DModel": {
        "rope_scaling": {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "PRXTransformer2DModel": {"axes_dim": [4, 4], "hidden_size": 32, "num_heads": 4},
    "AutoencoderKLMochi": {
        "encoder_block_out_channels": (32, 32, 32, 64),
        "decoder_block_out_channels": (32, 32, 32, 64),
    },
    "LTX2VideoDiffusionDecoderModel": {"decoder_stage_channels": (64, 32, 16, 16, 8), "decoder_head_dim": 8},
    "ControlNetUnionModel": {
        "addition_time_embed_dim": 16,
        "num_trans_channel": 16,
        "num_proj_channel": 16,
        "num_trans_head": 4,
    },
    "CosmosControlNetModel": {"attention_head_dim": 16, "num_attention_heads": 4, "img_context_dim_out": 32},
    "CosmosTransformer3DModel": {"attention_head_dim": 16, "num_attention_heads": 4},
    "RFD4ProteinaAutoencoder": {"atom37_mask": [[1] * 37] * 147, "allowed_residue_types": [1] * 147},
    "UNetSpatioTemporalConditionModel": {
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        "block_out_channels": (32, 64),
        "num_attention_heads": (4, 4),
        "layers_per_block": 1,
    },
    "WanAnimateTransformer3DModel": {
        "motion_encoder_channel_sizes": {str(2**power): 32 for power in range(2, 11)}
    },
    "WanVACETransformer3DModel": {"vace_layers": [0, 1]},
    "ZImageControlNetModel": {
        "control_layers_places": [0, 1],
        "control_refiner_layers_places": [0],
        "control_in_dim": 16,
    },
}
