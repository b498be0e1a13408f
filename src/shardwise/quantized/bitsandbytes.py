"""The family of bitsandbytes: NF4, FP4 and INT8, as its ``Linear4bit`` and ``Linear8bitLt`` store them.

4 bits: ``X.weight`` (two codes a byte, in one column), ``X.weight.absmax``, ``X.weight.quant_map`` and JSON in
``X.weight.quant_state.bitsandbytes__nf4``; where the scales are quantized, too, ``X.weight.nested_absmax`` and
``X.weight.nested_quant_map``. 8 bits: ``X.weight``, ``X.SCB`` and ``X.weight_format``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ..catalog.records import StoredTensor
from ..errors import FormatError, SourceError
from ..limits import MAX_QUANT_STATE_BYTES, brief, numel_of, parse_json
from .coded import Coded, coded
from .families import Found, Source
from .fourbit import FourBit, Nested
from .rowint8 import RowInt8
from .stored import check, require, reshaped

__all__ = ["find"]

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ROLES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE = ".quant_state."
_KEYS = ("quant_type", "blocksize", "dtype", "shape")
_NESTED_KEYS = ("nested_blocksize", "nested_dtype", "nested_offset")
_LAYOUTS = ("row", "col32", "col_turing", "col_ampere")


def find(source: Source) -> Found:
    """Every tensor in codes of bitsandbytes. Implements :class:`.Family`."""
    found = Found()
    if (source.settings.get("quant_method") or "bitsandbytes") != "bitsandbytes":
        return found
    four = _four_bit_names(source)
    stems = [stem for stem in _eight_bit_stems(source) if f"{stem}weight" not in four]
    makers = [partial(_four_bit, source, name, states) for name, states in four.items()]
    makers += [partial(_eight_bit, source, stem) for stem in stems]
    for make in makers:
        try:
            found.add(make())
        except SourceError as error:
            found.problems.append(str(error))
    found.problems += _without_scales(source, four)
    of_state = {one for name, states in four.items() for one in (*states, f"{name}.quant_map")}
    found.unused = (of_state | {f"{stem}weight_format" for stem in stems}) & source.tensors.keys()
    return found


def _four_bit_names(source: Source) -> dict[str, list[str]]:
    """The tensors in codes of 4 bits, each with the names of its quantization states."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in source.tensors:
        of, state, _ = name.partition(_STATE)
        if state:
            found[of].append(name)
        elif name.rpartition(".")[2] in _ROLES:
            found[name.rpartition(".")[0]] += []
    return dict(found)


def _eight_bit_stems(source: Source) -> list[str]:
    """The modules with codes of 8 bits, each as the start of its tensors' names."""
    found = set()
    for name, stored in source.tensors.items():
        stem, dot, last = name.rpartition(".")
        bare = last == "weight" and stored.dtype == "I8" and _is_named(source)
        if bare or last in ("SCB", "weight_format"):
            found.add(stem + dot)
    return sorted(found)


def _is_named(source: Source) -> bool:
    """Whether config.json says that bitsandbytes wrote the source; releases of old wrote no ``quant_method``."""
    return any(source.settings.get(key) for key in ("quant_method", "load_in_4bit", "load_in_8bit"))


def _without_scales(source: Source, four: Mapping[str, list[str]]) -> Iterator[str]:
    """Weights in bytes that nothing belongs to."""
    if _is_named(source):
        for name, stored in source.tensors.items():
            if stored.dtype == "U8" and name.endswith(".weight") and name not in four:
                yield f"{name}: U8 codes without scales; expected {name}.absmax and {name}{_STATE}bitsandbytes__nf4"


def _four_bit(source: Source, name: str, states: list[str]) -> Coded:
    tensors = source.tensors
    codes = require(tensors, name, name)
    absmax = require(tensors, f"{name}.absmax", name)
    if len(states) != 1:
        got = f"found {', '.join(states)}" if states else "it is missing"
        raise FormatError(f"expected one {name}{_STATE}bitsandbytes__nf4 or …fp4; {got}", path=name)
    rule = _rule(source, name, states[0])
    _agree(source.settings, rule, states[0])
    check(require(tensors, f"{name}.quant_map", name), "F32", (16,), "16 codes")
    count = math.prod(rule.shape)
    _check_codes(codes, count)
    blocks = -(-count // rule.block)
    check(absmax, "U8" if rule.nested else "F32", (blocks,), f"{count} elements in blocks of {rule.block}")
    parts = {
        "codes": reshaped(codes, "U8", rule.codes_shape),
        "scales": reshaped(absmax, absmax.dtype, rule.scales_shape),
    }
    if not rule.nested and f"{name}.nested_quant_map" in tensors:
        raise FormatError(f"surplus: the scales of {name} are not quantized", path=f"{name}.nested_quant_map")
    if rule.nested:
        parts["nested"] = require(tensors, f"{name}.nested_absmax", name)
        why = f"{blocks} scales in blocks of {rule.nested.block}"
        check(parts["nested"], "F32", (-(-blocks // rule.nested.block),), why)
        parts["book"] = require(tensors, f"{name}.nested_quant_map", name)
        check(parts["book"], "F32", (256,), "256 codes")
    return coded(name, rule.dtype, rule.shape, parts, rule)


def _check_codes(codes: StoredTensor, count: int) -> None:
    """bitsandbytes packs into bytes, and may call them elements of another dtype (``bnb_4bit_quant_storage``)."""
    nbytes = -(-count // 2)
    itemsize = {"F16": 2, "BF16": 2, "F32": 4}.get(codes.dtype, 1)
    if nbytes % itemsize:
        itemsize = 1
    dtype = codes.dtype if itemsize > 1 else "U8"
    check(codes, dtype, (nbytes // itemsize, 1), f"{count} elements, two a byte, in one column")


def _rule(source: Source, name: str, state: str) -> FourBit:
    """The rule that a quantization state describes. Raises :class:`FormatError` for anything but what bitsandbytes writes."""
    document = _document(source, state)
    names = [*_KEYS, *(_NESTED_KEYS if f"{name}.nested_absmax" in source.tensors else ())]
    if not isinstance(document, dict) or set(document) != set(names):
        got = sorted(document) if isinstance(document, dict) else document
        raise FormatError(f"expected the keys {', '.join(names)}; found {brief(got)}", path=state)
    quant_type, block, dtype = (document[key] for key in ("quant_type", "blocksize", "dtype"))
    _one_of(state, "quant_type", quant_type, (state.rpartition("bitsandbytes__")[2],))
    _one_of(state, "quant_type", quant_type, ("nf4", "fp4"))
    _one_of(state, "blocksize", block, _BLOCKS)
    _one_of(state, "dtype", dtype, tuple(_DTYPES))
    shape = document["shape"]
    if not isinstance(shape, list) or not shape:
        raise FormatError(f"expected sizes as shape, found {brief(shape)}", path=state)
    numel_of(shape, "shape", path=state)
    return FourBit(name, _DTYPES[dtype], tuple(shape), quant_type, block, _nested(document, state))


def _document(source: Source, state: str) -> Any:
    stored = source.tensors[state]
    if stored.dtype != "U8" or not 0 < stored.nbytes <= MAX_QUANT_STATE_BYTES:
        raise FormatError(
            f"expected JSON in U8 of at most {MAX_QUANT_STATE_BYTES} bytes, found {stored.dtype} {list(stored.shape)}",
            path=state,
        )
    return parse_json(source.content(state), state, "quantization state")


def _nested(document: Mapping[str, Any], state: str) -> Nested | None:
    if "nested_offset" not in document:
        return None
    block, dtype, offset = (document[key] for key in _NESTED_KEYS)
    _one_of(state, "nested_blocksize", block, _BLOCKS)
    _one_of(state, "nested_dtype", dtype, ("float32",))
    # A whole number of JSON may have any number of digits.
    if type(offset) not in (int, float) or not abs(offset) <= 3.4e38:
        raise FormatError(f"expected a number as nested_offset, found {brief(offset)}", path=state)
    return Nested(block, float(offset))


def _one_of(state: str, key: str, value: object, known: tuple[object, ...]) -> None:
    """Raise unless a value is one of some: True is not 1, and no list can be looked up."""
    if not any(type(value) is type(one) and value == one for one in known):
        expected = " or ".join(map(str, known))
        raise FormatError(f"expected {expected} as {key}, found {brief(value)}", path=state)


def _agree(settings: Mapping[str, Any], rule: FourBit, state: str) -> None:
    """Raise :class:`FormatError` if the model's config says otherwise. What it leaves open, the state decides."""
    found = {
        "load_in_8bit": False,
        "bnb_4bit_quant_type": rule.quant_type,
        "bnb_4bit_use_double_quant": rule.nested is not None,
    }
    for key, value in found.items():
        if settings.get(key, value) != value:
            got = f"the tensor is stored as {rule.format}"
            raise FormatError(f"config.json says {key} = {brief(settings[key])}, but {got}", path=state)


def _eight_bit(source: Source, stem: str) -> Coded:
    tensors, name = source.tensors, f"{stem}weight"
    codes = require(tensors, name, name)
    scales = require(tensors, f"{stem}SCB", name)
    if source.settings.get("load_in_4bit") is True:
        raise FormatError("config.json says load_in_4bit, but the tensor is stored in INT8", path=name)
    if codes.dtype != "I8" or len(codes.shape) != 2:
        raise FormatError(
            f"expected I8 in two dims next to {scales.name}, found {codes.dtype} {list(codes.shape)}",
            path=name,
        )
    check(scales, "F32", codes.shape[:1], f"the {codes.shape[0]} rows of {name}")
    if f"{stem}weight_format" in tensors:
        _check_layout(source, f"{stem}weight_format")
    return coded(name, "F32", codes.shape, {"codes": codes, "scales": scales}, RowInt8(name))


def _check_layout(source: Source, name: str) -> None:
    """Codes of old releases may lie as some GPU's matrix unit took them."""
    stored = source.tensors[name]
    if stored.dtype != "U8" or stored.nbytes != 1:
        raise FormatError(f"expected one U8, found {stored.dtype} {list(stored.shape)}", path=name)
    code = source.content(name)[0]
    if code:
        layout = _LAYOUTS[code] if code < len(_LAYOUTS) else str(code)
        raise FormatError(f"expected rows of codes (0), found layout {layout} ({code})", path=name)
