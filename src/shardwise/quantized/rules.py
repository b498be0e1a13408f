"""Codes of any arrangement times a scale per tensor, channel, group or block: the one rule that most formats are rows of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING

from ..catalog.records import Chunk, Coded, Rule, StoredTensor
from ..dtypes import torch_dtype
from ..errors import FormatError, IntegrityError
from ..objects import frozen
from ..tensors.boxes import Box, whole

if TYPE_CHECKING:
    import torch


# ----------------------------------------------------------------------------------------------------
# The rule: codes, less zero points, times scales.

_SLAB_ELEMENTS = 512 * 1024


@frozen
class Scaled(Rule):
    """``(code − zero) × scale`` of the block. Implements :class:`.Rule`.

    Parts: ``codes``, ``scales``, maybe ``zeros``, ``global`` (a divisor of all scales), ``groups`` (the group of each column). In fp32,
    rounded once to ``dtype``. That is bitwise what arithmetic in 16 bits gives: codes and zeros are integers below 256 or floats of
    few bits, so their difference, and its product with a scale of 16 bits, are exact in fp32. A block at an edge may be cut short.
    """

    method: str
    """The library that stores such codes, as ``quant_method`` names it."""
    format: str
    name: str
    dtype: str
    codes: Codes
    scales: Codes
    block: tuple[int, ...]
    """Elements of a block in each dim; one scale each. The tensor's own sizes for one scale in all."""
    zeros: Codes | None = None
    """How zero points are stored. There are as many as scales."""
    has_global: bool = False
    groups: int | None = None
    """How many groups there are, if the source says the group of each column."""
    in_order: bool = False
    """Whether these groups must be those of the columns' places; otherwise columns of a box may be of any group."""
    factor: float = 1.0
    """Multiplies what comes out."""

    @property
    def is_turned(self) -> bool:  # type: ignore[override]
        return self.codes.is_turned

    @property
    def columns_together(self) -> int:  # type: ignore[override]
        if not self.is_turned or len(self.block) != 2:
            return 0
        return math.lcm(self.codes.columns_in_word, 1 if self._is_by_index else self.block[1])

    @property
    def _is_by_index(self) -> bool:
        return self.groups is not None and not self.in_order

    def boxes(self, box: Box) -> Mapping[str, Box]:
        blocks = self._blocks(box)
        found = {"codes": self.codes.box(box), "scales": self.scales.box(blocks)}
        if self.zeros is not None:
            found["zeros"] = self.zeros.box(blocks)
        if self.has_global:
            found["global"] = whole((1,))
        if self.groups is not None:
            found["groups"] = Box(box.start[1:], box.stop[1:])
        return found

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.opened(box, parts)(box)

    def opened(self, box: Box, parts: Mapping[str, torch.Tensor]) -> Callable[[Box], torch.Tensor]:
        """As :meth:`.Rule.opened`: codes, zero points and scales that are stored turned are transposed once."""
        import torch

        dtype = torch_dtype(self.dtype)
        if not box.numel:
            return lambda inner: torch.empty(inner.sizes, dtype=dtype)
        blocks = self._blocks(box)
        scales = _numbers(self.scales, blocks, parts["scales"])
        scales = finite(self.name, scales / parts["global"] if self.has_global else scales)
        zeros = None if self.zeros is None else _numbers(self.zeros, blocks, parts["zeros"])
        if zeros is not None and bool((zeros == zeros[:1, :1]).all()):  # symmetric codes: nothing to gather
            zeros = zeros[:1, :1]
        if self.codes.in_halves:
            scales = scales.half()
        groups = None if self.groups is None else self._check_groups(parts["groups"], box)
        numbers, lifted = self.codes.opened(box, parts["codes"]), cache(lambda lift: _lifted(scales, lift))

        def of_blocks(slab: Box, found: torch.Tensor) -> torch.Tensor:
            """The scales or zero points of a slab's blocks, or of its columns if each names its group."""
            if found.numel() == 1:
                return found
            found = found[self._blocks(slab).slices_in(blocks)]
            if groups is None or self.in_order:
                return found
            return found.index_select(1, groups[slab.start[1] - box.start[1] : slab.stop[1] - box.start[1]])

        def values_of(slab: Box) -> torch.Tensor:
            values, lift = numbers(slab)
            scales, rest = lifted(lift)
            block = (1, 1) if self._is_by_index else self.block
            if zeros is not None:
                by_blocks(torch.Tensor.sub_, values, of_blocks(slab, zeros), slab, block)
            if rest != 1:
                values.mul_(rest)
            by_blocks(torch.Tensor.mul_, values, of_blocks(slab, scales), slab, block)
            return values if self.factor == 1 else values.mul_(self.factor)

        def decode(inner: Box) -> torch.Tensor:
            if not inner.numel:
                return torch.empty(inner.sizes, dtype=dtype)
            if self.is_turned or self.dtype == "F32":  # F32 holds what 16 bits do, and is faster to cast from
                values = values_of(inner)
                if self.dtype != "F16" or self.codes.in_halves:
                    return values.to(torch.float32)
                return values.copy_(values.to(dtype))
            found = torch.empty(inner.sizes, dtype=dtype)
            for slab in _slabs(inner):
                found[slab.slices_in(inner)] = values_of(slab)
            return found

        return decode

    def check_scales(self, box: Box, parts: Mapping[str, torch.Tensor]) -> None:
        if "groups" in parts:
            self._check_groups(parts["groups"], box)
        scales, rows = parts["scales"], 1
        if scales.numel() > _SLAB_ELEMENTS:  # in fp32, all of a large tensor would be fresh memory each time
            rows = max(1, _SLAB_ELEMENTS * scales.shape[0] // scales.numel())
        for some in scales.split(rows) if scales.numel() > _SLAB_ELEMENTS else (scales,):
            found = finite(self.name, some)
            if "global" in parts:
                finite(self.name, found / parts["global"])

    def _check_groups(self, groups: torch.Tensor, box: Box) -> torch.Tensor:
        """The group of each column. Raises :class:`IntegrityError` for one that doesn't exist, or isn't that of the column's place."""
        import torch

        if self.in_order:
            size = self.block[1]
            expected = torch.arange(box.start[1], box.stop[1], dtype=torch.int32) // size
            if not torch.equal(groups, expected):
                raise IntegrityError(
                    f"{self.name}: g_idx is not in order, which config.json says it is: expected desc_act true, or inputs in "
                    f"groups of {size}"
                )
        elif groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < (self.groups or 0):
            raise IntegrityError(
                f"{self.name}: expected groups from 0 to {(self.groups or 0) - 1} in g_idx, found {int(groups.min())} to {int(groups.max())}"
            )
        return groups

    def _blocks(self, box: Box) -> Box:
        """The blocks whose scales a box needs."""
        if self._is_by_index:
            return Box((box.start[0], 0), (box.stop[0], self.groups or 0))
        ends = [covering(a, b, n) for a, b, n in zip(box.start, box.stop, self.block, strict=True)]
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def coded(
    name: str, dtype: str, shape: tuple[int, ...], parts: Mapping[str, StoredTensor], rule: Rule
) -> Coded:
    """The tensor called ``name``, as its parts stand for it. ``dtype``: that of what the rule decodes."""
    first = next(iter(parts.values())).chunks[0]
    path = f"{first.path}#{first.offset_bytes:016d}#{name}"
    return Coded(StoredTensor(name, dtype, shape, (Chunk(whole(shape), path, 0),)), dict(parts), rule)


def require(tensors: Mapping[str, StoredTensor], name: str, of: str) -> StoredTensor:
    """The stored tensor ``name``, without which ``of`` can't be decoded. Raises :class:`FormatError` if it is missing."""
    if name not in tensors:
        raise FormatError(f"missing: {of} can't be decoded without it", path=name)
    return tensors[name]


def check(stored: StoredTensor, dtype: str, shape: tuple[int, ...], why: str) -> None:
    """Raise :class:`FormatError` unless a stored tensor has this dtype and shape. ``why``: what they follow from."""
    if (stored.dtype, stored.shape) != (dtype, shape):
        raise FormatError(
            f"expected {dtype} {list(shape)} for {why}, found {stored.dtype} {list(stored.shape)}",
            path=stored.name,
        )


def reshaped(stored: StoredTensor, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    """The same bytes as a tensor of another dtype and shape. Raises :class:`FormatError` if they are not of one piece."""
    if len(stored.chunks) != 1:
        raise FormatError(f"expected one piece, found {len(stored.chunks)}", path=stored.name)
    chunk = stored.chunks[0]
    found = StoredTensor(stored.name, dtype, shape, (Chunk(whole(shape), chunk.path, chunk.offset_bytes),))
    assert found.nbytes == stored.nbytes
    return found


def _slabs(box: Box) -> Iterator[Box]:
    """The box in pieces along its first dim, whose numbers in fp32 stay in a core's own cache from one operation to the next."""
    rows = max(1, _SLAB_ELEMENTS * box.sizes[0] // max(1, box.numel))
    for start in range(box.start[0], box.stop[0], rows):
        stop = min(start + rows, box.stop[0])
        yield Box((start, *box.start[1:]), (stop, *box.stop[1:]))


def _numbers(codes: Codes, box: Box, stored: torch.Tensor) -> torch.Tensor:
    """The numbers of a box in fp32, none divided by anything."""
    found, lift = codes.opened(box, stored)(box)
    return found.mul_(2.0**lift) if lift else found


def _lifted(scales: torch.Tensor, lift: int) -> tuple[torch.Tensor, float]:
    """Scales times ``2 ** lift``, which values lack, and 1; or the scales and ``2 ** lift``, if one would overflow."""
    high = scales * 2.0**lift if lift else scales
    return (high, 1.0) if _all_finite(high) else (scales, 2.0**lift)


def finite(name: str, scales: torch.Tensor) -> torch.Tensor:
    """The scales in fp32. Raises :class:`IntegrityError` if one is NaN or infinite."""
    found = floats(scales)
    if not _all_finite(found):
        raise IntegrityError(f"{name}: a scale is NaN or infinite")
    return found


def _all_finite(numbers: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite. Their sum would be, too, and takes a fraction of the time; it may also overflow."""
    return isfinite(numbers.sum().item()) or bool(numbers.isfinite().all())


def by_blocks(
    operation: Callable[[torch.Tensor, torch.Tensor], object],
    values: torch.Tensor,
    scales: torch.Tensor,
    box: Box,
    block: tuple[int, ...],
) -> None:
    """Change the elements of a box in place by the scales (or zero points) of its blocks, which are copied as little as possible.

    Blocks are dims of their own in the views that ``operation`` gets, along the last dim that is cut into blocks. So the blocks that are
    whole come as one view, and a block at an end that is cut as its own. Scales are spread along the other dims.
    """
    cut = [d for d, n in enumerate(block) if n > 1 and scales.shape[d] > 1]
    for d in cut[:-1]:
        scales = scales.repeat_interleave(block[d], d).narrow(d, box.start[d] % block[d], box.sizes[d])
    if not cut:
        operation(values, scales)
        return
    dim = cut[-1]
    start, stop, n = box.start[dim], box.stop[dim], block[dim]
    whole = min(stop, -(-start // n) * n)
    tail = max(whole, stop // n * n)
    for begin, end in ((start, whole), (whole, tail), (tail, stop)):
        if begin < end:
            first, last = begin // n - start // n, -(-end // n) - start // n
            view = values.narrow(dim, begin - start, end - begin).unflatten(dim, (last - first, -1))
            operation(view, scales.narrow(dim, first, last - first).unsqueeze(dim + 1))


def covering(start: int, stop: int, unit: int) -> tuple[int, int]:
    """The units (bytes, words, groups) that hold the elements from ``start`` to ``stop``; none for no elements."""
    first = start // unit
    return first, max(first, -(-stop // unit)) if stop > start else first


# ----------------------------------------------------------------------------------------------------
# How numbers are arranged in a stored tensor: codes, zero points, scales.

#: The numbers of a box in fp32, in memory of their own, divided by 2 to a power; and the power.
Numbers = Callable[[Box], tuple["torch.Tensor", int]]


class Codes:
    """An arrangement of numbers."""

    __slots__ = ()
    bits: int
    """Of a code."""
    is_turned = False
    """Whether the last two dims are stored the other way round."""
    columns_in_word = 1
    """Columns that share a word."""
    in_halves = False
    """Whether numbers are in F16, for arithmetic in F16 that is exact, and all with the same number added."""

    def box(self, box: Box) -> Box:
        """The box of the stored tensor that holds the numbers of a box."""
        raise NotImplementedError

    def opened(self, box: Box, stored: torch.Tensor) -> Numbers:
        """A function that gives the numbers of any box within ``box``. ``stored``: the elements of :meth:`box`."""
        outer = self.box(box)
        stored = stored.reshape(outer.sizes)
        return lambda inner: self.numbers(inner, stored[self.box(inner).slices_in(outer)])

    def numbers(self, box: Box, stored: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The numbers of a box, from the elements of :meth:`box`."""
        raise NotImplementedError


def _turned(box: Box) -> Box:
    """The box with its last two dims the other way round."""
    (*rest, row, column), (*ends, row_end, column_end) = box.start, box.stop
    return Box((*rest, column, row), (*ends, column_end, row_end))


@frozen
class OneEach(Codes):
    """One stored element for each number."""

    dims: int | None = None
    """Of the stored tensor, if it has fewer than the numbers: a scale for each row, or for the whole tensor."""
    is_turned: bool = False
    bits: int = 8

    def box(self, box: Box) -> Box:
        found = Box(box.start[: self.dims], box.stop[: self.dims])
        return _turned(found) if self.is_turned else found

    def numbers(self, box: Box, stored: torch.Tensor) -> tuple[torch.Tensor, int]:
        found, lift = lowered(stored.transpose(-1, -2).contiguous() if self.is_turned else stored)
        return found.reshape(box.sizes), lift


#: Fewer numbers go through the table: each call of torch costs as much as some thousand of them.
_MANY = 4096
#: The sign of E4M3, and its exponent and mantissa, where fp16 has them; and how much larger the bias of the exponent is there.
_E4M3_IN_FP16, _E4M3_BIAS = -0x8000 | 0x3F80, 15 - 7


def floats(stored: torch.Tensor) -> torch.Tensor:
    """Stored numbers as fp32, exactly, in memory of their own. FP8 by shifts or through a table: ten and four times as fast as
    torch's cast on CPUs."""
    found, lift = lowered(stored)
    return found.mul_(2.0**lift) if lift else found


def lowered(stored: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Stored numbers as fp32, divided by 2 to a power, and the power. A caller that multiplies by scales saves an operation. Bytes are
    exponents of two (UE8M0).
    """
    import torch

    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    if stored.is_cpu and stored.numel() >= _MANY:
        found = _shifted(stored)
        if found is not None:
            return found
    if stored.is_cpu and stored.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        indices = stored.view(torch.uint8).to(torch.int32).reshape(-1)
        return _fp8_numbers(stored.dtype).index_select(0, indices).view(stored.shape), 0
    return stored.to(torch.float32, copy=True), 0


def _shifted(stored: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """FP8 as fp32 by way of fp16, which has its bits, too, and holds subnormal numbers at full speed; None if there are NaN."""
    import torch

    if stored.dtype == torch.float8_e5m2:  # the upper byte of fp16
        wide = stored.view(torch.int8).to(torch.int16)
        return wide.bitwise_left_shift_(8).view(torch.float16).to(torch.float32), 0
    if stored.dtype != torch.float8_e4m3fn:
        return None
    if int((stored.view(torch.uint8) & 0x7F).amax()) == 0x7F:  # NaN of either sign
        return None
    bits = stored.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_E4M3_IN_FP16)
    return bits.view(torch.float16).to(torch.float32), _E4M3_BIAS


@cache
def _fp8_numbers(dtype: torch.dtype) -> torch.Tensor:
    """The numbers that the 256 bytes stand for."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


# ----------------------------------------------------------------------------------------------------
# FP4 (E2M1): a sign, two bits of exponent, one of mantissa; two in each byte, low bits first.
#
# Their four bits, put at the same places of an fp16 number, make one that is smaller by 2**14: exponents of E2M1 start at 1, those
# of fp16 at 15. Zeros and subnormals come out right, too. A shift and a mask for many numbers at once cost less than a table.

#: Numbers come divided by 2 to this power.
_FP4_LIFT = 14
#: Sign, the two lowest bits of the exponent, the highest of the mantissa, of fp16 as int16.
_MASK = 0x8E00 - 0x10000


@frozen
class Fp4Pairs(Codes):
    """Pairs along the last of two dims."""

    bits = 4

    def box(self, box: Box) -> Box:
        (row, column), (last_row, last_column) = box.start, box.stop
        return Box((row, column // 2), (last_row, -(-last_column // 2)))

    def numbers(self, box: Box, stored: torch.Tensor) -> tuple[torch.Tensor, int]:
        import torch

        octets = stored.to(torch.int32, memory_format=torch.contiguous_format)
        # the highest bits of each half of 32 become its number's
        halves = (octets << 24).bitwise_or_(octets.bitwise_left_shift_(12)).view(torch.int16)
        numbers = halves.bitwise_right_shift_(3).bitwise_and_(_MASK).view(torch.float16)
        first = box.start[1] % 2
        return numbers[:, first : first + box.sizes[1]].to(torch.float32), _FP4_LIFT


def _numbers_of_halves(halves: torch.Tensor) -> torch.Tensor:
    """The four numbers of each int16, in rows one after another, in fp16."""
    import torch

    found = torch.empty((halves.shape[0], 4, halves.shape[1]), dtype=torch.int16, device=halves.device)
    for k in range(4):
        torch.bitwise_left_shift(halves, 12 - 4 * k, out=found[:, k])
    return found.bitwise_right_shift_(3).bitwise_and_(_MASK).view(torch.float16).flatten(0, 1)


@frozen
class Fp4Columns(Codes):
    """Experts [experts, rows, blocks of 32 columns, 16 bytes], turned: gpt-oss. Codes are transposed four at a time: numbers would be
    four times as many bytes.
    """

    bits, is_turned = 4, True

    def box(self, box: Box) -> Box:
        (expert, column, row), (last_expert, last_column, last_row) = box.start, box.stop
        first, last = column // 32, -(-last_column // 32)
        word, last_word = 0, 4
        if last - first == 1:  # of one block, only some words
            word, last_word = column % 32 // 8, -(-(last_column - first * 32) // 8)
        return Box((expert, row, first, 4 * word), (last_expert, last_row, last, 4 * last_word))

    def opened(self, box: Box, stored: torch.Tensor) -> Numbers:
        import torch

        experts = [_transposed_halves(octets) for octets in stored.flatten(2)]
        # Of one block, only some words were read.
        unit = 8 if self.box(box).sizes[2] == 1 else 32
        first = box.start[1] // unit * unit

        def numbers(inner: Box) -> tuple[torch.Tensor, int]:
            own, _, rows = inner.slices_in(box)
            word, last_word = covering(inner.start[1], inner.stop[1], 8)
            halves = slice(2 * word - first // 4, 2 * last_word - first // 4)
            made = [_numbers_of_halves(one[halves, rows]) for one in experts[own]]
            found = torch.stack(made) if len(made) > 1 else made[0].unsqueeze(0)
            return found[:, inner.start[1] - 8 * word :][:, : inner.sizes[1]].to(torch.float32), _FP4_LIFT

        return numbers


# ----------------------------------------------------------------------------------------------------
# Integers of few bits, packed without gaps into int32 words: element *i* has the bits from ``i * bits`` on.
#
# Source: ``pack_to_int32`` of compressed-tensors. Codes are unsigned; half their range is subtracted.

_WORD_BITS = 32


def packed_size(size: int, bits: int) -> int:
    """Words that hold ``size`` integers."""
    return -(-size * bits // _WORD_BITS)


@frozen
class PackedIntegers(Codes):
    """Integers packed along one of two dims."""

    bits: int
    dim: int = 1
    """Along which they are packed."""

    def box(self, box: Box) -> Box:
        start, stop = list(box.start), list(box.stop)
        start[self.dim] = box.start[self.dim] * self.bits // _WORD_BITS
        stop[self.dim] = packed_size(box.stop[self.dim], self.bits)
        return Box(tuple(start), tuple(stop))

    def numbers(self, box: Box, stored: torch.Tensor) -> tuple[torch.Tensor, int]:
        import torch

        words = stored if self.dim == 1 else stored.t()
        if words.stride(1) != 1:
            words = words.clone(memory_format=torch.contiguous_format)
        found = self._integers(words, box.start[self.dim], box.stop[self.dim]).to(torch.float32)
        return found if self.dim == 1 else found.t(), 0

    def _integers(self, words: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of each row, whose first word holds the first."""
        import torch

        octets = words.view(torch.uint8)  # words are little-endian, as all that is stored
        first = start * self.bits // _WORD_BITS * 4  # byte of the row
        if self.bits == 8:
            return (octets[:, start - first : stop - first] ^ 0x80).view(torch.int8)
        if self.bits == 4:
            octets = octets[:, start // 2 - first : -(-stop // 2) - first]
            return _nibbles(octets)[:, start % 2 :][:, : stop - start]
        eights = _bytes_of_eights(octets, first, start, stop, self.bits)
        return self._of_eights(eights)[:, start % 8 :][:, : stop - start]

    def _of_eights(self, octets: torch.Tensor) -> torch.Tensor:
        """Eight integers lie in as many bytes as they have bits, which together are one large integer."""
        import torch

        wide = torch.int32 if self.bits < 4 else torch.int64
        octets = octets.unflatten(1, (-1, self.bits))
        eights = octets[..., 0].to(wide)
        for k in range(1, self.bits):
            eights |= octets[..., k].to(wide) << 8 * k
        shifts = torch.arange(0, 8 * self.bits, self.bits, dtype=wide, device=octets.device)
        integers = eights.unsqueeze(-1) >> shifts
        return integers.bitwise_and_((1 << self.bits) - 1).sub_(1 << (self.bits - 1)).flatten(1)


def _bytes_of_eights(octets: torch.Tensor, first: int, start: int, stop: int, bits: int) -> torch.Tensor:
    """The bytes of all eights that elements ``start`` to ``stop`` are of; zeros for those that a box does not bring.

    ``first``: the place of the first byte in its row.
    """
    import torch

    before = first - start // 8 * bits
    after = -(-stop // 8) * bits - (first + octets.shape[1])
    return torch.nn.functional.pad(octets, (before, after))  # less than zero: bytes are left out


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """The two integers of each byte, low bits first, less 8."""
    import torch

    wide = octets.to(torch.int16, memory_format=torch.contiguous_format)
    wide = wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F)
    return wide.view(torch.int8).sub_(8)


# ----------------------------------------------------------------------------------------------------
# Unsigned fields in words of two dims that are stored turned: GPTQ's and AWQ's.


@frozen
class FieldWords(Codes):
    """Fields of 2, 4 or 8 bits in int32 words along one of the dims, the lowest bits first: GPTQ's."""

    bits: int
    dim: int = 1
    """Along which they are packed."""
    plus_one: bool = False
    """Whether they are stored less one. The packer subtracts from whole words; so ones are added to whole words."""
    is_turned = True

    @property
    def columns_in_word(self) -> int:  # type: ignore[override]
        return 32 // self.bits if self.dim == 1 else 1

    def box(self, box: Box) -> Box:
        start, stop = list(box.start), list(box.stop)
        start[self.dim], stop[self.dim] = covering(start[self.dim], stop[self.dim], 32 // self.bits)
        return _turned(Box(tuple(start), tuple(stop)))

    def opened(self, box: Box, stored: torch.Tensor) -> Numbers:
        if self.plus_one:
            stored = stored + sum(1 << shift for shift in range(0, 32, self.bits))
        per_word = 32 // self.bits
        if self.dim == 0:
            found = fields(stored, self.bits).narrow(1, box.start[0] % per_word, box.sizes[0])
            found = found.t().contiguous()
            return lambda inner: (found[inner.slices_in(box)], 0)
        words = stored.t().contiguous()

        def numbers(inner: Box) -> tuple[torch.Tensor, int]:
            column, count = inner.start[1], inner.sizes[1]
            word, end = (one - box.start[1] // per_word for one in covering(column, inner.stop[1], per_word))
            found = fields(words[inner.slices_in(box)[0], word:end], self.bits)
            return found.narrow(1, column % per_word, count), 0

        return numbers


@frozen
class AwqWords(Codes):
    """Fields of 4 bits in words along the rows, in the order of AutoAWQ (MIT): its ``AWQ_REVERSE_ORDER``."""

    bits, is_turned, in_halves = 4, True, True

    def box(self, box: Box) -> Box:
        word, end = covering(box.start[0], box.stop[0], 8)
        return Box((box.start[1], word), (box.stop[1], end))

    def opened(self, box: Box, stored: torch.Tensor) -> Numbers:
        import torch

        codes, first = _transposed_halves(stored), box.start[0] // 8

        def numbers(inner: Box) -> tuple[torch.Tensor, int]:
            word, end = covering(inner.start[0], inner.stop[0], 8)
            halves = codes[2 * (word - first) : 2 * (end - first), inner.slices_in(box)[1]].unflatten(
                0, (-1, 2)
            )
            found = torch.empty((halves.shape[0], 4, *halves.shape[1:]), dtype=torch.int16)
            for k in range(
                4
            ):  # field k of a half: row 2 * k of the first half of a word, 2 * k + 1 of the second
                torch.bitwise_right_shift(halves, 4 * k, out=found[:, k])
            # F16 with 1024 units: its mantissa's last bits are those of a small integer that was added to it.
            rows = found.bitwise_and_(15).bitwise_or_(0x6400).view(torch.float16).flatten(0, 2)
            return rows[inner.start[0] % 8 :][: inner.sizes[0]], 0

        return numbers


# ----------------------------------------------------------------------------------------------------
# Codes of a few bits, unpacked without loops over elements.


def looked_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """What each byte stands for: its row of a table of 256 rows, put one after another along the last dim.

    A row is taken as one number of its size, which is several times faster than an index of rows.
    """
    import torch

    assert codes.dtype == torch.uint8
    row = {2: torch.int16, 4: torch.int32, 8: torch.int64}[table[0].nbytes]
    found = table.view(row).view(256).index_select(0, codes.reshape(-1).to(torch.int32))
    return found.view(table.dtype).view(*codes.shape[:-1], codes.shape[-1] * table.shape[1])


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The unsigned fields of 2, 4 or 8 bits in the int32 words of each row, lowest bits first, in F32.

    Each byte is widened to as many bytes as it has fields, and copies of it are shifted to put one field into each.
    """
    import torch

    found = words.clone(
        memory_format=torch.contiguous_format
    )  # contiguous() keeps odd strides of dims of one
    found = found.view(torch.uint8)
    per_byte = 8 // bits
    if per_byte > 1:
        wide = found.to({2: torch.int16, 4: torch.int32}[per_byte])
        spread = wide.clone()
        for k in range(1, per_byte):
            spread |= wide * (1 << (8 - bits) * k)  # torch has no fast shift of 16 bits
        spread &= sum((1 << bits) - 1 << 8 * k for k in range(per_byte))
        found = spread.view(torch.uint8)
    return found.to(torch.float32)


def _transposed_halves(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix of words, or of bytes in whole words, as int16, transposed: each column of 16 bits becomes a row. Memory: as much."""
    import torch

    if matrix.stride(-1) != 1 or (matrix.storage_offset() | matrix.stride(0)) * matrix.itemsize % 2:
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(torch.int16).t().contiguous()
