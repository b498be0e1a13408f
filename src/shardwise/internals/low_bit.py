"""What shardwise uses of torchao, bitsandbytes and transformers' quantizers that is private. transformers 5.20-5.23."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..objects import frozen

# ----------------------------------------------------------------------------------------------------
# What shardwise uses of transformers' quantizers for FP8 and compressed-tensors. transformers 5.20-5.23, compressed-tensors 0.20.
#
# Importing this module imports neither; each function does.

#: The expression that ``should_convert_module`` makes of an entry of ``modules_to_not_convert``.
SKIPPED_FORM = r"(?:{})(?:(?<=\.)|(?=\.|$))"


def quantizer_of(settings: Any) -> Any:
    """transformers' quantizer for the ``quantization_config`` (a mapping or an object) of a source that is quantized already.

    Without it, what a config leaves out would have other defaults than ``from_pretrained`` gives it.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    return AutoHfQuantizer.from_config(copy.deepcopy(settings), pre_quantized=True)


def with_modules_of(model: Any, quantizer: Any) -> None:
    """Swap layers of a model on meta for the quantizer's own, as ``from_pretrained`` does on a GPU.

    Not ``validate_environment``: without a GPU it turns the quantizer to plain weights. Without it, other layers would be
    quantized than ``from_pretrained`` takes.
    """
    quantizer.preprocess_model(model=model, device_map=None)
    model.hf_quantizer = quantizer


# ----------------------------------------------------------------------------------------------------
# FP8


def fp8_modules(model: nn.Module) -> dict[str, Any]:
    """transformers' modules that hold FP8 codes, by path. Those of unknown kinds, too: whatever has a ``…_scale_inv``.

    Without it, transformers' choice of layers would be lost.
    """
    return {
        path: module
        for path, module in model.named_modules()
        if any(name.endswith("_scale_inv") for name, _ in module.named_parameters(recurse=False))
    }


def eager_experts(kind: type) -> Any:
    """The forward of a class of experts that asks :meth:`linear` for each product, beneath transformers' choice of kernels.

    transformers 5.20-5.23: each model that is built wraps it once more. Without it, experts in FP8 need a Triton kernel.
    """
    return inspect.unwrap(kind.forward)  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------------
# compressed-tensors


def with_compressed_modules(model: Any, quantizer: Any) -> dict[str, Any]:
    """Give layers of a model on meta the parameters of compressed-tensors; returns them by path.

    What ``CompressedTensorsHfQuantizer`` does, without its bar of progress, without the collectives that
    ``compress_model`` runs where there is a process group, and without the hook that decompresses the whole model at its
    first forward. Without it, the layers would have other tensors than the library stores.
    """
    from compressed_tensors.compressors.base import compress_module
    from compressed_tensors.quantization import apply_quantization_config

    settings = copy.deepcopy(quantizer.compressor.quantization_config)
    apply_quantization_config(model, settings, run_compressed=False, show_progress=False)
    found = {
        path: m for path, m in model.named_modules() if getattr(m, "quantization_scheme", None) is not None
    }
    for module in found.values():
        compress_module(module)
        # An attribute of the module that quantizes the weight again, in place of the forward of its class.
        vars(module).pop("forward", None)
    quantizer.use_fp8_kernel = False  # validate_environment would say so, or take kernels of its own
    model.hf_quantizer = quantizer
    model.is_quantized = True
    model.quantization_method = quantizer.quantization_config.quant_method
    return found


def decompress(module: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight that the tensors of a module stand for, as the library decompresses it. On their device.

    Without it, it would be another implementation's weight.
    """
    from compressed_tensors.compressors.base import BaseCompressor

    scheme = module.quantization_scheme
    kind: Any = BaseCompressor.get_value_from_registry(scheme.format.value)
    found: torch.Tensor = kind.decompress(dict(tensors), scheme)["weight"]
    return found


def quantize_activations(module: Any, values: torch.Tensor, where: str) -> torch.Tensor:
    """Values rounded as the module's scheme says for its ``input`` or ``output``; as they are, if it says nothing.

    Without it, the forward would be that of plain activations, which such a model was not calibrated for.
    """
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    arguments = getattr(module.quantization_scheme, f"{where}_activations")
    return values if arguments is None else forward_quantize(module, values, where, arguments)


# ----------------------------------------------------------------------------------------------------
# What shardwise uses of bitsandbytes and of transformers' use of it. bitsandbytes 0.50, transformers 5.20-5.23.
#
# Importing this module imports neither; each function does.


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


def with_4bit_modules(model: Any, config: Any) -> None:
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


# ----------------------------------------------------------------------------------------------------
# What shardwise uses of torchao's optimizers that torchao keeps in modules of its own. torchao 0.15-0.18.
#
# Importing this does not import torchao.


@frozen
class Kind:
    """A class of states: its module, the dtype of its codes, how many elements one code holds, the length of its code book.

    Without it, a checkpoint could not be checked before a state is made of it.
    """

    module: str
    codes: torch.dtype
    elements: int
    book: int
    """0 if it has none."""


#: The classes by name. They are told by name, because a program may work without torchao.
KINDS = {
    "OptimState8bit": Kind("torchao.optim.subclass_8bit", torch.uint8, 1, 256),
    "OptimState4bit": Kind("torchao.optim.subclass_4bit", torch.uint8, 2, 16),
    "OptimStateFp8": Kind("torchao.optim.subclass_fp8", torch.float8_e4m3fn, 1, 0),
}


@frozen
class LowBit:
    """The plain tensors in a state, and its attributes. References, no copies.

    Without it, the three classes would be told apart everywhere.
    """

    kind: str
    codes: torch.Tensor
    scale: torch.Tensor
    book: torch.Tensor | None
    """The numbers that codes stand for, before they are scaled."""
    signed: bool | None
    block: int
    """Elements with one scale."""
    dtype: torch.dtype
    """What the state says that it is."""


def may_keep_low_bits(optimizer: Optimizer) -> bool:
    """Whether an optimizer is torchao's, by its class alone: the same on every rank, also on those without elements.

    Without it, a rank whose shards are short would not know that others hold theirs in few bits.
    """
    return any(kind.__module__.startswith("torchao.optim") for kind in type(optimizer).__mro__)


def low_bit(tensor: torch.Tensor) -> LowBit | None:
    """The plain tensors of a state of torchao's optimizers, None of any other tensor.

    Without it, there is ``__tensor_flatten__``, whose names and order of attributes are the same private ones.
    """
    if type(tensor) is torch.Tensor:
        return None
    found: Any = tensor
    name = type(tensor).__name__
    if name not in KINDS or type(tensor).__module__ != KINDS[name].module:
        return None
    return LowBit(
        kind=name,
        codes=found.codes,
        scale=found.scale,
        book=found.qmap if KINDS[name].book else None,
        signed=found.signed if KINDS[name].book else None,
        block=found.block_size,
        dtype=found.dtype,
    )


def low_bit_state(parts: LowBit, shape: tuple[int, ...]) -> torch.Tensor:
    """A state of these tensors, of a local ``shape``. Imports torchao; raises ``ImportError``, ``AttributeError``.

    torchao before 0.17: a state has no dtype of its own and says fp32 of any model; codes and scales are the same. Without it, a state could only
    be made by a step of the optimizer, which would change the parameters.
    """
    made = _class_of(parts.kind)
    given: list[Any] = [parts.codes, parts.scale]
    if parts.kind != "OptimStateFp8":
        given += [parts.book, parts.signed]
    if parts.kind == "OptimState4bit":
        given.append(torch.Size(shape))
    knows_dtypes = "dtype" in inspect.signature(made.__new__).parameters
    found: torch.Tensor = made(*given, dtype=parts.dtype) if knows_dtypes else made(*given)
    return found


def fresh_book(kind: str, signed: bool) -> torch.Tensor:
    """The code book of a new state. Without it, a rank without elements would write another document than the rest."""
    zeros = _class_of(kind).zeros((2,), signed=signed, block_size=2, device="cpu")
    book: torch.Tensor = zeros.qmap
    return book


def _class_of(kind: str) -> Any:
    return getattr(importlib.import_module(KINDS[kind].module), kind)
