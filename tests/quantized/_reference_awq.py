"""AWQ's packing and dequantization, as AutoAWQ has them; it is archived, and needs an old transformers.

Transcribed from AutoAWQ 0.2.9 (https://github.com/casper-hansen/AutoAWQ, MIT, Copyright (c) 2023 MIT HAN Lab):
``WQLinear_GEMM.from_linear`` of awq/modules/linear/gemm.py, and awq/utils/packing_utils.py. Names and order of operations are
theirs; the method became a function.
"""

from __future__ import annotations

import torch

AWQ_REVERSE_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def from_linear(
    weight: torch.Tensor, group_size: int, scales: torch.Tensor, zeros: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``qweight``, ``qzeros`` and ``scales``. ``weight``: [out, in]; ``scales`` and ``zeros``: [groups, out]."""
    w_bit = 4
    scale_zeros = zeros * scales
    half = scales.clone().half()
    pack_num = 32 // w_bit
    columns = [
        torch.round((weight[:, idx] + scale_zeros[idx // group_size]) / half[idx // group_size]).to(
            torch.int
        )[:, None]
        for idx in range(weight.shape[1])
    ]
    intweight = torch.cat(columns, dim=1).t().contiguous().to(dtype=torch.int32)
    order_map = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight = torch.zeros((intweight.shape[0], intweight.shape[1] // 32 * w_bit), dtype=torch.int32)
    for col in range(intweight.shape[1] // pack_num):
        for i in range(pack_num):
            qweight_col = intweight[:, col * pack_num + order_map[i]]
            qweight[:, col] |= qweight_col << (i * w_bit)
    zeros = zeros.to(dtype=torch.int32)
    qzeros = torch.zeros((zeros.shape[0], zeros.shape[1] // 32 * w_bit), dtype=torch.int32)
    for col in range(zeros.shape[1] // pack_num):
        for i in range(pack_num):
            qzero_col = zeros[:, col * pack_num + order_map[i]]
            qzeros[:, col] |= qzero_col << (i * w_bit)
    return qweight, qzeros, half


def unpack_awq(qweight: torch.Tensor, qzeros: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    shifts = torch.arange(0, 32, bits)
    iweights = torch.bitwise_right_shift(qweight[:, :, None], shifts[None, None, :]).to(torch.int8)
    iweights = iweights.view(iweights.shape[0], -1)
    izeros = torch.bitwise_right_shift(qzeros[:, :, None], shifts[None, None, :]).to(torch.int8)
    return iweights, izeros.view(izeros.shape[0], -1)


def reverse_awq_order(
    iweights: torch.Tensor, izeros: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    reverse_order_tensor = torch.arange(iweights.shape[-1], dtype=torch.int32)
    reverse_order_tensor = reverse_order_tensor.view(-1, 32 // bits)
    reverse_order_tensor = reverse_order_tensor[:, AWQ_REVERSE_ORDER]
    reverse_order_tensor = reverse_order_tensor.view(-1)
    return iweights[:, reverse_order_tensor], izeros[:, reverse_order_tensor]


def dequantize_gemm(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, bits: int, group_size: int
) -> torch.Tensor:
    """[in, out]."""
    iweight, izeros = unpack_awq(qweight, qzeros, bits)
    iweight, izeros = reverse_awq_order(iweight, izeros, bits)
    iweight = torch.bitwise_and(iweight, (2**bits) - 1)
    izeros = torch.bitwise_and(izeros, (2**bits) - 1)
    scales = scales.repeat_interleave(group_size, dim=0)
    izeros = izeros.repeat_interleave(group_size, dim=0)
    return (iweight - izeros) * scales
