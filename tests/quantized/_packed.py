"""Weights packed as GPTQ and AWQ pack them, and what their libraries make of them."""

from __future__ import annotations

from typing import Any

import torch

from tests.quantized import _reference_awq, _reference_gptq
from tests.quantized._boxes import State

__all__ = ["awq_parts", "gptq_parts"]


def _groups(
    weight: torch.Tensor, g_idx: torch.Tensor, bits: int, sym: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points of a weight [out, in], each [out, groups], as quantizers choose them."""
    scales, zeros = [], []
    for group in range(int(g_idx.max()) + 1):
        found = weight[:, g_idx == group]
        low, high = found.amin(1).clamp(max=0), found.amax(1).clamp(min=0)
        if sym:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / (2**bits - 1)).clamp(min=1e-6)
        scales.append(scale)
        zeros.append(torch.full_like(scale, 2 ** (bits - 1)) if sym else torch.round(-low / scale))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def gptq_parts(weight: torch.Tensor, settings: dict[str, Any]) -> tuple[State, torch.Tensor]:
    """The stored tensors, and what the library makes of them."""
    size = settings["group_size"] if settings["group_size"] > 0 else weight.shape[1]
    g_idx = torch.arange(weight.shape[1], dtype=torch.int32) // size
    if settings["desc_act"]:
        g_idx = g_idx[torch.randperm(len(g_idx))]
    scales, zeros = _groups(weight, g_idx, settings["bits"], settings["sym"])
    module = _reference_gptq.pack_original(weight, scales, zeros, g_idx, settings["bits"])
    if settings.get("checkpoint_format") != "gptq_v2":
        _reference_gptq.convert_gptq_v2_to_v1_format_module(module)
    parts = {
        "qweight": module.qweight,
        "qzeros": module.qzeros,
        "scales": module.scales,
        "g_idx": module.g_idx,
    }
    kept = {name: tensor.clone() for name, tensor in parts.items()}
    if settings.get("checkpoint_format") != "gptq_v2":
        _reference_gptq.convert_gptq_v1_to_v2_format_module(module)
    return kept, _reference_gptq.dequantize_weight(module).t()


def awq_parts(weight: torch.Tensor, settings: dict[str, Any]) -> tuple[State, torch.Tensor]:
    size = settings["group_size"] if settings["group_size"] > 0 else weight.shape[1]
    g_idx = torch.arange(weight.shape[1]) // size
    scales, zeros = _groups(weight, g_idx, 4, sym=False)
    packed = _reference_awq.from_linear(weight, size, scales.t(), zeros.t())
    whole_tensor = _reference_awq.dequantize_gemm(*packed, 4, size).t()
    return dict(zip(("qweight", "qzeros", "scales"), packed, strict=True)), whole_tensor
