"""``quantized=`` of a load, understood and put into the model's modules: layers that keep a source's codes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..catalog.quantized import method_of_config, quantized, settings_of_config
from ..catalog.records import Catalog
from ..errors import UnsupportedConversionError
from ..gates import require
from ..internals.low_bit import SKIPPED_FORM, quantizer_of
from ..internals.low_bit import with_4bit_modules as with_modules_of
from ..internals.regex import check_patterns
from .kept import KeptLayer, put_compressed

# ----------------------------------------------------------------------------------------------------
# What a caller asks of a model's quantization: ``quantized=`` of a load, understood and put into the model's modules.

#: Methods whose modules hold the stored tensors as they are.
_AS_STORED = ("compressed-tensors", "fp8")
#: Methods that a load dequantizes, and why no shard can hold their codes.
_WHY_NOT = {
    "awq": "its kernels take weights that are packed again when they are loaded",
    "bitsandbytes": "bitsandbytes keeps the scales of 8 bits outside of the parameter, where FSDP2 does not see them",
    "fbgemm_fp8": "its modules take kernels of fbgemm, for inference only",
    "gptq": "its kernels take weights that are packed again when they are loaded",
    "mxfp4": "transformers' experts hold tensors of a Triton kernel, swizzled when they are loaded, for inference only",
}
#: ``"dequantize"``, ``"keep"``, or a ``BitsAndBytesConfig``.
Asked = Any


def asked_of(asked: Asked, config: Any, catalog: Catalog, path: str) -> Any | None:
    """The quantization config of the model's own modules; None for a model of plain weights. Rank-local.

    ``config``: the model's, as it is in the source. Raises :class:`UnsupportedConversionError` for codes that no model can keep
    in shards, :class:`ValueError` or :class:`TypeError` for another ``asked``.
    """
    if isinstance(asked, str):
        if asked not in ("dequantize", "keep"):
            raise ValueError(f"quantized must be 'dequantize', 'keep' or a BitsAndBytesConfig, got {asked!r}")
        if asked == "dequantize":
            return None
        return _stored(config, catalog, path)
    if type(asked).__name__ != "BitsAndBytesConfig":
        raise TypeError(
            f"quantized must be 'dequantize', 'keep' or a transformers.BitsAndBytesConfig, got {asked!r:.200}"
        )
    if not asked.load_in_4bit:
        raise UnsupportedConversionError(
            "quantized=BitsAndBytesConfig(…) asks for 8 bits; only 4 bits can be sharded: load_in_4bit=True"
        )
    if asked.bnb_4bit_use_double_quant:
        raise UnsupportedConversionError(
            "quantized=BitsAndBytesConfig(bnb_4bit_use_double_quant=True): quantized scales need the mean of all scales of a "
            "weight before the first is known, and no rank reads a whole weight. Leave it out; or quantize once with "
            "transformers, save_pretrained, and load that with quantized='keep'"
        )
    found = quantized(catalog.tensors)
    if found is not None:
        raise UnsupportedConversionError(
            f"{path}: is quantized already ({found.method}: {found.codes!r}); use quantized='keep', or "
            f"'dequantize', export the model, and quantize that"
        )
    return asked


def _stored(config: Any, catalog: Catalog, path: str) -> Any:
    """The quantization config of a source whose codes the model keeps."""
    method, found = method_of_config(config), quantized(catalog.tensors)
    if not method or (found is None and not catalog.has_module_names):  # a checkpoint holds blocks
        has = "says nothing of a quantization" if not method else f"says {method}, and no tensor is in codes"
        raise UnsupportedConversionError(
            f"{path}: quantized='keep', and there is nothing to keep: its config {has}. Leave quantized= out; or give a "
            f"BitsAndBytesConfig to quantize it while it is loaded"
        )
    settings = dict(settings_of_config(config))
    if method in _AS_STORED:
        return settings
    if method != "bitsandbytes" or not (settings.get("load_in_4bit") or settings.get("_load_in_4bit")):
        raise UnsupportedConversionError(
            f"{path}: quantized='keep' can't hold {method}{'' if method != 'bitsandbytes' else ' in 8 bits'} in shards: "
            f"{_WHY_NOT.get(method, 'its modules are not known')}. Use quantized='dequantize'"
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig.from_dict(settings)


def put_into(model: Any, settings: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Swap the layers of a model on meta for those that hold codes; by path. ``dtype``: of the weights before.

    transformers chooses which. Raises :class:`ImportError` without the method's library.
    """
    method = method_of_config({"quantization_config": settings})
    _check_expressions(model, settings if isinstance(settings, Mapping) else vars(settings))
    if method in _AS_STORED:
        return _put_as_stored(model, settings, dtype, method)
    try:
        from .linear4bit import shardable
    except ImportError as error:
        raise ImportError("quantized= needs bitsandbytes: pip install bitsandbytes") from error
    with_modules_of(model, settings)
    model.is_loaded_in_4bit = True
    return dict(shardable(model, dtype))


def _check_expressions(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Raise :class:`FormatError` for expressions that the quantizers would match forever with the model's modules."""
    from ..quantized.compressed_tensors import read_settings

    names = [name for name, _ in model.named_modules()]
    check_patterns(read_settings(settings).expressions, names, "an expression in quantization_config", None)
    for setting in ("modules_to_not_convert", "llm_int8_skip_modules"):
        skipped = [one for one in settings.get(setting) or () if isinstance(one, str)]
        check_patterns(skipped, names, f"quantization_config.{setting}", None, SKIPPED_FORM)


def _put_as_stored(model: Any, settings: Any, dtype: torch.dtype, method: str) -> dict[str, Any]:
    try:
        quantizer = quantizer_of(settings)
    except ImportError as error:
        raise ImportError(f"quantized='keep' needs {method}: pip install {method}") from error
    except Exception as error:  # its own classes for settings raise errors of many types
        raise UnsupportedConversionError(
            f"transformers can't read this quantization_config: {type(error).__name__}: {str(error)[:500]}; take "
            f"quantized='dequantize'"
        ) from error
    if method == "fp8":
        require("kept-fp8")
        from .kept_fp8 import put_fp8

        found = put_fp8(model, quantizer, dtype)
    else:
        found = put_compressed(model, quantizer, dtype)
    model.config.quantization_config = quantizer.quantization_config
    return found


def kept_in_checkpoint(config: Any, catalog: Catalog) -> dict[str, Any] | None:
    """The ``quantization_config`` of a checkpoint whose model held the source's codes; None for any other. Rank-local."""
    is_ours = catalog.has_module_names and method_of_config(config) in _AS_STORED
    return dict(settings_of_config(config)) if is_ours and quantized(catalog.tensors) is not None else None


def kept_in(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that hold a source's codes and scales as they are stored (:class:`.KeptLayer`), by path."""
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, KeptLayer)}


def blocks_in(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that hold 4-bit blocks (:class:`.ShardedLinear4bit`), by path. Never imports bitsandbytes."""
    kind = getattr(sys.modules.get(f"{__package__}.linear4bit"), "ShardedLinear4bit", ())
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, kind)}
