"""Settings of compressed-tensors, and the checkpoints that it writes with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.catalog.quantized import Source
from tests.quantized.boxes import source_of, stored_in
from tests.quantized.compressed_models import write

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def ints(
    bits: int, strategy: str = "channel", size: int | None = None, symmetric: bool = True
) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": size, "symmetric": symmetric}


def floats(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **more}


def group(
    weights: dict[str, Any], inputs: dict[str, Any] | None = None, targets: tuple[str, ...] = ("Linear",)
) -> Any:
    return {"targets": list(targets), "weights": weights, "input_activations": inputs}


INT8_INPUT = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8_INPUT = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
NVFP4 = floats(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
NVFP4_INPUT = NVFP4 | {"dynamic": "local"}
MXFP4 = floats(4, "group", group_size=32, scale_dtype="torch.uint8")
MXFP8 = floats(8, "group", group_size=32, scale_dtype="torch.uint8")

#: By name: groups, the model's dtype, the format that the library chooses.
CASES: dict[str, tuple[Any, torch.dtype, str]] = {
    "fp8-tensor": ({"g": group(floats(8, "tensor"), FP8_INPUT)}, BF16, "float-quantized"),
    "fp8-channel": ({"g": group(floats(8, "channel"), FP8_INPUT)}, F16, "float-quantized"),
    "fp8-group": ({"g": group(floats(8, "group", group_size=32), FP8_INPUT)}, F32, "float-quantized"),
    "fp8-blocks": (
        {"g": group(floats(8, "block", block_structure=[64, 32]), FP8_INPUT)},
        BF16,
        "float-quantized",
    ),
    "fp8-weights-only": ({"g": group(floats(8, "channel"))}, BF16, "naive-quantized"),
    "int8-channel": ({"g": group(ints(8), INT8_INPUT)}, BF16, "int-quantized"),
    "int8-tensor-zeros": ({"g": group(ints(8, "tensor", symmetric=False), INT8_INPUT)}, F16, "int-quantized"),
    "int8-group-zeros": ({"g": group(ints(8, "group", 32, False), INT8_INPUT)}, BF16, "int-quantized"),
    "w4-group": ({"g": group(ints(4, "group", 32))}, BF16, "pack-quantized"),
    "w4-group-f32": ({"g": group(ints(4, "group", 16))}, F32, "pack-quantized"),
    "w4-group-zeros": ({"g": group(ints(4, "group", 32, False))}, BF16, "pack-quantized"),
    "w4-channel": ({"g": group(ints(4))}, F16, "pack-quantized"),
    "w4-channel-zeros": ({"g": group(ints(4, symmetric=False))}, BF16, "pack-quantized"),
    "w4-tensor-zeros": ({"g": group(ints(4, "tensor", symmetric=False))}, BF16, "pack-quantized"),
    "w8-channel-zeros": ({"g": group(ints(8, symmetric=False))}, BF16, "pack-quantized"),
    **{
        f"w{n}-group-zeros": ({"g": group(ints(n, "group", 32, False))}, BF16, "pack-quantized")
        for n in (1, 2, 3, 5)
    },
    **{f"w{n}-channel": ({"g": group(ints(n))}, F16, "pack-quantized") for n in (2, 6, 7)},
    "nvfp4": ({"g": group(NVFP4, NVFP4_INPUT)}, BF16, "nvfp4-pack-quantized"),
    "mxfp4": ({"g": group(MXFP4)}, BF16, "mxfp4-pack-quantized"),
    "mxfp8": ({"g": group(MXFP8)}, BF16, "mxfp8-quantized"),
    "mixed": (
        {
            "a": group(NVFP4, None, ("re:.*self_attn.*",)),
            "b": group(ints(4, "group", 32), None, ("re:.*mlp.*",)),
        },
        BF16,
        "mixed-precision",
    ),
    "embedding": ({"g": group(ints(8, "channel"), None, ("Embedding",))}, BF16, "pack-quantized"),
}


@dataclass(frozen=True)
class Checkpoint:
    root: Path
    settings: dict[str, Any]
    source: Source
    stored: dict[str, torch.Tensor]


def checkpoint(root: Path, case: str) -> Checkpoint:
    """A case's checkpoint. Per channel or tensor, a number of columns that fills no word."""
    groups, dtype, _ = CASES[case]
    settings = write(root, groups, dtype, inner=150 if "channel" in case or "tensor" in case else 160)
    return Checkpoint(root, settings, source_of(root, settings), stored_in(root))
