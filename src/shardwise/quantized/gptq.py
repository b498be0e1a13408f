"""The family of GPTQ, as AutoGPTQ, GPTQModel and Optimum store it.

``X.qweight``, ``X.qzeros``, ``X.scales`` and ``X.g_idx`` stand for ``X.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import FormatError
from ..limits import brief
from ..objects import frozen
from .coded import Coded, coded
from .families import Found, Source
from .gptq_rule import Gptq
from .stored import check, each_module, group_size_of, require, words_of

__all__ = ["find"]

_BITS = (2, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


@frozen
class _Settings:
    bits: int
    group_size: int
    """-1: all inputs are one group."""
    in_order: bool
    plus_one: bool
    dynamic: bool
    """Modules may have bits and groups of their own, which their tensors tell."""


def find(source: Source) -> Found:
    """Every tensor in codes of GPTQ. Implements :class:`.Family`."""
    return each_module(source, "gptq", ("qweight", "qzeros", "g_idx"), _settings, _coded)


def _settings(given: Mapping[str, Any]) -> _Settings:
    """What config.json says of all modules. Raises :class:`FormatError` for what this version can't decode."""
    bits, size, by_activation = (
        given.get(k, d) for k, d in (("bits", None), ("group_size", 128), ("desc_act", False))
    )
    layout = given.get("checkpoint_format") or given.get("format") or "gptq"
    if type(bits) is not int or bits not in _BITS:
        raise FormatError(f"expected 2, 4 or 8 as bits in config.json, found {brief(bits)}")
    if not isinstance(by_activation, bool):
        raise FormatError(f"expected true or false as desc_act in config.json, found {brief(by_activation)}")
    if layout not in _FORMATS or given.get("is_marlin_format"):
        found = brief(layout) if layout not in _FORMATS else "is_marlin_format"
        raise FormatError(f"expected gptq or gptq_v2 as checkpoint_format in config.json, found {found}")
    if given.get("rotation"):
        raise FormatError(
            f"config.json says rotation = {brief(given['rotation'])}: the codes are of rotated weights"
        )
    return _Settings(
        bits, group_size_of(size), not by_activation, layout == "gptq", bool(given.get("dynamic"))
    )


def _coded(source: Source, stem: str, settings: _Settings) -> Coded:
    codes, zeros, scales = words_of(source.tensors, stem)
    index = require(source.tensors, f"{stem}g_idx", f"{stem}weight")
    if index.dtype != "I32" or len(index.shape) != 1 or not index.shape[0]:
        raise FormatError(
            f"expected I32 in one dim, found {index.dtype} {list(index.shape)}", path=index.name
        )
    (inputs,), outputs = index.shape, codes.shape[1]
    bits, size = settings.bits, min(settings.group_size, inputs) if settings.group_size > 0 else inputs
    in_order, groups = settings.in_order, -(-inputs // size)
    if settings.dynamic:
        bits = next((n for n in _BITS if codes.shape[0] == -(-inputs * n // 32)), bits)
        in_order, groups = in_order and groups == scales.shape[0], scales.shape[0]
    check(
        codes, "I32", (-(-inputs * bits // 32), outputs), f"{inputs} inputs (as {index.name}) of {bits} bits"
    )
    check(scales, "F16", (groups, outputs), f"{inputs} inputs in groups of {size} and {outputs} outputs")
    check(
        zeros,
        "I32",
        (groups, -(-outputs * bits // 32)),
        f"{groups} groups and {outputs} outputs of {bits} bits",
    )
    rule = Gptq(f"{stem}weight", bits, groups, size if in_order else None, settings.plus_one)
    parts = {"codes": codes, "zeros": zeros, "scales": scales, "groups": index}
    return coded(rule.name, "F16", (outputs, inputs), parts, rule)
