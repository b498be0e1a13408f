"""What rules can't know: the fields of single model types."""

from __future__ import annotations

from typing import Any

__all__ = ["ARGUMENTS", "CLASSES", "COMPOSED", "override"]


def _text_pair(composed: str) -> Any:
    import transformers as t

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
    text = {**sizes, "intermediate_size": 48, "max_position_embeddings": 64}
    if composed == "encoder-decoder":
        return t.EncoderDecoderConfig.from_encoder_decoder_configs(t.BertConfig(**text), t.BertConfig(**text))
    if composed == "vision-encoder-decoder":
        vision = t.ViTConfig(
            **{k: v for k, v in text.items() if "vocab" not in k and "max" not in k}, image_size=64
        )
        return t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, t.BertConfig(**text))
    if composed == "vision-text-dual-encoder":
        vision = t.ViTConfig(
            **{k: v for k, v in text.items() if "vocab" not in k and "max" not in k}, image_size=64
        )
        return t.VisionTextDualEncoderConfig.from_vision_text_configs(vision, t.BertConfig(**text))
    audio = {k: v for k, v in text.items() if "max" not in k} | {"conv_dim": (32, 32), "conv_stride": (5, 2)}
    speech = t.Wav2Vec2Config(**audio, conv_kernel=(10, 3), num_conv_pos_embeddings=8)
    return t.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(speech, t.BertConfig(**text))


COMPOSED: dict[str, Any] = {
    name: (lambda name=name: _text_pair(name))
    for name in (
        "encoder-decoder",
        "vision-encoder-decoder",
        "vision-text-dual-encoder",
        "speech-encoder-decoder",
    )
}

#: Classes that no Auto class, or only a wrong one, knows the model type for.
CLASSES = {"shieldgemma2": "ShieldGemma2ForImageClassification"}

_RESNET = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 16, 24, 32],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": ["stage2", "stage3", "stage4"],
    },
}

#: Arguments that the default config needs, by model type.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4},
    "conditional_detr": _RESNET,
    "dab-detr": _RESNET,
    "deformable_detr": _RESNET,
    "detr": _RESNET,
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "informer": {"prediction_length": 4},
    "omdet-turbo": _RESNET,
    "table-transformer": _RESNET,
    "time_series_transformer": {"prediction_length": 4},
}

_MAMBA_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_BY_LAYER_TYPE = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
_INDEXER = {
    "indexer_compress_ratio": 4,
    "indexer_budget": 8,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
}
_GEMMA_EXPERTS = {
    "text_config.num_experts": 4,
    "text_config.top_k_experts": 2,
    "text_config.moe_intermediate_size": 24,
}
_HEAD_DIM_8 = {"head_dim": 8}

#: Fields to set after shrinking, by model type; ``a.b`` is a field of a
#: sub-config, ``**.b`` that field wherever it is.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA_HEADS,
    "beit": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "cohere_compass": {"text_config.rope_parameters": _BY_LAYER_TYPE},
    "cohere_compass_text": {"rope_parameters": _BY_LAYER_TYPE},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGAZ": 7}},
    "dbrx": {"attn_config.rope_theta": 10000.0},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma": _GEMMA_EXPERTS,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 24},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6, "<|visual token 000001|>": 7}},
    "ernie4_5_vl_moe": {"text_config.rope_parameters.mrope_section": [1, 1, 2]},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "4/8"},
    "granitemoehybrid": _MAMBA_HEADS,
    "gradium_phonon_tts": {"**.num_key_value_heads": 4},
    "hunyuan_v1_dense": _HEAD_DIM_8,
    "hunyuan_v1_moe": _HEAD_DIM_8,
    "hunyuan_vl": {"text_config.head_dim": 8},
    "hunyuan_vl_text": _HEAD_DIM_8,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "ministral": _HEAD_DIM_8,
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemo_speechlm": {"**.num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "qwen2_5_omni": {"enable_audio_output": False},
    "qwen3_omni_moe": {
        "talker_config.text_config.shared_expert_intermediate_size": 24,
        "talker_config.spatial_merge_size": 2,
    },
    "qwen4_exp": {f"text_config.{name}": value for name, value in _INDEXER.items()},
    "qwen4_exp_text": _INDEXER,
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
}


def override(fields: dict[str, Any], model_type: str) -> None:
    for path, value in _OVERRIDES.get(model_type, {}).items():
        place = fields
        *outer, last = path.split(".")
        if outer == ["**"]:
            _everywhere(fields, last, value)
            continue
        for key in outer:
            place = place[key]
        place[last] = value


def _everywhere(fields: dict[str, Any], name: str, value: Any) -> None:
    if name in fields:
        fields[name] = value
    for inner in fields.values():
        if isinstance(inner, dict):
            _everywhere(inner, name, value)
