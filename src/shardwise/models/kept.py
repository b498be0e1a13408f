"""Layers that keep what a source stores, codes and scales, and decode them for each product: compressed-tensors' own.

The parameters are the stored tensors under their own names, frozen, so FSDP2 cuts and gathers codes. transformers' modules for FP8 are in
:mod:`.kept_fp8`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ShardError, UnsupportedConversionError
from ..internals.low_bit import decompress, quantize_activations, with_compressed_modules


class KeptLayer(nn.Module):
    """A layer with parameters that are a source's own codes and scales."""

    stored_dtypes: dict[str, torch.dtype]
    """Of these parameters, by name. FSDP2's mixed precision would cast float8 codes, and lose their scales."""
    plain_dtype: torch.dtype
    """Of the weights before they were quantized."""

    def take_shape(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Hold a tensor on meta of this dtype and shape: packed zero points, which compressed-tensors does not pack on meta."""
        self.register_parameter(name, nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), False))
        self.stored_dtypes[name] = dtype

    def check_dtypes(self) -> None:
        """Raises :class:`ShardError` if a parameter is no longer of the dtype in which it is stored."""
        for name, dtype in self.stored_dtypes.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype:
                raise ShardError(
                    f"{type(self).__name__}.{name} holds stored codes or scales in {dtype}, and was cast to {tensor.dtype}; "
                    f"shard the model without mixed_precision (load it with dtype=torch.bfloat16), and don't cast it"
                )


def freeze(module: Any, dtype: torch.dtype) -> None:
    """Freeze what a layer holds of the source, and note its dtypes. ``dtype``: of the weights before they were quantized."""
    module.plain_dtype = dtype
    held = {name: p for name, p in module.named_parameters(recurse=False) if name != "bias"}
    module.stored_dtypes = {name: p.dtype for name, p in held.items()}
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(False)


class _Product(torch.autograd.Function):
    """``inputs @ weight.T + bias`` of a layer's decoded weight. Keeps the codes for the backward, and no weight.

    FSDP2 frees gathered parameters after the forward, and gathers them again into the same storage for the backward. The rounding
    of activations passes gradients on as they are.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, layer: Any, *held: Any) -> Any:
        ctx.save_for_backward(*held)
        ctx.layer = layer
        return layer.computed(inputs, layer.decoded(*held), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), held = grads, ctx.saved_tensors
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = grad @ ctx.layer.decoded(*held).to(grad.dtype)
        return of_inputs, None, None, *(None for _ in held)


def product(layer: Any, inputs: torch.Tensor, bias: torch.Tensor | None, *held: torch.Tensor) -> torch.Tensor:
    """The layer's result for the weight that ``layer.decoded(*held)`` gives, computed by ``layer.computed``."""
    found: torch.Tensor = _Product.apply(inputs, bias, layer, *held)  # type: ignore[no-untyped-call]
    return found


class KeptCompressedLinear(KeptLayer, nn.Linear):
    """A linear layer with the parameters of compressed-tensors, which its library decompresses for each product.

    The library itself decompresses the whole model at its first forward, which shards can't.
    """

    def decoded(self, *held: torch.Tensor) -> torch.Tensor:
        return decompress(self, dict(zip(self.stored_dtypes, held, strict=True)))

    def computed(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rounded = quantize_activations(self, inputs, "input")
        return quantize_activations(self, nn.functional.linear(rounded, weight, bias), "output")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As the layer that the library decompresses, bit for bit."""
        self.check_dtypes()
        return product(self, input, self.bias, *(getattr(self, name) for name in self.stored_dtypes))


class _NoWeight(torch.Tensor):
    """Dtype, device and shape of a weight that no memory holds."""

    @property
    def data(self) -> Any:
        raise ShardError(
            "a layer of packed codes has no weight to write to or to merge into; load the model with quantized='dequantize'"
        )

    @data.setter
    def data(self, _: Any) -> None:
        self.data  # noqa: B018


class KeptPackedLinear(KeptCompressedLinear):
    """A :class:`KeptCompressedLinear` whose codes are not called ``weight``."""

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """PEFT asks for its dtype, device and shape, not for its elements. Merging fails, in place of merging nothing."""
        of: Any = self.weight_scale
        one = torch.empty(1, dtype=self.plain_dtype, device=of.device)
        return one.expand(self.out_features, self.in_features).as_subclass(_NoWeight)


def put_compressed(model: Any, quantizer: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Swap layers of a model on meta for those of compressed-tensors; by path. ``dtype``: of the weights before.

    Raises :class:`UnsupportedConversionError` for what no shard can hold.
    """
    settings = quantizer.quantization_config.quantization_config
    odd = [
        what
        for what, has in (
            ("scales of a key-value cache (kv_cache_scheme)", settings.kv_cache_scheme),
            ("transforms (transform_config)", getattr(quantizer.compressor, "transform_config", None)),
        )
        if has
    ]
    found = with_compressed_modules(model, quantizer) if not odd else {}
    odd += [f"{path!r}, a {type(m).__name__}" for path, m in found.items() if type(m) is not nn.Linear]
    if odd:
        raise UnsupportedConversionError(
            f"quantized='keep' takes linear layers of compressed-tensors, and this source also has {', '.join(odd[:5])}; take "
            f"quantized='dequantize'"
        )
    for module in found.values():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:  # weight_shape
                module.register_parameter(
                    name, nn.Parameter(torch.empty_like(parameter, device="meta"), False)
                )
        has_weight = "weight" in dict(module.named_parameters(recurse=False))
        module.__class__ = KeptCompressedLinear if has_weight else KeptPackedLinear
        freeze(module, dtype)
    return found
