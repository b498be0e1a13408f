"""What the formats' own libraries make of a weight: the stored tensors of one module, by name. They quantize the whole tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.quantized._boxes import State
from tests.quantized._fp8_library import fp8_quantize
from tests.quantized.compressed_models import scheme_of

__all__ = ["quantized_by_library"]


def quantized_by_library(directory: Path, name: str, weight: torch.Tensor, stored: State) -> State:
    """The stored tensors that a library makes of ``weight`` for the settings of a directory. ``stored``: those of the directory."""
    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    make = {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "bitsandbytes": _bitsandbytes,
        "mxfp4": _mxfp4,
    }[settings["quant_method"]]
    return make(settings, name, weight, stored)


def _fp8(settings: Mapping[str, Any], name: str, weight: torch.Tensor, stored: State) -> State:
    own = {key: settings[key] for key in ("weight_block_size", "scale_fmt") if key in settings}
    return fp8_quantize(**own)(name, weight)


def _compressed_tensors(settings: Mapping[str, Any], name: str, weight: torch.Tensor, stored: State) -> State:
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(dict(settings))
    module = name.removesuffix(".weight")
    scheme = scheme_of(config, module)
    held = compressed_by_library(weight, scheme, str(scheme.format or config.format))
    return {f"{module}.{end}": tensor for end, tensor in held.items()}


def compressed_by_library(weight: torch.Tensor, scheme: Any, form: str) -> State:
    """What compressed-tensors stores of a weight, with scales by minimum and maximum in the weight's dtype."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    args = scheme.weights
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": args.block_structure,
    }.get(args.strategy, (1, args.group_size))
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    extra = {}
    if args.strategy == "tensor_group":
        extra["global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args, **extra)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
    if not args.symmetric:
        state["weight_zero_point"] = zero
    if extra:
        state["weight_global_scale"] = extra["global_scale"]
    found = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    return {end: tensor for end, tensor in found.items() if tensor is not None}


def _bitsandbytes(settings: Mapping[str, Any], name: str, weight: torch.Tensor, stored: State) -> State:
    import bitsandbytes.functional as bnb

    if settings["load_in_8bit"]:
        codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
        return {name: codes, name.replace("weight", "SCB"): scales}
    double, kind = settings["bnb_4bit_use_double_quant"], settings["bnb_4bit_quant_type"]
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=double)
    return {name: codes, **{f"{name}.{end}": t for end, t in state.as_dict(packed=True).items()}}


def _mxfp4(settings: Mapping[str, Any], name: str, weight: torch.Tensor, stored: State) -> State:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    experts = [compressed_by_library(one.t().contiguous(), scheme, "mxfp4-pack-quantized") for one in weight]
    blocks = torch.stack([one["weight_packed"].unflatten(1, (-1, 16)) for one in experts])
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.stack([one["weight_scale"] for one in experts])}
