"""The models that are loaded: bf16, random content, in files as the hub stores them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw

__all__ = ["MODELS", "Part", "model_on_meta", "stored_parts", "write_model"]


@dataclass(frozen=True)
class Kind:
    """How a model is built; ``short`` replaces values of ``full`` in the short form."""

    config: str | None
    """Class of transformers' config; None for :class:`Linear`."""
    full: dict[str, Any]
    short: dict[str, Any]
    files: int = 1


_DENSE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 65536,
    "tie_word_embeddings": False,
}
_TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}

MODELS = {
    # 0.94 B parameters, 1.75 GiB
    "dense": Kind("Qwen3Config", _DENSE, _TINY),
    # 0.69 B parameters in 1,209 stored tensors: three for each of 64 experts in each of 6 layers
    "moe": Kind(
        "Qwen3MoeConfig",
        {
            **_DENSE,
            "moe_intermediate_size": 512,
            "num_hidden_layers": 6,
            "vocab_size": 32768,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        {**_TINY, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    # the head is the embedding: one stored tensor, two names; 0.4 B parameters
    "tied": Kind(
        "Qwen3Config",
        {**_DENSE, "num_hidden_layers": 16, "vocab_size": 131072, "tie_word_embeddings": True},
        _TINY,
    ),
    # one tensor of 600 MiB, 0.33 B parameters in all: memory must not grow with the largest tensor
    "wide": Kind(
        "Qwen3Config",
        {**_DENSE, "num_hidden_layers": 1, "vocab_size": 307200, "tie_word_embeddings": True},
        _TINY,
    ),
    # 0.84 B parameters, for machines without transformers
    "linear": Kind(None, {"width": 4096, "layers": 50}, {"width": 256, "layers": 2}),
    # 3,006 tensors of 105 KiB on average, 308 MiB, in 20 files
    "small": Kind(
        "Qwen3Config",
        {
            **_DENSE,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 273,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1024,
        },
        {**_TINY, "num_hidden_layers": 3},
        files=20,
    ),
}


def write_model(name: str, directory: str, *, short: bool) -> None:
    """Write config and safetensors files. Holds the whole model in memory."""
    kind, place = MODELS[name], Path(directory)
    place.mkdir(parents=True)
    sizes = {**kind.full, **(kind.short if short else {})}
    if kind.config is None:
        (place / "linear.json").write_text(json.dumps(sizes))
        model = model_on_meta(directory)
    else:
        import transformers

        config = getattr(transformers, kind.config)(**sizes, dtype="bfloat16")
        config.save_pretrained(place)
        model = model_on_meta(directory)
        config.architectures = [type(model).__name__]
        config.save_pretrained(place)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        part.stored: _random(part.shape, generator)
        for parameter, tensor in model.named_parameters()
        for part in stored_parts(parameter, tuple(tensor.shape))
    }
    _save(tensors, place, kind.files)


def model_on_meta(directory: str) -> nn.Module:
    """The model that :func:`write_model` wrote there, in bf16, without memory."""
    linear = Path(directory) / "linear.json"
    with sw.meta_init():
        if linear.exists():
            return Linear(**json.loads(linear.read_text()))
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(directory)
        found: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return found


class Linear(nn.Module):
    """A stack of matrices, under names as transformers' models have them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.model = nn.Module()
        options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
        self.model.layers = nn.ModuleList(nn.Linear(width, width, **options) for _ in range(layers))


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    count = torch.Size(shape).numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(generator=generator)
    return words.view(torch.bfloat16)[:count].reshape(shape)


def _save(tensors: dict[str, torch.Tensor], place: Path, files: int) -> None:
    if files == 1:
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = list(tensors), {}
    for k in range(files):
        file = f"model-{k + 1:05}-of-{files:05}.safetensors"
        some = names[len(names) * k // files : len(names) * (k + 1) // files]
        save_file({name: tensors[name] for name in some}, place / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": weight_map,
    }
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


@dataclass(frozen=True)
class Part:
    """A stored tensor of a parameter; ``row`` is its index along dim 0 of stacked experts, else None."""

    stored: str
    shape: tuple[int, ...]
    row: int | None = None


def stored_parts(parameter: str, shape: tuple[int, ...]) -> list[Part]:
    """The stored tensors that make up a parameter, in the order of the parameter's bytes.

    transformers stacks the experts, with ``gate_proj`` above ``up_proj``; the hub stores each of them by itself.
    """
    path, _, last = parameter.rpartition(".")
    if not path.endswith(".experts"):
        return [Part(parameter, shape)]
    experts, rows, columns = shape
    projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
    return [
        Part(f"{path}.{k}.{projection}.weight", (rows // len(projections), columns), k)
        for k in range(experts)
        for projection in projections
    ]
