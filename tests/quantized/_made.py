"""Quantized directories of tiny models, written by the libraries that define the formats."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shardwise.catalog.open import open_catalog
from shardwise.catalog.records import Coded
from shardwise.quantized.open import dequantized
from shardwise.tensors.boxes import Box, whole
from tests.harness import models
from tests.quantized._fp8_library import fp8_quantize
from tests.quantized._opened import exactly
from tests.quantized._packed import awq_parts, gptq_parts
from tests.quantized.compressed_cases import CASES
from tests.quantized.compressed_models import write

__all__ = [
    "bitsandbytes_directory",
    "boxes_of",
    "decoded",
    "dequantized_twin",
    "fp8_directory",
    "gpt_oss_directory",
    "packed_directory",
    "plain_tensors",
    "quantized_directories",
    "whole",
    "write_quantized",
]


def write_quantized(
    plain: Path, out: Path, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """A directory with these tensors, and the config of ``plain`` with ``quantization_config``."""
    out.mkdir(parents=True)
    for file in plain.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            shutil.copy(file, out)
    config = json.loads((plain / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": dict(settings)}))
    save_file(dict(tensors), out / "model.safetensors", metadata={"format": "pt"})


def plain_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()
    }


def fp8_directory(
    plain: Path, out: Path, block: tuple[int, int] | None = (128, 128), scale_fmt: str | None = None
) -> dict[str, Any]:
    """By transformers' ``Fp8Quantize``; returns the settings."""
    extra = {} if scale_fmt is None else {"scale_fmt": scale_fmt}
    quantize = fp8_quantize(weight_block_size=block, **extra)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in plain_tensors(plain).items():
        kept = not name.endswith("_proj.weight")
        found |= {name: tensor} if kept else quantize(name, tensor)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block, **extra}
    write_quantized(plain, out, settings, found)
    return settings


def packed_directory(plain: Path, out: Path, settings: Mapping[str, Any]) -> None:
    """GPTQ's or AWQ's, by what their libraries publish."""
    pack = awq_parts if settings["quant_method"] == "awq" else gptq_parts
    found: dict[str, torch.Tensor] = {}
    for name, tensor in plain_tensors(plain).items():
        if name.endswith("_proj.weight"):
            parts = pack(tensor.float() * 20, dict(settings))[0]
            found |= {
                f"{name.removesuffix('weight')}{last}": part.contiguous() for last, part in parts.items()
            }
        else:
            found[name] = tensor
    write_quantized(plain, out, settings, found)


def bitsandbytes_directory(plain: Path, out: Path, **options: Any) -> None:
    """By transformers and bitsandbytes."""
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(
        plain,
        quantization_config=transformers.BitsAndBytesConfig(**options),
        dtype=torch.bfloat16,
        device_map="cpu",
    ).save_pretrained(out)


def gpt_oss_directory(out: Path, experts: int = 3) -> None:
    """A tiny gpt-oss, whose experts are random codes: any byte is two of them."""
    import transformers

    config = transformers.GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        vocab_size=101,
        hidden_size=64,
        intermediate_size=32,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["full_attention", "sliding_attention"],
    )
    plain = out.parent / f"{out.name} before"
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(plain)
    found = plain_tensors(plain)
    for name in list(found):
        if name.endswith(("gate_up_proj", "down_proj")):
            count, columns, rows = found.pop(name).shape
            shape = (count, rows, columns // 32)
            found[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            found[f"{name}_scales"] = torch.randint(110, 130, shape, dtype=torch.uint8)
    write_quantized(plain, out, {"quant_method": "mxfp4"}, found)


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
_COMPRESSED = ("fp8-blocks", "int8-channel", "w4-group-zeros", "w8-channel-zeros", "nvfp4", "mxfp4")


def quantized_directories(root: Path) -> list[Path]:
    """One of each format, by the libraries that define them."""
    import transformers

    torch.manual_seed(0)
    for kind in ("qwen3", "qwen3-moe", "qwen3-tied"):
        models.write_hub_directory(kind, root / kind, torch.bfloat16)
        fp8_directory(root / kind, root / "fp8" / kind, (4, 8))
    found = list((root / "fp8").iterdir())
    config = transformers.LlamaConfig(
        vocab_size=72,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "llama")
    for name, settings in (
        ("gptq", _GPTQ),
        ("gptq by activation", {**_GPTQ, "desc_act": True}),
        ("awq", _AWQ),
    ):
        packed_directory(root / "llama", root / name, settings)
    bitsandbytes_directory(root / "llama", root / "nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    nested = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}
    bitsandbytes_directory(root / "llama", root / "nested fp4", load_in_4bit=True, **nested)
    bitsandbytes_directory(root / "llama", root / "int8", load_in_8bit=True)
    gpt_oss_directory(root / "gpt-oss")
    for name in _COMPRESSED:
        write(root / name, CASES[name][0], torch.bfloat16)
    more = ("gptq", "gptq by activation", "awq", "nf4", "nested fp4", "int8", "gpt-oss", *_COMPRESSED)
    return found + [root / name for name in more]


def dequantized_twin(quantized: Path, out: Path) -> None:
    """A plain directory with the same tensors, decoded whole. Tests of each format hold that to its library's own results."""
    stored = plain_tensors(quantized)
    found = dequantized(open_catalog(quantized))
    assert found.coded
    plain = {
        name: stored[name] for name in found.tensors if found.tensors[name].chunks[0].path not in found.coded
    }
    plain |= {
        one.tensor.name: decoded(one, stored, whole(one.tensor.shape)).float() for one in found.coded.values()
    }
    write_quantized(quantized, out, {}, plain)
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))


def boxes_of(shape: tuple[int, ...], count: int, seed: int = 0) -> Iterator[Box]:
    """The whole, single rows and columns, and random boxes."""
    chance = random.Random(seed)
    yield whole(shape)
    for d, n in enumerate(shape):
        for k in {0, n // 2, n - 1}:
            yield Box(
                tuple(k if e == d else 0 for e in range(len(shape))),
                tuple(k + 1 if e == d else m for e, m in enumerate(shape)),
            )
    for _ in range(count):
        start = tuple(chance.randrange(n) for n in shape)
        yield Box(start, tuple(chance.randint(a, n) for a, n in zip(start, shape, strict=True)))


def decoded(one: Coded, stored: Mapping[str, torch.Tensor], box: Box) -> torch.Tensor:
    """A box, decoded from the boxes of its parts alone."""
    parts = {
        role: stored[one.parts[role].name].reshape(one.parts[role].shape)[part.slices].clone()
        for role, part in one.rule.boxes(box).items()
    }
    return exactly(one, one.rule.decode(box, parts))
