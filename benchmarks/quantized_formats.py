"""Directories of matrices in each quantized format, with random codes: what ``benchmarks/quantized.py`` loads.

Layouts, names and dtypes are those that each format's library writes; ``tests/quantized`` holds that loads are right. Here only
the time counts, so any codes will do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["FORMATS", "write"]

_GROUP = 128
_BLOCK = 128
#: The 16 numbers of NF4: any table takes as long.
_TABLE = torch.linspace(-1, 1, 16)

Parts = dict[str, torch.Tensor]


def write(directory: str, kind: str, count: int, rows: int, columns: int) -> None:
    """``layers.K.weight`` in the format ``kind`` of :data:`FORMATS`, or in fp32 for ``cast``."""
    Path(directory).mkdir(parents=True)
    settings, parts_of = FORMATS.get(kind, (None, _plain))
    tensors = {
        f"layers.{k}.{last}": part for k in range(count) for last, part in parts_of(rows, columns).items()
    }
    config = {} if settings is None else {"quantization_config": dict(settings)}
    Path(directory, "config.json").write_text(json.dumps(config))
    save_file(tensors, f"{directory}/model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    Path(directory, "model.safetensors.index.json").write_text(json.dumps(index))


def _plain(rows: int, columns: int) -> Parts:
    return {"weight": torch.randn(rows, columns)}


def _fp8(rows: int, columns: int) -> Parts:
    return {
        "weight": torch.randn(rows, columns).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.rand(-(-rows // _BLOCK), -(-columns // _BLOCK)) + 0.5,
    }


def _int8(rows: int, columns: int) -> Parts:
    return {
        "weight": torch.randint(-128, 128, (rows, columns), dtype=torch.int8),
        "weight_scale": (torch.rand(rows, 1) + 0.5).bfloat16(),
    }


def _int4(rows: int, columns: int) -> Parts:
    return {
        "weight_packed": _words(rows, columns // 8),
        "weight_scale": (torch.rand(rows, columns // _GROUP) + 0.5).bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _nvfp4(rows: int, columns: int) -> Parts:
    return {
        "weight_packed": _bytes(rows, columns // 2),
        "weight_scale": (torch.rand(rows, columns // 16) + 0.5).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([2.0]),
    }


def _mxfp4(rows: int, columns: int) -> Parts:
    return {
        "weight_packed": _bytes(rows, columns // 2),
        "weight_scale": torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8),
    }


def _gpt_oss(rows: int, columns: int) -> Parts:
    """Experts are stored transposed: here one, of ``rows`` inputs and ``columns`` outputs."""
    return {
        "weight_blocks": _bytes(1, columns, rows // 32, 16),
        "weight_scales": torch.randint(110, 130, (1, columns, rows // 32), dtype=torch.uint8),
    }


def _gptq(rows: int, columns: int) -> Parts:
    return {
        "qweight": _words(columns // 8, rows),
        "qzeros": _words(columns // _GROUP, rows // 8),
        "scales": (torch.rand(columns // _GROUP, rows) + 0.5).half(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // _GROUP,
    }


def _awq(rows: int, columns: int) -> Parts:
    return {
        "qweight": _words(columns, rows // 8),
        "qzeros": _words(columns // _GROUP, rows // 8),
        "scales": (torch.rand(columns // _GROUP, rows) + 0.5).half(),
    }


def _nf4(rows: int, columns: int) -> Parts:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    return {
        "weight": _bytes(rows * columns // 2, 1),
        "weight.absmax": torch.rand(rows * columns // 64) + 0.5,
        "weight.quant_map": _TABLE.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            [*json.dumps(state).encode()], dtype=torch.uint8
        ),
    }


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def _compressed(kind: str, **weights: Any) -> Mapping[str, Any]:
    weights = {"symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"g": group}, "ignore": []}


_PACKED = {"bits": 4, "group_size": _GROUP}
#: By name: ``quantization_config``, and the parts of one matrix by the last part of their names.
FORMATS: dict[str, tuple[Mapping[str, Any], Callable[[int, int], Parts]]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}, _fp8),
    "int8": (_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), _int8),
    "int4": (
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=_GROUP),
        _int4,
    ),
    "nvfp4": (
        _compressed(
            "nvfp4-pack-quantized",
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
            scale_dtype="torch.float8_e4m3fn",
        ),
        _nvfp4,
    ),
    "mxfp4": (
        _compressed(
            "mxfp4-pack-quantized",
            num_bits=4,
            type="float",
            strategy="group",
            group_size=32,
            scale_dtype="torch.uint8",
        ),
        _mxfp4,
    ),
    "gpt-oss": ({"quant_method": "mxfp4"}, _gpt_oss),
    "gptq": ({"quant_method": "gptq", "desc_act": False, "sym": False, **_PACKED}, _gptq),
    "awq": ({"quant_method": "awq", "version": "gemm", "zero_point": True, **_PACKED}, _awq),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        _nf4,
    ),
}
