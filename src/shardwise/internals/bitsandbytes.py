"""What shardwise uses of bitsandbytes and of transformers' use of it. bitsandbytes 0.50, transformers 5.20-5.23.

Importing this module imports neither; each function does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["dequantize_4bit", "linears_4bit", "matmul_4bit", "quantize_4bit", "with_modules_of"]


def _functional() -> Any:
    """``bitsandbytes.functional``, which has no types. Without it, each use would be an error of the type checker."""
    import bitsandbytes.functional

    return bitsandbytes.functional


def quantize_4bit(values: torch.Tensor, quant_type: str, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes (U8, two a byte, one dim) and the scale of each block (fp32) of values in bf16, fp16 or fp32.

    Without it, the codes would be another implementation's, and not those that ``from_pretrained`` makes.
    """
    codes, state = _functional().quantize_4bit(values, blocksize=block, quant_type=quant_type)
    return codes.view(-1), state.absmax.view(-1)


def _state(
    scales: torch.Tensor, shape: tuple[int, ...], quant_type: str, block: int, dtype: torch.dtype
) -> Any:
    bnb = _functional()
    return bnb.QuantState(
        absmax=scales,
        shape=torch.Size(shape),
        code=bnb.get_4bit_type(quant_type, device=scales.device),
        blocksize=block,
        quant_type=quant_type,
        dtype=dtype,
    )


def dequantize_4bit(
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: tuple[int, ...],
    quant_type: str,
    block: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The values that :func:`quantize_4bit` made codes and scales of, as a tensor of ``shape`` in ``dtype``.

    Without it, gradients would be those of another kernel's rounding.
    """
    found: torch.Tensor = _functional().dequantize_4bit(
        codes.view(-1, 1), _state(scales, shape, quant_type, block, dtype)
    )
    return found


def matmul_4bit(
    inputs: torch.Tensor,
    bias: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: tuple[int, ...],
    quant_type: str,
    block: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``inputs @ weight.T + bias`` for the weight that codes and scales stand for. Called without gradients.

    Without it, a model in 4 bits would compute otherwise than with bitsandbytes' own layer.
    """
    import bitsandbytes

    bnb: Any = bitsandbytes
    state = _state(scales, shape, quant_type, block, dtype)
    found: torch.Tensor = bnb.matmul_4bit(inputs, codes.view(-1, 1), state, bias=bias)
    return found


def with_modules_of(model: Any, config: Any) -> None:
    """Swap layers of a transformers model on meta for those of a quantization config, as ``from_pretrained`` does.

    transformers chooses the layers (``llm_int8_skip_modules``, not the head, none kept in fp32) and sets ``is_quantized``
    and ``quantization_method``. Without it, other layers would be quantized than ``from_pretrained`` quantizes.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.validate_environment(device_map=None)
    quantizer.preprocess_model(model=model, device_map=None)


def linears_4bit(model: nn.Module) -> dict[str, Any]:
    """bitsandbytes' ``Linear4bit`` modules of a model, by path.

    Without it, transformers' choice of layers would be lost when they are swapped for those that FSDP2 can cut.
    """
    from bitsandbytes.nn.modules import Linear4bit

    return {path: m for path, m in model.named_modules() if isinstance(m, Linear4bit)}
