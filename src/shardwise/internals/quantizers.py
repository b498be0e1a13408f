"""What shardwise uses of transformers' quantizers for FP8 and compressed-tensors. transformers 5.20-5.23, compressed-tensors 0.20.

Importing this module imports neither; each function does.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = [
    "SKIPPED_FORM",
    "decompress",
    "eager_experts",
    "fp8_modules",
    "quantize_activations",
    "quantizer_of",
    "with_compressed_modules",
    "with_modules_of",
]

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
