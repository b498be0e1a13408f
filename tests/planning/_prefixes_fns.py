"""What the ranks run in the tests of names that differ by a prefix, or by the part of a model that is wanted."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.errors import PlanError
from tests.harness.models import fill_with_noise
from tests.loading._load_fns import bits, mesh_of, whole

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BODY = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_IDS, **_BODY, "vocab_size": 101, "num_key_value_heads": 2}
_TEXT_6 = {**_TEXT, "head_dim": 6}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_VISION = {**_BODY, "image_size": 12, "patch_size": 4}
_TOWER = {"depth": 1, "hidden_size": 24, "intermediate_size": 40, "num_heads": 4, "patch_size": 4}
_TOWER_OUT = {**_TOWER, "out_hidden_size": 24, "num_position_embeddings": 9}


def config_of(kind: str) -> Any:
    """A config with sizes that two ranks do not divide everywhere."""
    import transformers as t

    makers: dict[str, Callable[[], Any]] = {
        "qwen3": lambda: t.Qwen3Config(**_TEXT_6, tie_word_embeddings=False),
        "qwen3-tied": lambda: t.Qwen3Config(**_TEXT_6, tie_word_embeddings=True),
        "qwen2": lambda: t.Qwen2Config(**_TEXT, tie_word_embeddings=False),
        "moe": lambda: t.Qwen3MoeConfig(**_TEXT_6, **_EXPERTS),
        "bert": lambda: t.BertConfig(**_BODY, vocab_size=101, max_position_embeddings=33, pad_token_id=0),
        "gpt2": lambda: t.GPT2Config(
            n_embd=24, n_layer=2, n_head=4, vocab_size=101, n_positions=33, bos_token_id=1, eos_token_id=2
        ),
        "wav2vec2": lambda: t.Wav2Vec2Config(
            **_BODY,
            vocab_size=32,
            conv_dim=(8, 8),
            conv_stride=(2, 2),
            conv_kernel=(3, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        ),
        "llava": lambda: t.LlavaConfig(
            vision_config=t.CLIPVisionConfig(**_VISION),
            text_config=t.LlamaConfig(**_TEXT),
            image_token_index=100,
        ),
        "gemma3-text": lambda: t.Gemma3TextConfig(**_TEXT_6, sliding_window=8),
        "gemma3": lambda: t.Gemma3Config(
            vision_config=_VISION,
            text_config={**_TEXT_6, "sliding_window": 8},
            mm_tokens_per_image=1,
            image_token_index=100,
        ),
        "qwen3.5": lambda: t.Qwen3_5Config(
            text_config={
                **_TEXT_6,
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 6,
                "linear_value_head_dim": 6,
                "layer_types": ["linear_attention", "full_attention"],
            },
            vision_config=_TOWER_OUT,
        ),
        "qwen3-vl-moe": lambda: t.Qwen3VLMoeConfig(
            text_config={**_TEXT_6, **_EXPERTS}, vision_config={**_TOWER_OUT, "deepstack_visual_indexes": [0]}
        ),
        "qwen2-vl": lambda: t.Qwen2VLConfig(text_config=_TEXT, vision_config={**_TOWER, "embed_dim": 24}),
    }
    return makers[kind]()


@dataclass(frozen=True)
class Source:
    """A directory: the class that wrote it, its config, and what was done to the names afterwards, regex by regex."""

    model_class: str
    config: str
    renamed: Mapping[str, str] = field(default_factory=dict)


SOURCES = {
    "qwen3": Source("Qwen3ForCausalLM", "qwen3"),
    "qwen3-base": Source("Qwen3Model", "qwen3"),
    "qwen3-tied-base": Source("Qwen3Model", "qwen3-tied"),
    "qwen2": Source("Qwen2ForCausalLM", "qwen2"),
    "moe": Source("Qwen3MoeForCausalLM", "moe"),
    "moe-base": Source("Qwen3MoeModel", "moe"),
    "moe-wrapped": Source("Qwen3MoeForCausalLM", "moe", {"^": "net."}),
    "bert-base": Source("BertModel", "bert"),
    "bert-masked": Source("BertForMaskedLM", "bert"),
    "bert-legacy": Source(
        "BertModel", "bert", {r"LayerNorm\.weight": "LayerNorm.gamma", r"LayerNorm\.bias": "LayerNorm.beta"}
    ),
    "gpt2": Source("GPT2LMHeadModel", "gpt2"),
    "gpt2-base": Source("GPT2Model", "gpt2"),
    "wav2vec2-legacy": Source(
        "Wav2Vec2Model",
        "wav2vec2",
        {
            r"parametrizations\.weight\.original0": "weight_g",
            r"parametrizations\.weight\.original1": "weight_v",
        },
    ),
    # save_pretrained writes language_model.model.*, vision_tower.*: the names of transformers 4.
    "llava": Source("LlavaForConditionalGeneration", "llava"),
    "llava-new": Source(
        "LlavaForConditionalGeneration",
        "llava",
        {
            r"^(vision_tower|multi_modal)": r"model.\1",
            r"^language_model\.model\.": "model.language_model.",
            r"^language_model\.lm_head": "lm_head",
        },
    ),
    "gemma3-text": Source("Gemma3ForCausalLM", "gemma3-text"),
    "gemma3": Source("Gemma3ForConditionalGeneration", "gemma3"),
    # As transformers 5.10 to 5.22 saved it.
    "gemma3-doubled": Source(
        "Gemma3ForConditionalGeneration", "gemma3", {r"^language_model\.model": "language_model.model.model"}
    ),
    "qwen3.5": Source("Qwen3_5ForConditionalGeneration", "qwen3.5"),
    "qwen3-vl-moe": Source("Qwen3VLMoeForConditionalGeneration", "qwen3-vl-moe"),
    "qwen2-vl": Source("Qwen2VLForConditionalGeneration", "qwen2-vl"),
}


def write_source(name: str, directory: Path) -> list[str]:
    """The stored names."""
    import transformers

    source = SOURCES[name]
    torch.manual_seed(len(name))
    model = getattr(transformers, source.model_class)._from_config(
        config_of(source.config), dtype=torch.float32
    )
    fill_with_noise(model)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    state = load_file(file)
    for pattern, replacement in source.renamed.items():
        state = {re.sub(pattern, replacement, n): t for n, t in state.items()}
    save_file(state, file, metadata={"format": "pt"})
    return list(state)


@dataclass(frozen=True)
class Reader:
    """How a source is read: the class, what from_pretrained takes too, and what must be declared."""

    model_class: str
    config: str | None = None
    key_mapping: Mapping[str, str] | None = None
    allow_unused: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What happened; what from_pretrained left random or dropped, and what ours said of it."""

    random: int
    dropped: int
    problems: tuple[str, ...]
    loaded: bool = False
    """In the end, with what the reader declares."""
    unused: tuple[str, ...] = ()
    initialized: tuple[str, ...] = ()


def read(directory: str, reader: Reader) -> Outcome:
    """Undeclared: loads, or says what is wrong; declared: bitwise what from_pretrained gives where that loads."""
    options = {"key_mapping": reader.key_mapping}
    if reader.config is not None:
        options["config"] = config_of(reader.config)
    ordinary, info = _auto_class(reader).from_pretrained(directory, output_loading_info=True, **options)
    random, dropped = info["missing_keys"], info["unexpected_keys"]
    assert not info["mismatched_keys"]
    problems: tuple[str, ...] = ()
    try:
        model, report = _load(directory, reader, **options)
    except PlanError as error:
        problems = error.problems
        declared = {"allow_unused": reader.allow_unused, "allow_missing": reader.allow_missing}
        try:
            model, report = _load(directory, reader, **options, **declared)
        except PlanError as still:
            return Outcome(len(random), len(dropped), still.problems)
    _assert_same_but(model, ordinary, random)
    assert len(model._weight_conversions) == len(ordinary._weight_conversions)
    initialized = {name for d in report.initialized for name in _aliases(model, d.name)}
    assert initialized == set(random) | (initialized & ordinary.all_tied_weights_keys.keys())
    return Outcome(
        len(random),
        len(dropped),
        problems,
        True,
        tuple(d.name for d in report.unused),
        tuple(d.name for d in report.initialized),
    )


def hinted(directory: str, reader: Reader) -> tuple[dict[str, str], Outcome]:
    """The key_mapping that the error proposes, and what comes of it."""
    (line,) = [p for p in read(directory, reader).problems if p.startswith("prefix: ")]
    found = re.search(r"key_mapping=(\{.*\})$", line)
    assert found, line
    mapping = ast.literal_eval(found[1])
    better = Reader(reader.model_class, reader.config, mapping, reader.allow_unused, reader.allow_missing)
    return mapping, read(directory, better)


def _auto_class(reader: Reader) -> Any:
    import transformers

    return getattr(transformers, reader.model_class)


def _load(directory: str, reader: Reader, **options: Any) -> tuple[Any, Any]:
    mesh = mesh_of((dist.get_world_size(),))
    return sw.load_pretrained(directory, mesh, auto_class=_auto_class(reader), return_report=True, **options)


def _assert_same_but(model: Any, ordinary: nn.Module, random: set[str]) -> None:
    assert type(ordinary) in type(model).__mro__
    found, expected = model.state_dict(keep_vars=True), ordinary.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        mine = whole(found[name])
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape), name
        assert name in random or torch.equal(bits(mine), bits(tensor)), name


def _aliases(model: nn.Module, name: str) -> list[str]:
    state = model.state_dict(keep_vars=True)
    return [n for n, t in state.items() if t is state[name]]
