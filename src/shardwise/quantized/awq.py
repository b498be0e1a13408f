"""The family of AWQ, as AutoAWQ's ``WQLinear_GEMM`` stores it.

``X.qweight``, ``X.qzeros`` and ``X.scales`` stand for ``X.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import FormatError
from ..limits import brief
from .awq_rule import Awq
from .coded import Coded, coded
from .families import Found, Source
from .stored import check, each_module, group_size_of, words_of

__all__ = ["find"]


def find(source: Source) -> Found:
    """Every tensor in codes of AWQ. Implements :class:`.Family`."""
    return each_module(source, "awq", ("qweight", "qzeros"), _group_size, _coded)


def _group_size(given: Mapping[str, Any]) -> int:
    """Inputs of a group; -1: all of them. Raises :class:`FormatError` for what this version can't decode."""
    bits, size = (
        given.get("bits", given.get("w_bit", 4)),
        given.get("group_size", given.get("q_group_size", 128)),
    )
    version = given.get("version") or given.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise FormatError(f"expected gemm as version in config.json, found {brief(version)}")
    if type(bits) is not int or bits != 4:
        raise FormatError(f"expected 4 as bits in config.json, found {brief(bits)}")
    return group_size_of(size)


def _coded(source: Source, stem: str, group_size: int) -> Coded:
    codes, zeros, scales = words_of(source.tensors, stem)
    inputs, outputs = codes.shape[0], codes.shape[1] * 8
    size = group_size if group_size > 0 else inputs
    groups = -(-inputs // size)
    why = f"{inputs} inputs in groups of {size} and {outputs} outputs (as {codes.name})"
    check(scales, "F16", (groups, outputs), why)
    check(zeros, "I32", (groups, outputs // 8), why)
    rule = Awq(f"{stem}weight", size)
    return coded(
        rule.name, "F16", (outputs, inputs), {"codes": codes, "zeros": zeros, "scales": scales}, rule
    )
