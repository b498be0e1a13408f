"""Quantised directories of tiny models, written by the libraries that define the formats."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shardwise.catalog.records import Coded
from shardwise.layout.boxes import Box, whole

__all__ = ["boxes_of", "decoded", "fp8_directory", "write_quantized"]


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
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    extra = {} if scale_fmt is None else {"scale_fmt": scale_fmt}
    config = FineGrainedFP8Config(weight_block_size=block, **extra)
    quantize = Fp8Quantize(FineGrainedFP8HfQuantizer(config))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in plain_tensors(plain).items():
        kept = not name.endswith("_proj.weight")
        found |= {name: tensor} if kept else quantize.convert({name: tensor})
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block, **extra}
    write_quantized(plain, out, settings, found)
    return settings


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
    return one.rule.decode(box, parts)
