"""GPTQ's packing and dequantization, as GPTQModel has them, which this repository can't import without its extensions.

Transcribed from GPTQModel 7.7.0 (https://github.com/ModelCloud/GPTQModel, Apache-2.0, Copyright 2024-2025 ModelCloud.ai):
``pack_original`` and ``dequantize_weight`` of gptqmodel/nn_modules/qlinear/__init__.py, for 2, 4 and 8 bits in words of 32, and
``convert_gptq_v2_to_v1_format_module`` and ``convert_gptq_v1_to_v2_format_module`` of gptqmodel/utils/model.py. Names and order
of operations are theirs; methods became functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

_ONES = {
    2: 0b01010101010101010101010101010101,
    4: 0b00010001000100010001000100010001,
    8: 0b00000001000000010000000100000001,
}


@dataclass
class Module:
    bits: int
    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor


def pack_original(
    W: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, g_idx: torch.Tensor, bits: int
) -> Module:
    """``W``: [out, in]; ``scales`` and ``zeros``: [out, groups]."""
    pack_factor, maxq = 32 // bits, 2**bits - 1
    scales = scales.T.contiguous()
    zeros = zeros.T.contiguous()
    scale_zeros = zeros * scales
    int_weight = torch.round((W + scale_zeros[g_idx].T) / scales[g_idx].T)
    int_weight.clamp_(0, maxq)
    int_weight = int_weight.to(torch.int32).T.contiguous()
    ints = int_weight.numpy().astype(np.uint32)
    qweight = np.zeros((math.ceil(ints.shape[0] * bits / 32), ints.shape[1]), dtype=np.uint32)
    for row in range(qweight.shape[0]):
        for j in range(min(pack_factor, ints.shape[0] - row * pack_factor)):
            qweight[row] |= ints[row * pack_factor + j] << (bits * j)
    numbers = zeros.numpy().astype(np.uint32)
    qzeros = np.zeros((numbers.shape[0], math.ceil(numbers.shape[1] * bits / 32)), dtype=np.uint32)
    for col in range(qzeros.shape[1]):
        for j in range(min(pack_factor, numbers.shape[1] - col * pack_factor)):
            qzeros[:, col] |= numbers[:, col * pack_factor + j] << (bits * j)
    return Module(
        bits,
        torch.from_numpy(qweight.astype(np.int32)),
        torch.from_numpy(qzeros.astype(np.int32)),
        scales.to(torch.float16),
        g_idx,
    )


def convert_gptq_v2_to_v1_format_module(module: Module) -> None:
    module.qzeros.data -= _ONES[module.bits]


def convert_gptq_v1_to_v2_format_module(module: Module) -> None:
    module.qzeros.data += _ONES[module.bits]


def dequantize_weight(module: Module) -> torch.Tensor:
    """[in, out], of a module whose zero points are in the second format."""
    bits = module.bits
    dequant_dtype = torch.int16 if bits == 8 else torch.int8
    pack_factor, maxq = 32 // bits, 2**bits - 1
    wf = torch.tensor(list(range(0, 32, bits)), dtype=torch.int32).unsqueeze(0)
    zeros = torch.bitwise_right_shift(
        torch.unsqueeze(module.qzeros, 2).expand(-1, -1, pack_factor), wf.unsqueeze(0)
    ).to(dequant_dtype)
    zeros = torch.bitwise_and(zeros, maxq).reshape(module.qzeros.shape[0], -1)
    zeros = zeros[:, : module.scales.shape[1]]
    weight = torch.bitwise_and(
        torch.bitwise_right_shift(
            torch.unsqueeze(module.qweight, 1).expand(-1, pack_factor, -1), wf.unsqueeze(-1)
        ).to(dequant_dtype),
        maxq,
    )
    weight = weight.reshape(weight.shape[0] * weight.shape[1], weight.shape[2])
    in_features = module.g_idx.shape[0]
    if weight.shape[0] > in_features:
        weight = weight[:in_features]
    return module.scales[module.g_idx.long()] * (weight - zeros[module.g_idx.long()])
