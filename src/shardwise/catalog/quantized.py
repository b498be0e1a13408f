"""Which stored tensors are codes of quantised weights, known by their names and dtypes; and how to get the weights.

Codes without their scales are no weights: a load that took them, or initialised what they stand for, would be wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .records import StoredTensor

__all__ = ["Quantized", "code_of_weight", "is_part", "method_of_config", "quantized", "way_out"]

_CODES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "I8", "U8", "I32"})
#: What stands beside codes, by the end of its name → ends of the codes' names in its place, and the method.
#: compressed-tensors, GPTQ and AWQ, OpenAI's MXFP4, DeepSeek's FP8, bitsandbytes; as they write in 2024-2026.
_COMPANIONS: Sequence[tuple[str, Sequence[str], str]] = (
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
_ENDS = tuple(end for end, _, _ in _COMPANIONS)
_CODE_ENDS = ("_blocks", "_packed", ".qweight", ".W_q", "._data")


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a source is quantised, and a stored tensor that shows it."""

    method: str
    codes: str
    companion: str
    """What stands beside the codes: scales, zero points, an index of groups."""


def quantized(tensors: Mapping[str, StoredTensor], own: Collection[str] = ()) -> Quantized | None:
    """How a source is quantised, if it holds codes with their scales; None for any other, float8 without scales too.

    ``own`` are names of a model's tensors: a model that has scales of such a name itself is loaded as it is. Pure; one
    look at each name.
    """
    held = {name.rpartition(".")[2] for name in own}
    for name in tensors:
        if f".{name}".endswith(_ENDS) and name.rpartition(".")[2] not in held:
            for codes, method in _codes_beside(name, tensors):
                return Quantized(_finer(method, codes, tensors), codes, name)
    return None


def _codes_beside(name: str, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, str]]:
    """The codes that a tensor of such a name belongs to, with the method."""
    dotted = f".{name}"  # a tensor of the root module has no dot before its name
    for end, code_ends, method in _COMPANIONS:
        if dotted.endswith(end):
            stem = dotted.removesuffix(end)
            for codes in ((stem + e).removeprefix(".") for e in code_ends):
                if codes in tensors and tensors[codes].dtype in _CODES:
                    yield codes, method


def _finer(method: str, codes: str, tensors: Mapping[str, StoredTensor]) -> str:
    """What names alone leave open."""
    if method == "awq" and f"{codes.removesuffix('.qweight')}.g_idx" in tensors:
        return "gptq"
    if method == "fp8" and not tensors[codes].dtype.startswith("F8"):
        return {"I8": "int8"}.get(tensors[codes].dtype, "4 bits")
    return method


def code_of_weight(name: str, tensors: Mapping[str, StoredTensor]) -> str | None:
    """The stored codes of a tensor that a model wants under this name, if that is how it is stored."""
    stem = name.removesuffix(".weight")
    for codes in (*(name + end for end in _CODE_ENDS), *(stem + end for end in _CODE_ENDS)):
        if codes in tensors and tensors[codes].dtype in _CODES:
            return codes
    return name if name in tensors and is_part(name, tensors) else None


def is_part(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a stored tensor is codes that have a companion, or the companion of codes."""
    if any(True for _ in _codes_beside(name, tensors)):
        return True
    if name not in tensors or tensors[name].dtype not in _CODES:
        return False
    dotted = f".{name}"
    return any(
        dotted.endswith(code_end) and (dotted.removesuffix(code_end) + end).removeprefix(".") in tensors
        for end, code_ends, _ in _COMPANIONS
        for code_end in code_ends
    )


# ----------------------------------------------------------------------------------------------------
# What a config says


def method_of_config(config: Any) -> str:
    """The method that a model's config (a dict or an object) names, also in a part of it; "" for none."""
    for section in _sections(config, 4):
        for name in ("quantization_config", "compression_config"):
            found = section.get(name)
            if found:
                return _method(found)
    return ""


def _sections(config: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    fields = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if not isinstance(fields, Mapping) or not depth:
        return
    yield fields
    for name, value in fields.items():
        if str(name).endswith("_config") and "quantization" not in str(name):
            yield from _sections(value, depth - 1)


def _method(found: Any) -> str:
    """``fp8``, ``bitsandbytes``, …: the name that the config itself gives, else its class."""
    fields = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
    method = fields.get("quant_method")
    if method is None and any(str(name).startswith("load_in_") for name in fields):
        method = "bitsandbytes"
    return str(getattr(method, "value", method) or type(found).__name__)


# ----------------------------------------------------------------------------------------------------
# What to do


def way_out(method: str) -> str:
    """What gives plain weights, in one sentence, for the methods of which transformers 5.23 can undo the codes."""
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
        return "transformers can't undo this method: take the model from which it was quantised"
    return f"dequantise it first, in one process, and load OUT: {undo}"
