"""``ShardedLinear4bit``: bitsandbytes' 4-bit layer with one parameter that FSDP2 can cut.

bitsandbytes' own ``Params4bit`` keeps its scales beside the parameter, where FSDP2 does not see them: accelerate and PEFT leave it
whole on every rank (accelerate#3987, bitsandbytes#1945). Here codes and scales are one tensor of bytes, in blocks.

Importing this module imports bitsandbytes.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn.modules import Linear4bit
from torch import nn

from ..dtypes import code_of, torch_dtype
from ..internals.low_bit import linears_4bit, matmul_4bit
from ..quantized.bitsandbytes import Blocks

#: What bitsandbytes quantizes by, unless it is told otherwise; transformers does not tell it.
_BLOCK = 64


class _Matmul(torch.autograd.Function):
    """``inputs @ weight.T + bias``, by bitsandbytes. Keeps the parameter for the backward and no copy of its codes.

    FSDP2 frees a gathered parameter after the forward, and gathers it again into the same storage for the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks
    ) -> Any:
        ctx.save_for_backward(rows)
        ctx.blocks = blocks
        ctx.bias_dtype = None if bias is None else bias.dtype
        dtype = torch_dtype(blocks.dtype)
        codes, scales = blocks.parts(rows)
        return matmul_4bit(inputs, bias, codes, scales, blocks.shape, blocks.quant_type, blocks.block, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        (rows,) = ctx.saved_tensors
        of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(tuple(range(grad.dim() - 1)), dtype=ctx.bias_dtype)
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = grad @ ctx.blocks.weight(rows).to(grad.dtype)
        return of_inputs, None, of_bias, None


class ShardedLinear4bit(Linear4bit):
    """bitsandbytes' ``Linear4bit`` whose ``weight`` is a U8 tensor of blocks: codes and scale of each (:mod:`..quantized.blocks4`).

    A ``Linear4bit`` to transformers and PEFT. The result and the gradients are those of bitsandbytes' own layer, bit for bit. The
    weight itself is never trained. PEFT's own ``merge`` can't take it: export merges.
    """

    def __init__(self, like: Any, dtype: torch.dtype) -> None:
        """``like``: the layer that it takes the place of, on meta. ``dtype``: of the weight before it was quantized."""
        super().__init__(  # type: ignore[no-untyped-call]
            like.in_features,
            like.out_features,
            like.bias is not None,
            compute_dtype=like.compute_dtype,
            compress_statistics=False,
            quant_type=like.weight.quant_type,
            device="meta",
        )
        self.blocks = Blocks(
            (like.out_features, like.in_features), like.weight.quant_type, _BLOCK, code_of(dtype)
        )
        self.compute_type_is_set: bool = like.compute_dtype is not None
        self.is_transposed = like.source_cls is not nn.Linear
        weight: Any = nn.Parameter(
            torch.empty(self.blocks.stored_shape, dtype=torch.uint8, device="meta"), False
        )
        # PEFT asks the parameter for these when it wraps the layer.
        weight.compress_statistics, weight.quant_type = False, self.blocks.quant_type
        self.weight = weight
        if like.bias is not None:
            self.bias = nn.Parameter(like.bias.to(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As bitsandbytes' own layer: computes in ``compute_dtype``, returns the dtype of ``x``."""
        if not self.compute_type_is_set:
            self.set_compute_type(x)  # type: ignore[no-untyped-call]
            self.compute_type_is_set = True
        dtype = x.dtype if self.compute_dtype is None else self.compute_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        found: torch.Tensor = _Matmul.apply(  # type: ignore[no-untyped-call]
            x.to(dtype), self.weight, bias, self.blocks
        )
        return found.to(x.dtype)


def shardable(model: nn.Module, dtype: torch.dtype) -> dict[str, ShardedLinear4bit]:
    """Swap each ``Linear4bit`` of a model on meta for a :class:`ShardedLinear4bit`. Returns them by path."""
    found = {}
    for path, layer in linears_4bit(model).items():
        found[path] = ShardedLinear4bit(layer, dtype)
        model.set_submodule(path, found[path])
    return found
