"""Rules that make the numbers of a config small, by the names of its fields."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["numbers", "set_number", "shrunk"]

Path_ = tuple[Any, ...]


def numbers(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, int]]:
    items: Any = ()
    if isinstance(value, dict):
        items = ((k, v) for k, v in value.items() if k not in ("id2label", "label2id"))
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield path, value
    for key, inner in items:
        yield from numbers(inner, (*path, key))


def set_number(value: Any, path: Path_, new: int) -> None:
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


def shrunk(fields: Mapping[str, Any], way: str) -> dict[str, Any]:
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
                fields[name] = shrunk(value, way)
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            fields[name] = _number(name, value, factor, layers)
        elif isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            fields[name] = [_listed(name, v, factor) for v in value]
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
            fields[name] = [shrunk(v, way) for v in value]
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
