"""Every architecture that transformers has, as a model of some thousand parameters: no hub, no network.

A default config is shrunk by rules on the names of its fields, in its sub-configs too, until a model of it is
small; a short table holds what rules can't know. The model's every parameter and persistent buffer gets values
of its own, and ``save_pretrained`` writes it as its checkpoints on the hub are: through the library's reverse
conversions.

    python benchmarks/architectures.py mixtral        # the shrunk config and its size
"""

from __future__ import annotations

import copy
import fnmatch
import math
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw

__all__ = ["Architecture", "Tiny", "architectures", "fill_distinct", "tiny", "write_checkpoint"]

#: Auto mappings, best class first: whole models before their text part, heads before the bare model.
_TASKS = (
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "TEXT_TO_WAVEFORM",
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "TEXT_TO_SPECTROGRAM",
    "CTC",
    "RNNT",
    "TDT",
    "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "IMAGE_SEGMENTATION",
    "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "DEPTH_ESTIMATION",
    "NORMAL_ESTIMATION",
    "POINTMAP_ESTIMATION",
    "POSE_ESTIMATION",
    "MASK_GENERATION",
    "IMAGE_MATTING",
    "IMAGE_TO_IMAGE",
    "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING",
    "RETRIEVAL",
    "TABLE_RECOGNITION",
    "TEXT_RECOGNITION",
    "VIDEO_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "AUDIO_XVECTOR",
    "TIME_SERIES_PREDICTION",
    "QUESTION_ANSWERING",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "DECISION",
    "PRETRAINING",
    "TEXT_ENCODING",
    "IMAGE",
    "BACKBONE",
    "",
)

#: A model of more parameters is not tiny; above this the architecture counts as one that can't be built small.
LIMIT = 6_500_000


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model type, and the class of it that is built."""

    model_type: str
    class_name: str
    saved_as: str = ""
    """The class whose checkpoint it is, if that is another one: a bare model, from that of a model with a head."""

    @property
    def model_class(self) -> Any:
        """The class itself; imports its module."""
        import transformers

        return getattr(transformers, self.class_name)


@dataclass(frozen=True, slots=True)
class Tiny:
    """A config that makes a small model, and that model's size."""

    config: Any
    parameters: int
    way: str
    """Which of the ways to shrink it was."""


def architectures(pattern: str = "*", *, bare: bool = False) -> list[Architecture]:
    """All model types that an Auto class knows, with their best class, and with ``bare`` the one without a head too.

    ``pattern``: of model types or class names, several separated by commas. In the order of the names.
    """
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for task in _TASKS:
        name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        for model_type, classes in getattr(modeling_auto, name, {}).items():
            names = found.setdefault(model_type, [])
            class_name = classes if isinstance(classes, str) else classes[0]
            class_name = _CLASSES.get(model_type, class_name)
            if not names or (bare and not task and class_name not in names):
                names.append(class_name)
    patterns = pattern.split(",")
    return [
        Architecture(model_type, class_name, names[0] if k else "")
        for model_type, names in sorted(found.items())
        for k, class_name in enumerate(names)
        if any(fnmatch.fnmatchcase(n, p) for p in patterns for n in (model_type, class_name))
    ]


# ----------------------------------------------------------------------------------------------------
# Shrinking configs


def tiny(architecture: Architecture) -> Tiny:
    """A small config for it: the first way to shrink that builds a model below the limit.

    Raises the error of the last way that was tried for it, or ValueError if every model is too large.
    """
    model_class = architecture.model_class
    if architecture.model_type in _COMPOSED:
        config = _COMPOSED[architecture.model_type]()
        return Tiny(config, _size(model_class, config), "composed")
    error: Exception | None = None
    for config_class in _config_classes(architecture):
        try:
            return _shrink(architecture, config_class)
        except Exception as problem:  # whatever a config or a constructor raises on sizes that don't fit
            error = error or problem
    assert error is not None
    raise error


def _shrink(architecture: Architecture, config_class: Any) -> Tiny:
    model_class = architecture.model_class
    base = _default(config_class, architecture.model_type)
    error: Exception | None = None
    best: tuple[int, dict[str, Any], str] | None = None
    for way in ("fixed", "scaled 16", "scaled 8", "scaled 4", "scaled 2", "scaled 1"):
        fields = _shrunk(base, way)
        try:
            _override(fields, architecture.model_type)
            config = config_class.from_dict(copy.deepcopy(fields))
            size = _size(model_class, config)
        except Exception as problem:  # as above
            error = problem
            continue
        if best is None or size < best[0]:
            best = size, fields, way
        if size <= LIMIT // 4:
            break
    if best is None:
        assert error is not None
        raise error
    size, fields, way = best
    if size <= LIMIT:
        return Tiny(config_class.from_dict(fields), size, way)
    return _greedy(config_class, model_class, size, fields, way)


def _config_classes(architecture: Architecture) -> list[Any]:
    """The model type's config, and that of the class, which may be for a part of the model only."""
    from transformers import CONFIG_MAPPING

    whole, own = CONFIG_MAPPING[architecture.model_type], architecture.model_class.config_class
    return [whole] if own in (None, whole) else [whole, own]


def _default(config_class: Any, model_type: str) -> dict[str, Any]:
    """The default config as nested plain values, sub-configs included."""
    fields: dict[str, Any] = config_class(**_ARGUMENTS.get(model_type, {})).to_dict()
    for gone in ("transformers_version", "architectures", "dtype", "_name_or_path"):
        fields.pop(gone, None)
    return fields


def _size(model_class: Any, config: Any) -> int:
    """Parameters of the model that a config makes. Allocates buffers only."""
    config = copy.deepcopy(config)
    try:
        with sw.meta_init():
            model = model_class._from_config(config)
    except Exception:
        # Whether the ordinary way builds it: then it is ours to report, when it comes to loading.
        with torch.device("meta"):
            model = model_class(config)
    return sum(p.numel() for p in model.parameters())


def _greedy(config_class: Any, model_class: Any, size: int, fields: dict[str, Any], way: str) -> Tiny:
    """Shrink one number after the other, as long as a model can be built and gets smaller."""
    for divisor in (8, 4, 2):
        for path, value in list(_numbers(fields)):
            if value < 32 or size <= LIMIT:
                continue
            attempt = copy.deepcopy(fields)
            _set(attempt, path, value // divisor)
            try:
                found = _size(model_class, config_class.from_dict(copy.deepcopy(attempt)))
            except Exception:  # as above
                continue
            if found < size:
                size, fields = found, attempt
    if size > LIMIT:
        raise ValueError(f"the smallest model has {size:,} parameters")
    return Tiny(config_class.from_dict(fields), size, f"{way}, then one by one")


Path_ = tuple[Any, ...]


def _numbers(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, int]]:
    items: Any = ()
    if isinstance(value, dict):
        items = ((k, v) for k, v in value.items() if k not in ("id2label", "label2id"))
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield path, value
    for key, inner in items:
        yield from _numbers(inner, (*path, key))


def _set(value: Any, path: Path_, new: int) -> None:
    for key in path[:-1]:
        inner = value[key]
        if isinstance(inner, tuple):
            inner = value[key] = list(inner)
        value = inner
    value[path[-1]] = new


_LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|layers|depth|(.*_)?(encoder|decoder)_layers|(.*_)?num_layers"
    r"|num_(encoder|decoder|hidden|coarse|fine|local|text|temporal|spatial|feature|conv|mamba)_(hidden_)?layers"
    r"|num_.*_layers|.*_num_layers|num_layers_.*|.*_depth|num_blocks|num_hidden_blocks)$"
)
_NOT_LAYERS = re.compile(
    r"feat_extract|kv_shared|nextn|num_mtp|num_lstm|adapter_layers|residual_layers|upsampl|downsampl|max_depth"
    r"|num_dense|iou_head|num_conv_layers|conv_pos"
)
_HEADS = re.compile(
    r"(^|_)(num_)?(attention_|attn_)?(n_)?heads?($|_per)|^n_head|^num_.*_heads$|_n_heads?$|_num_heads$"
)
_KV_HEADS = re.compile(
    r"(key_value|kv|num_key|key).*heads|^n_head_kv|kv_heads|num_key_heads|multi_query_group"
)
_HEAD_DIM = re.compile(r"head_dim|head_size|^d_kv$|^dim_head$|^attention_head_dim$|^kv_channels$")
_INTERMEDIATE = re.compile(
    r"intermediate|ffn_(hidden_size|dim|hidden)|mlp_dim|^d_ff|^d_inner|mlp_hidden|^n_inner|feedforward|dim_ff$"
)
_DIM = re.compile(
    r"hidden_(size|dim|features)|^d_model|^n_embd|embd_dim|embed(ding)?_?(dim|size)|_dim$|^dim$|width|_size$|"
    r"channels?$|_channels_|num_features|_features$|num_filters|^d_|_dims?$|channel_size|out_dimension"
)
_NOT_DIM = re.compile(
    r"vocab|kernel|patch|image_|_image|window|codebook_size|chunk|block_size|group_size|batch|crop|stride|shape|"
    r"tubelet|num_channels|in_chan|audio_channels|position|max_|_bins?$|type_|_rope_|background|input_size|feature_size|"
    r"cache|context|grid|topk|pool|roi_|lookup|downsample_size|sample_size|time_|merge|sequence|num_mel|spatial"
)
_VOCAB = re.compile(r"vocab_size|^vocab|_vocab$|codebook_size|num_embeddings|ngram_vocab|num_codevectors")
_TOKEN = re.compile(r"(_id|_ids|_token|token_index|_tokens?_idx|_index)$")
_EXPERTS = re.compile(r"^(moe_)?(n|num)_(routed_|local_)?experts$|num_experts$|^n_routed|num_local_experts")
_CHOSEN = re.compile(
    r"experts?_per_tok|^top_?k$|moe_top_?k|topk_experts|router_top|_top_k_experts|moe_k$|expert_top_?k"
)
_RANK = re.compile(r"(_|^)rank$|lora_(rank|r|dim)|_lora$|low_rank_dim|_rank_")
_POSITIONS = re.compile(
    r"max_.*position|n_positions|n_ctx|max_sequence_length|max_seq_len|max_pos|context_length|num_position_embeddings|^block_size$|max_relative"
)


def _shrunk(fields: Mapping[str, Any], way: str) -> dict[str, Any]:
    """One config with smaller numbers; its sub-configs are shrunk on their own."""
    fields = dict(fields)
    hierarchical = any(
        isinstance(fields.get(k), (list, tuple)) and fields[k]
        for k in ("depths", "num_heads", "num_attention_heads", "hidden_sizes", "depth", "embed_dim")
    )
    factor = None if way == "fixed" and not hierarchical else 4 if way == "fixed" else int(way.split()[1])
    layers = _cut_layers(fields)
    for name, value in fields.items():
        if isinstance(value, dict):
            if name not in _LEFT and all(isinstance(key, str) for key in value):
                fields[name] = _shrunk(value, way)
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            fields[name] = _number(name, value, factor, layers)
        elif isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            fields[name] = [_listed(name, v, factor) for v in value]
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            fields[name] = [_shrunk(v, way) for v in value]
    size, patch = fields.get("image_size"), fields.get("patch_size")
    if type(size) is int and type(patch) is int:
        fields["image_size"] = min(size, 8 * patch)
    return fields


def _number(name: str, value: int, factor: int | None, layers: bool) -> int:
    """The small value of one field."""
    if value <= 1:
        return value
    if _TOKEN.search(name):
        return value if value < 90 else 40 + zlib.crc32(name.encode()) % 50
    if name == "codebook_size" or name == "num_embeddings":
        return min(value, 64)
    if _VOCAB.search(name):
        return min(value, 101)
    if _LAYERS.search(name) and not _NOT_LAYERS.search(name):
        return value if layers and name in _COUNTS else min(value, 2)
    if name == "first_k_dense_replace":
        return 1
    if name == "num_kv_shared_layers":
        return 0
    if name == "context_size":
        return min(value, 32)
    if _EXPERTS.search(name):
        return min(value, 4)
    if _CHOSEN.search(name):
        return min(value, 2)
    if name in ("n_group", "num_expert_group", "n_expert_groups", "moe_n_group"):
        return 2
    if name in ("topk_group", "num_limited_groups"):
        return 1
    if _POSITIONS.search(name):
        return min(value, 64)
    if _RANK.search(name):
        return min(value, 8)
    if name == "upsample_groups":  # a group for each channel
        return _number("hidden_size", value, factor, layers)
    if factor is not None:
        return _scaled(name, value, factor)
    if _KV_HEADS.search(name):
        return 2
    if _HEADS.search(name):
        return min(value, 4)
    if _HEAD_DIM.search(name):
        return min(value, 8)
    if _INTERMEDIATE.search(name):
        return min(value, 48)
    if _DIM.search(name) and not _NOT_DIM.search(name):
        return min(value, 32)
    return value


def _scaled(name: str, value: int, factor: int) -> int:
    is_dim = _DIM.search(name) or _INTERMEDIATE.search(name) or _HEAD_DIM.search(name)
    if value <= 16 or not is_dim or _NOT_DIM.search(name) or value % factor:
        return value
    return max(value // factor, 4)


def _listed(name: str, value: int, factor: int | None) -> int:
    if _TOKEN.search(name):
        return value if value < 90 else 40 + value % 50
    if name in (
        "depths",
        "layers",
        "num_blocks",
        "stage_num_blocks",
        "blocks_per_stage",
        "num_block_repeats",
    ):
        return min(value, 2)
    if value >= 64 and not _NOT_DIM.search(name):
        divisor = factor or 4
        return value // divisor if value % divisor == 0 else value
    return value


_LEFT = ("id2label", "label2id", "rope_parameters", "rope_scaling", "per_layer_config", "vocabulary_map")

#: Fields that count the layers of a config's own stack, to which its per-layer lists belong.
_COUNTS = (
    "num_hidden_layers",
    "n_layers",
    "n_layer",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "depth",
)


def _cut_layers(fields: dict[str, Any]) -> bool:
    """Keep two layers or, where lists say what each layer is, the first of each kind. Whether there were lists."""
    for count in _COUNTS:
        number = fields.get(count)
        if type(number) is not int or number < 2:
            continue
        lists = {k: list(v) for k, v in fields.items() if isinstance(v, (list, tuple)) and len(v) == number}
        kinds = [tuple(repr(v[i]) for v in lists.values() if _is_kind(v)) for i in range(number)]
        kept = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())[:4]
        if not lists or kinds[0] == ():
            kept = [0, 1]
        elif len(kept) < 2:
            kept = [0, *([1] if number > 1 else [])]
        for name, value in lists.items():
            is_index = all(type(v) is int and v < number for v in value) and len(set(value)) == number
            fields[name] = list(range(len(kept))) if is_index else [value[i] for i in kept]
        for name in ("stage_names", "out_features", "out_indices"):
            fields.pop(name, None)
        if fields.get("per_layer_config"):
            by_layer = {int(k): v for k, v in fields["per_layer_config"].items()}
            fields["per_layer_config"] = {kept.index(i): v for i, v in by_layer.items() if i in kept}
        fields[count] = len(kept)
        for name in _INDEXES:
            indexes = fields.get(name)
            if isinstance(indexes, (list, tuple)):
                fields[name] = sorted({i % len(kept) for i in indexes})
        return bool(lists)
    return False


#: Lists of layers by number.
_INDEXES = (
    "deepstack_visual_indexes",
    "global_attn_indexes",
    "fullatt_block_indexes",
    "window_block_indexes",
    "full_attn_idxs",
    "cross_attention_layers",
    "intermediate_layers_indices",
    "moe_layers",
    "backbone_out_indices",
    "extract_layers",
    "attention_layers_indices",
    "look_ahead_layers",
    "look_backward_layers",
    "global_attention_blocks",
)


def _is_kind(values: list[Any]) -> bool:
    return len({repr(v) for v in values}) <= 6


# ----------------------------------------------------------------------------------------------------
# What rules can't know


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


_COMPOSED: dict[str, Any] = {
    name: (lambda name=name: _text_pair(name))
    for name in (
        "encoder-decoder",
        "vision-encoder-decoder",
        "vision-text-dual-encoder",
        "speech-encoder-decoder",
    )
}

#: Classes that no Auto class, or only a wrong one, knows the model type for.
_CLASSES = {"shieldgemma2": "ShieldGemma2ForImageClassification"}

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
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4},
    "conditional_detr": _RESNET,
    "dab-detr": _RESNET,
    "deformable_detr": _RESNET,
    "detr": _RESNET,
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "informer": {"prediction_length": 4},
    "omdet-turbo": _RESNET,
    "reformer": {"is_decoder": True},
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
    "diffusion_gemma": _GEMMA_EXPERTS,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 24},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6, "<|visual token 000001|>": 7}},
    "ernie4_5_vl_moe": {"text_config.rope_parameters.mrope_section": [1, 1, 2]},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
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


def _override(fields: dict[str, Any], model_type: str) -> None:
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


# ----------------------------------------------------------------------------------------------------
# Values and files


def fill_distinct(model: nn.Module, seed: int) -> None:
    """Random values for every parameter and persistent buffer, so that every wrong map shows."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if id(tensor) in done or tensor.is_meta:
                continue
            done.add(id(tensor))
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator).abs() * 0.1 + 0.01)
            elif tensor.is_complex():
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.complex64))
            elif tensor.dtype == torch.bool:
                tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator).bool())
            else:
                tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator))


def write_checkpoint(
    architecture: Architecture, directory: Path, dtype: torch.dtype = torch.float32
) -> tuple[Any, Tiny]:
    """An ordinary model of it, filled and saved to ``directory`` by the library itself. Returns both."""
    if architecture.saved_as:
        architecture = Architecture(architecture.model_type, architecture.saved_as)
    found = tiny(architecture)
    assert math.isfinite(found.parameters)
    model = architecture.model_class._from_config(copy.deepcopy(found.config), dtype=dtype)
    fill_distinct(model, zlib.crc32(architecture.class_name.encode()))
    model.eval()
    model.save_pretrained(directory)
    return model, found


if __name__ == "__main__":
    for each in architectures(sys.argv[1] if len(sys.argv) > 1 else "*"):
        small = tiny(each)
        print(f"{each.model_type} {each.class_name}: {small.parameters:,} parameters ({small.way})")
        if len(sys.argv) > 1:
            print(small.config)
