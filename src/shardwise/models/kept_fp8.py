"""transformers' modules for FP8 that hold a source's codes and scales. On a CPU, which has no kernel for them, they are decoded.

Importing this module imports transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

from ..errors import UnsupportedConversionError
from ..internals.low_bit import eager_experts, fp8_modules, with_modules_of
from .kept import KeptLayer, freeze, product


class _Decoded(KeptLayer):
    """Weights of FP8 codes and scales, as transformers dequantizes them: in fp32, rounded once."""

    block_size: tuple[int, int] | None

    def decoded(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        spread, values = scales.float(), codes.float()
        if self.block_size is not None:
            for dim, n in zip((-2, -1), self.block_size, strict=True):
                spread = spread.repeat_interleave(n, dim).narrow(dim, 0, values.shape[dim])
        return values.mul_(spread).to(self.plain_dtype)

    def computed(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.linear(inputs, weight, bias)


class KeptFP8Linear(_Decoded, FP8Linear):
    """transformers' ``FP8Linear``. On a CPU the result is that of the dequantized weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.check_dtypes()
        if input.device.type != "cpu":
            found: torch.Tensor = FP8Linear.forward(self, input)
            return found
        return product(self, input, self.bias, self.weight, self.weight_scale_inv)


class KeptFP8Experts(_Decoded, FP8Experts):
    """transformers' ``FP8Experts``. On a CPU each expert's result is that of its dequantized weights."""

    def forward(self, hidden_states: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        self.check_dtypes()
        is_eager = hidden_states.device.type == "cpu"
        chosen = eager_experts(FP8Experts) if is_eager else FP8Experts.forward
        found: torch.Tensor = chosen(self, hidden_states, *routing)
        return found

    def linear(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        activation_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if input.device.type != "cpu":
            found: torch.Tensor = FP8Experts.linear(self, input, weight, weight_scale_inv, activation_scale)
            return found
        return product(self, input, None, weight, weight_scale_inv)


_KEPT: dict[type, type] = {FP8Linear: KeptFP8Linear, FP8Experts: KeptFP8Experts}


def put_fp8(model: Any, quantizer: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Swap layers of a model on meta for transformers' own in FP8; by path. ``dtype``: of the weights before.

    Raises :class:`UnsupportedConversionError` for modules of FP8 that no shard can hold.
    """
    with_modules_of(model, quantizer)
    found = fp8_modules(model)
    odd = [
        f"{path!r}, a {type(module).__name__}" for path, module in found.items() if type(module) not in _KEPT
    ]
    if getattr(quantizer.quantization_config, "modules_to_convert", None):  # of newer transformers
        odd.append("embeddings in FP8 (modules_to_convert)")
    if odd:
        raise UnsupportedConversionError(
            f"quantized='keep' takes transformers' FP8Linear and FP8Experts, and this source also has {', '.join(odd[:5])}; take "
            f"quantized='dequantize'"
        )
    for module in found.values():
        module.__class__ = _KEPT[type(module)]
        freeze(module, dtype)
    return found
