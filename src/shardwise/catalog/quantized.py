"""Finds quantized weights in a source, by names and dtypes of its tensors, and tells how to dequantize them.

Stored codes are not weights without their scales. A load that took them as weights would be wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..objects import frozen
from .records import StoredTensor

__all__ = [
    "NAMES_IN_CONFIG",
    "Quantized",
    "code_of_weight",
    "is_part",
    "method_of_config",
    "quantized",
    "settings_of_config",
    "stands_beside",
    "way_out",
]

#: Where a config says how its model is quantized.
NAMES_IN_CONFIG = ("quantization_config", "compression_config")


_CODES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "I8", "U8", "I32"})
#: Suffix of a tensor beside codes → suffixes of the codes' names instead of it, and the method.
#: compressed-tensors, GPTQ and AWQ, OpenAI's MXFP4, DeepSeek's FP8, bitsandbytes; as written in 2024-2026.
_BESIDE: Sequence[tuple[str, Sequence[str], str]] = (
    ("_scales", ("_blocks",), "mxfp4"),
    (".g_idx", (".qweight",), "gptq"),
    (".qzeros", (".qweight",), "awq"),
    (".scales", (".qweight",), "awq"),
    (".weight_scale", (".weight_packed",), "compressed-tensors"),
    (".weight_shape", (".weight_packed",), "compressed-tensors"),
    ("_scale_inv", ("",), "fp8"),
    (".quant_map", ("",), "bitsandbytes"),
    (".absmax", ("",), "bitsandbytes"),
    (".SCB", (".weight",), "bitsandbytes"),
    ("._scale", ("._data",), "quanto"),
    ("_scale", ("",), "fp8"),
    (".scale", (".weight",), "fp8"),
)
_ENDS = tuple(end for end, _, _ in _BESIDE)
_CODE_ENDS = ("_blocks", "_packed", ".qweight", ".W_q", "._data")


@frozen
class Quantized:
    """The method by which a source is quantized, and stored tensors that show it."""

    method: str
    codes: str
    beside: str
    """The tensor beside the codes: scales, zero points, an index of groups."""


def quantized(tensors: Mapping[str, StoredTensor], own: Collection[str] = ()) -> Quantized | None:
    """How a source is quantized, if it holds codes with their scales; otherwise None, also for float8 without scales.

    ``own``: names of the model's tensors. A model that itself has scales of such a name is loaded as stored. Pure;
    looks at each name once.
    """
    held = {name.rpartition(".")[2] for name in own}
    for name in tensors:
        if f".{name}".endswith(_ENDS) and name.rpartition(".")[2] not in held:
            for codes, method in _codes_beside(name, tensors):
                return Quantized(_finer(method, codes, tensors), codes, name)
    return None


def _codes_beside(name: str, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, str]]:
    """The codes beside which a tensor of this name stands, with the method."""
    return (
        (codes, method)
        for codes, method in _beside(name)
        if codes in tensors and tensors[codes].dtype in _CODES
    )


def stands_beside(name: str, tensors: Mapping[str, StoredTensor]) -> str | None:
    """The stored tensor, of any dtype, that a tensor of this name scales or completes; None if there is none."""
    return next((codes for codes, _ in _beside(name) if codes in tensors and codes != name), None)


def _beside(name: str) -> Iterator[tuple[str, str]]:
    """The names of codes beside which a tensor of this name may stand, with the method."""
    dotted = f".{name}"  # a tensor of the root module has no dot before its name
    for end, code_ends, method in _BESIDE:
        if dotted.endswith(end):
            stem = dotted.removesuffix(end)
            yield from (((stem + e).removeprefix("."), method) for e in code_ends)


def _finer(method: str, codes: str, tensors: Mapping[str, StoredTensor]) -> str:
    """The method, told by dtype where names alone don't tell it."""
    if method == "awq" and f"{codes.removesuffix('.qweight')}.g_idx" in tensors:
        return "gptq"
    if method == "fp8" and not tensors[codes].dtype.startswith("F8"):
        return {"I8": "int8"}.get(tensors[codes].dtype, "4 bits")
    return method


def code_of_weight(name: str, tensors: Mapping[str, StoredTensor]) -> str | None:
    """The stored codes of the weight that a model wants under this name, if there are any."""
    stem = name.removesuffix(".weight")
    for codes in (*(name + end for end in _CODE_ENDS), *(stem + end for end in _CODE_ENDS)):
        if codes in tensors and tensors[codes].dtype in _CODES:
            return codes
    return name if name in tensors and is_part(name, tensors) else None


def is_part(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a stored tensor is codes with scales beside them, or stands beside codes."""
    if any(True for _ in _codes_beside(name, tensors)):
        return True
    if name not in tensors or tensors[name].dtype not in _CODES:
        return False
    dotted = f".{name}"
    return any(
        dotted.endswith(code_end) and (dotted.removesuffix(code_end) + end).removeprefix(".") in tensors
        for end, code_ends, _ in _BESIDE
        for code_end in code_ends
    )


# ----------------------------------------------------------------------------------------------------
# Configs


def method_of_config(config: Any) -> str:
    """The method that a model's config (a dict or an object), or a part of it, names; "" for none."""
    found = _found_in(config)
    return _method(found) if found else ""


def settings_of_config(config: Any) -> Mapping[str, Any]:
    """The settings of the quantization that a stored config, or a part of it, names; empty for none."""
    found = _found_in(config)
    return found if isinstance(found, Mapping) else {}


def _found_in(config: Any) -> Any:
    for section in _sections(config, 4):
        for name in NAMES_IN_CONFIG:
            if found := section.get(name):
                return found
    return None


def _sections(config: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if not isinstance(fields, Mapping) or not depth:
        return
    yield fields
    for name, value in fields.items():
        if str(name).endswith("_config") and "quantization" not in str(name):
            yield from _sections(value, depth - 1)


def _method(found: Any) -> str:
    """``fp8``, ``bitsandbytes``, …: the name in the config, otherwise its class."""
    fields = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
    method = fields.get("quant_method")
    if method is None and any(str(name).startswith("load_in_") for name in fields):
        method = "bitsandbytes"
    return str(getattr(method, "value", method) or type(found).__name__)


# ----------------------------------------------------------------------------------------------------
# The next step for the user


def way_out(method: str) -> str:
    """How to get plain weights, in one sentence, if transformers 5.23 can dequantize the method."""
    kind = {
        "mxfp4": "Mxfp4Config",
        "fp8": "FineGrainedFP8Config",
        "compressed-tensors": "CompressedTensorsConfig",
    }.get(method)
    load = "AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.bfloat16"
    # Without save_original_format=False transformers 5.23 gives the plain weights the names of the codes.
    save = "save_pretrained(OUT, save_original_format=False)"
    if kind is not None:
        undo = f"{load}, quantization_config=transformers.{kind}(dequantize=True)).{save}"
    elif method == "bitsandbytes":
        undo = f"{load}).dequantize().{save}"
    else:
        return "transformers can't dequantize this method: load the model from which it was quantized"
    return f"dequantize it first, in one process, and load OUT: {undo}"
