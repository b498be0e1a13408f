"""The family of bitsandbytes: NF4, FP4 and INT8, as its ``Linear4bit`` and ``Linear8bitLt`` store them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ..catalog.quantized import Found, Source
from ..catalog.records import Coded, Rule, StoredTensor
from ..dtypes import torch_dtype
from ..errors import FormatError
from ..internals.low_bit import dequantize_4bit, quantize_4bit
from ..limits import MAX_QUANT_STATE_BYTES, brief, numel_of, parse_json
from ..objects import frozen
from ..tensors.boxes import Box, whole
from .rules import OneEach, Scaled, by_blocks, check, coded, covering, finite, looked_up, require, reshaped

if TYPE_CHECKING:
    import torch


# ----------------------------------------------------------------------------------------------------
# bitsandbytes' 4-bit codes: NF4 and FP4, two a byte, with a scale for each block of consecutive elements.

#: What the codes stand for, before scaling. Source: ``get_4bit_type`` of bitsandbytes (MIT), which its kernels repeat; they take
#: no stored ``quant_map``. NF4: https://arxiv.org/abs/2305.14314, appendix E.
_BOOKS = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * n / 12 for sign in (1, -1) for n in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}


@frozen
class Nested:
    """Scales that are codes, too (double quantization): ``book[code] × scale of the block + offset``."""

    block: int
    offset: float


@frozen
class FourBit(Rule):
    """``book[code] × scale`` of the block. Implements :class:`.Rule`; parts: ``codes``, ``scales``, maybe ``nested``, ``book``.

    In fp32, rounded once to ``dtype``, as bitsandbytes does on every device. Its CPU kernel for AVX-512 (0.50) takes wrong scales
    where a row is not a whole number of blocks; its plain torch code takes the right ones, as this one does.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    quant_type: str
    block: int
    nested: Nested | None = None

    @property
    def format(self) -> str:
        double = ", scales quantized" if self.nested else ""
        return f"{self.quant_type.upper()} in blocks of {self.block}{double}"

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """The bytes in rows, where no byte is of two rows."""
        *rows, columns = self.shape
        return (-(-math.prod(self.shape) // 2),) if columns % 2 else (*rows, columns // 2)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """The scales in rows, where no block is of two rows."""
        *rows, columns = self.shape
        if columns % self.block:
            return (-(-math.prod(self.shape) // self.block),)
        return (*rows, columns // self.block)

    def boxes(self, box: Box) -> Mapping[str, Box]:
        scales = self._units(box, self.block)
        found = {"codes": self._units(box, 2), "scales": scales}
        if self.nested:
            start, stop = covering(*_span(scales, self.scales_shape), self.nested.block)
            found |= {"nested": Box((start,), (stop,)), "book": whole((256,))}
        return found

    def _units(self, box: Box, unit: int) -> Box:
        """The bytes or blocks that a box needs: rows of them, or all from its first element to its last."""
        if self.shape[-1] % unit:
            start, stop = covering(*_span(box, self.shape), unit)
            return Box((start,), (stop,))
        start, stop = covering(box.start[-1], box.stop[-1], unit)
        return Box((*box.start[:-1], start), (*box.stop[:-1], stop))

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        import torch

        dtype = torch_dtype(self.dtype)
        if not box.numel:
            return torch.empty(box.sizes, dtype=dtype)
        values = self._values(box, parts["codes"])
        scales = finite(self.name, self.scales_of(box, parts))
        if self.shape[-1] % self.block:
            first = covering(*_span(box, self.shape), self.block)[0]
            values.mul_(scales[_places(box, self.shape) // self.block - first])
        else:
            block = (*(1 for _ in self.shape[:-1]), self.block)
            by_blocks(torch.Tensor.mul_, values, scales, box, block)
        return values.to(dtype)

    def _values(self, box: Box, codes: torch.Tensor) -> torch.Tensor:
        """What the codes of a box stand for, unscaled."""
        values = looked_up(codes, _pairs(self.quant_type))
        if self.shape[-1] % 2:
            first = covering(*_span(box, self.shape), 2)[0] * 2
            return values[_places(box, self.shape) - first]
        return values.narrow(-1, box.start[-1] % 2, box.sizes[-1])

    def check_scales(self, box: Box, parts: Mapping[str, torch.Tensor]) -> None:
        finite(self.name, self.scales_of(box, parts))

    def scales_of(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The scales of the blocks that a box touches, decoded."""
        import torch

        found = parts["scales"]
        if self.nested is None:
            return found
        blocks = self._units(box, self.block)
        first = covering(*_span(blocks, self.scales_shape), self.nested.block)[0]
        outer = (_places(blocks, self.scales_shape) // self.nested.block - first).view(-1)
        values = parts["book"].index_select(0, found.reshape(-1).to(torch.int32))
        values.mul_(parts["nested"].index_select(0, outer)).add_(self.nested.offset)
        return values.view(found.shape)


@cache
def _pairs(quant_type: str) -> torch.Tensor:
    """The two values of every byte: that of the high four bits comes first."""
    import torch

    book = book_of(quant_type)
    return torch.cartesian_prod(book, book)


def book_of(quant_type: str) -> torch.Tensor:
    """What the 16 codes stand for, unscaled."""
    import torch

    return torch.tensor(_BOOKS[quant_type], dtype=torch.float32)


def _span(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """From the first element of a box to the end of its last one, in the row-major order of ``shape``."""
    first, last, stride = 0, 0, 1
    for start, stop, n in zip(reversed(box.start), reversed(box.stop), reversed(shape), strict=True):
        first, last, stride = first + start * stride, last + (stop - 1) * stride, stride * n
    return (first, last + 1) if box.numel else (first, first)


def _places(box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """The place of each element of a box in the row-major order of ``shape``."""
    import torch

    found = torch.zeros((), dtype=torch.int64)
    for start, stop, n in zip(box.start, box.stop, shape, strict=True):
        found = found.unsqueeze(-1) * n + torch.arange(start, stop)
    return found


# ----------------------------------------------------------------------------------------------------
# The family of bitsandbytes: NF4, FP4 and INT8, as its ``Linear4bit`` and ``Linear8bitLt`` store them.
#
# 4 bits: ``X.weight`` (two codes a byte, in one column), ``X.weight.absmax``, ``X.weight.quant_map`` and JSON in
# ``X.weight.quant_state.bitsandbytes__nf4``; where the scales are quantized, too, ``X.weight.nested_absmax`` and
# ``X.weight.nested_quant_map``. 8 bits: ``X.weight``, ``X.SCB`` and ``X.weight_format``.

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ROLES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE = ".quant_state."
_KEYS = ("quant_type", "blocksize", "dtype", "shape")
_NESTED_KEYS = ("nested_blocksize", "nested_dtype", "nested_offset")
_LAYOUTS = ("row", "col32", "col_turing", "col_ampere")
#: 1/127 as bitsandbytes writes it.
_STEP = 7.874015718698502e-3


def find_bitsandbytes(source: Source) -> Found:
    """Every tensor in codes of bitsandbytes. Implements :class:`.Family`."""
    found = Found()
    if (source.settings.get("quant_method") or "bitsandbytes") != "bitsandbytes":
        return found
    four = _four_bit_names(source)
    for name, states in four.items():
        found.take(partial(_four_bit, source, name, states))
    stems = [stem for stem in _eight_bit_stems(source) if f"{stem}weight" not in four]
    for stem in stems:
        found.take(partial(_eight_bit, source, stem))
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
    # Two products, each rounded to fp32, in the order of bitsandbytes' ``int8_vectorwise_dequant``.
    rule = Scaled(
        "bitsandbytes",
        "INT8 with a scale per row",
        name,
        "F32",
        OneEach(),
        OneEach(dims=1),
        (1, max(1, codes.shape[1])),
        factor=_STEP,
    )
    return coded(name, "F32", codes.shape, {"codes": codes, "scales": scales}, rule)


def _check_layout(source: Source, name: str) -> None:
    """Codes of old releases may lie as some GPU's matrix unit took them."""
    stored = source.tensors[name]
    if stored.dtype != "U8" or stored.nbytes != 1:
        raise FormatError(f"expected one U8, found {stored.dtype} {list(stored.shape)}", path=name)
    code = source.content(name)[0]
    if code:
        layout = _LAYOUTS[code] if code < len(_LAYOUTS) else str(code)
        raise FormatError(f"expected rows of codes (0), found layout {layout} ({code})", path=name)


# ----------------------------------------------------------------------------------------------------
# 4-bit codes as blocks: each row of a tensor of bytes holds a block's codes and then its scale.
#
# A weight of ``n`` elements in blocks of ``b`` is one U8 tensor of ⌈n / b⌉ rows and ``b / 2 + 4`` columns: ``b`` codes, two a byte, and
# the scale in fp32 (little-endian). FSDP2 cuts rows, so each cut falls on a block, whatever the weight's shape, and every shard can
# be decoded alone. (llama.cpp's ``Q4_0`` stores blocks so, too.) The codes and the scales are bitsandbytes' own, bit for bit.

#: A scale in fp32.
SCALE_BYTES = 4


@frozen
class Blocks:
    """How a weight lies in blocks."""

    shape: tuple[int, ...]
    """Of the weight."""
    quant_type: str
    """``nf4`` or ``fp4``."""
    block: int
    """Elements of a block."""
    dtype: str
    """The stored code of the dtype that the weight had before, and has again when it is decoded."""

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Blocks, and bytes of each."""
        return -(-math.prod(self.shape) // self.block), self.block // 2 + SCALE_BYTES

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and the scales of blocks, each in one dim and in memory of its own."""
        import torch

        half = self.block // 2
        return rows[:, :half].reshape(-1), rows[:, half:].contiguous().view(torch.float32).view(-1)

    def joined(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Blocks of codes and scales; the last block is filled up with zeros."""
        import torch

        rows = torch.zeros(scales.numel(), self.stored_shape[1], dtype=torch.uint8)
        half = self.block // 2
        padded = torch.nn.functional.pad(codes.reshape(-1), (0, scales.numel() * half - codes.numel()))
        rows[:, :half] = padded.view(-1, half)
        rows[:, half:] = scales.reshape(-1, 1).view(torch.uint8)
        return rows

    def decoded(self, rows: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The elements of blocks ``start`` to ``stop``, in the order of the weight, in one dim. On the device of ``rows``."""
        codes, scales = self.split(rows)
        count = min(stop * self.block, math.prod(self.shape)) - start * self.block
        values = dequantize_4bit(
            codes, scales, (1, len(scales) * self.block), self.quant_type, self.block, torch_dtype(self.dtype)
        )
        return values.view(-1)[:count]

    def parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes of the whole weight, as many as bitsandbytes has of it, and the scales."""
        codes, scales = self.split(rows)
        return codes[: -(-math.prod(self.shape) // 2)], scales

    def weight(self, rows: torch.Tensor) -> torch.Tensor:
        """The weight that all blocks stand for. On the device of ``rows``."""
        codes, scales = self.parts(rows)
        dtype = torch_dtype(self.dtype)
        return dequantize_4bit(codes, scales, self.shape, self.quant_type, self.block, dtype)

    def elements(self, box: Box) -> tuple[int, int]:
        """The elements, in the order of the weight, of the blocks that a box of rows and columns touches."""
        return box.start[0] * self.block, min(box.stop[0] * self.block, math.prod(self.shape))


@frozen
class Joined(Rule):
    """Blocks of codes and scales that bitsandbytes stored. Implements :class:`.Rule`; parts as :class:`.FourBit`'s.

    Scales that are quantized, too, are decoded: a block then has the scale that bitsandbytes works out of them.
    """

    blocks: Blocks
    flat: FourBit
    """The rule of the weight in one dim."""

    @property
    def format(self) -> str:
        return f"{self.flat.format}, kept"

    def boxes(self, box: Box) -> Mapping[str, Box]:
        return self.flat.boxes(self._elements(box))

    def check_scales(self, box: Box, parts: Mapping[str, torch.Tensor]) -> None:
        self.flat.check_scales(self._elements(box), parts)

    def _elements(self, box: Box) -> Box:
        start, stop = self.blocks.elements(box)
        return Box((start,), (stop,))

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scales = finite(self.flat.name, self.flat.scales_of(self._elements(box), parts))
        return self.blocks.joined(parts["codes"], scales)[:, box.start[1] : box.stop[1]]


@frozen
class _Encoded(Rule):
    """Blocks quantized from a plain weight, by bitsandbytes. Implements :class:`.Rule`; part: ``weight``."""

    blocks: Blocks
    source: StoredTensor
    is_transposed: bool
    """The weight is stored with inputs as rows (GPT-2's ``Conv1D``)."""

    @property
    def format(self) -> str:
        return f"{self.source.dtype}, quantized to {self.blocks.quant_type.upper()} in blocks of {self.blocks.block}"

    def boxes(self, box: Box) -> Mapping[str, Box]:
        first, last = self._rows(box)
        columns = self.blocks.shape[1]
        if self.is_transposed:
            return {"weight": Box((0, first), (columns, last))}
        return {"weight": Box((first, 0), (last, columns))}

    def _rows(self, box: Box) -> tuple[int, int]:
        start, stop = self.blocks.elements(box)
        return start // self.blocks.shape[1], -(-stop // self.blocks.shape[1])

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        (start, stop), blocks = self.blocks.elements(box), self.blocks
        weight = parts["weight"].to(torch_dtype(blocks.dtype))
        if self.is_transposed:
            weight = weight.t()
        before = self._rows(box)[0] * blocks.shape[1]
        values = weight.reshape(-1)[start - before : stop - before].contiguous()
        codes, scales = quantize_4bit(values, blocks.quant_type, blocks.block)
        return blocks.joined(codes, finite(self.source.name, scales))[:, box.start[1] : box.stop[1]]


def joined(one: Coded, dtype: str) -> tuple[Blocks, Coded] | None:
    """A weight in bitsandbytes' 4-bit codes as blocks; None if it is stored in another format. ``dtype``: what it decodes to."""
    if not isinstance(one.rule, FourBit) or len(one.rule.shape) != 2:
        return None
    rule = one.rule
    blocks = Blocks(rule.shape, rule.quant_type, rule.block, dtype)
    flat = replace(rule, shape=(math.prod(rule.shape),))
    shapes = {"codes": flat.codes_shape, "scales": flat.scales_shape}
    parts = {
        role: reshaped(part, part.dtype, shapes[role]) if role in shapes else part
        for role, part in one.parts.items()
    }
    return blocks, coded(one.tensor.name, "U8", blocks.stored_shape, parts, Joined(blocks, flat))


def encoded(stored: StoredTensor, blocks: Blocks, *, is_transposed: bool) -> Coded:
    """A plain stored weight, quantized while it is read: no more than the rows of a few blocks at a time."""
    rule = _Encoded(blocks, stored, is_transposed)
    return coded(stored.name, "U8", blocks.stored_shape, {"weight": stored}, rule)
