"""Codes of any arrangement times a scale per tensor, channel, group or block: the rules that formats are rows of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..catalog.records import Chunk, Coded, Rule, StoredTensor
from ..dtypes import torch_dtype
from ..errors import FormatError, IntegrityError, SourceError
from ..limits import brief
from ..objects import frozen
from ..tensors.boxes import Box, whole
from .open import Found, Source

if TYPE_CHECKING:
    import torch

__all__ = [
    "Coded",
    "Codes",
    "FP4_LIFT",
    "Fp4Pairs",
    "Grouped",
    "OneEach",
    "PackedIntegers",
    "Rule",
    "Scaled",
    "blocks_of",
    "check",
    "coded",
    "covering",
    "each_module",
    "factors",
    "fields",
    "finite",
    "floats",
    "group_size_of",
    "groups_within",
    "in_step",
    "looked_up",
    "lowered",
    "numbers_of_halves",
    "packed_size",
    "pieces",
    "require",
    "reshaped",
    "scaled",
    "slabs",
    "spread",
    "stems_with",
    "transposed_halves",
    "widened",
    "words_of",
]


# ----------------------------------------------------------------------------------------------------
# How the codes of a tensor lie in the stored one: which part of it a box needs, and its numbers in fp32.
#
# What is stored one element each is here; :mod:`.rules` has integers packed into words, :mod:`.rules` pairs of FP4 in bytes.


class Codes(Protocol):
    """An arrangement of codes."""

    @property
    def lift(self) -> int:
        """:meth:`floats` are the numbers divided by 2 to this power; 0 where they are the numbers."""

    def box(self, box: Box) -> Box:
        """The box of the stored codes that holds a box of the tensor."""

    def floats(self, box: Box, stored: torch.Tensor) -> torch.Tensor:
        """The numbers of ``box`` in fp32, in memory of their own, from the elements of :meth:`box`."""


@frozen
class OneEach:
    """One stored element for each element: int8, FP8. Implements :class:`Codes`."""

    lift = 0

    def box(self, box: Box) -> Box:
        return box

    def floats(self, box: Box, stored: torch.Tensor) -> torch.Tensor:
        return floats(stored)


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
    """Stored numbers as fp32, divided by 2 to a power, and the power. A caller that multiplies by scales saves an operation."""
    import torch

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
# Scales of blocks: which ones a box needs, and spread over its elements.

_SLAB_ELEMENTS = 512 * 1024


def blocks_of(box: Box, block: tuple[int, ...]) -> Box:
    """The box of the scales, one for each block of ``block`` elements, that the elements of a box need."""
    start = tuple(a // n for a, n in zip(box.start, block, strict=True))
    stop = tuple(-(-b // n) for b, n in zip(box.stop, block, strict=True))
    return Box(start, stop)


def spread(scales: torch.Tensor, box: Box, block: tuple[int, ...]) -> torch.Tensor:
    """The scale of each element of ``box``, from those of :func:`blocks_of`; in dims of one scale, one for all elements."""
    for dim, (start, stop, n) in enumerate(zip(box.start, box.stop, block, strict=True)):
        if n > 1 and scales.shape[dim] > 1:
            first = start % n
            scales = scales.repeat_interleave(n, dim).narrow(dim, first, stop - start)
    return scales


def in_step(
    values: torch.Tensor, scales: torch.Tensor, box: Box, block: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of a box and the scales of :func:`blocks_of`, as views that broadcast. Scales are copied as little as possible."""
    n = block[-1] if block else 1
    if n > 1 and scales.shape[-1] > 1 and box.start[-1] % n == 0 and box.stop[-1] % n == 0:
        columns = spread(scales, box, (*block[:-1], 1))
        return values.unflatten(-1, (-1, n)), columns.unsqueeze(-1)
    return values, spread(scales, box, block)


def slabs(box: Box) -> Iterator[Box]:
    """The box in pieces along its first dim, whose numbers in fp32 stay in a core's own cache from one operation to the next."""
    rows = max(1, _SLAB_ELEMENTS * box.sizes[0] // max(1, box.numel))
    for start in range(box.start[0], box.stop[0], rows):
        stop = min(start + rows, box.stop[0])
        yield Box((start, *box.start[1:]), (stop, *box.stop[1:]))


def widened(scales: torch.Tensor) -> torch.Tensor:
    """The scales in fp32; those of a byte are exponents of two (UE8M0)."""
    import torch

    return floats(scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales)


def finite(name: str, scales: torch.Tensor) -> torch.Tensor:
    """:func:`widened` scales. Raises :class:`IntegrityError` if one is NaN or infinite."""
    found = widened(scales)
    if not _all_finite(found):
        raise IntegrityError(f"{name}: a scale is NaN or infinite")
    return found


def groups_within(name: str, groups: torch.Tensor, count: int) -> torch.Tensor:
    """The group of each input. Raises :class:`IntegrityError` if one is not from 0 to ``count - 1``."""
    if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise IntegrityError(
            f"{name}: expected groups from 0 to {count - 1} in g_idx, found {int(groups.min())} to {int(groups.max())}"
        )
    return groups


def factors(name: str, scales: torch.Tensor, lift: int) -> tuple[torch.Tensor, float]:
    """:func:`finite` scales times ``2 ** lift``, which values lack, and 1; or the scales and ``2 ** lift``, if one would overflow."""
    found = widened(scales)
    if lift:
        high = found * 2.0**lift
        if _all_finite(high):
            return high, 1.0
    return finite(name, found), 2.0**lift


def _all_finite(numbers: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite. Their sum would be, too, and takes a fraction of the time; it may also overflow."""
    return isfinite(numbers.sum().item()) or bool(numbers.isfinite().all())


# ----------------------------------------------------------------------------------------------------
# Codes of any arrangement times a scale per tensor, channel, group or block: the rules of compressed-tensors.


@frozen
class Grouped:
    """``(codes − zeros) × scale`` of the block, for two dims. Implements :class:`.Rule`.

    Parts: ``codes``, ``scales``, maybe ``zeros``, ``global`` (a divisor of all scales), ``groups`` (the group of each column). In
    fp32, rounded once to ``dtype``. That is bitwise what arithmetic in the scales' own 16 bits gives: codes and zeros are integers
    below 256 or floats of few bits, and their product with a scale of 16 bits is exact in fp32.
    """

    format: str
    name: str
    dtype: str
    codes: Codes
    block: tuple[int, int]
    """Elements of a block in each dim; one scale each. The tensor's own sizes for one scale in all."""
    scales_shape: tuple[int, ...]
    zeros: Codes | None = None
    """How zero points lie, of which there are as many as scales; None if there are none."""
    global_shape: tuple[int, ...] | None = None
    groups: int | None = None
    """How many groups there are, if each column names its own; then columns of a box may be of any group."""
    bits: int = 8
    """Of a code, where each is stored in an element of its own."""

    def boxes(self, box: Box) -> Mapping[str, Box]:
        blocks = self._blocks(box)
        found = {"codes": self.codes.box(box), "scales": self._stored(blocks)}
        if self.zeros is not None:
            found["zeros"] = self._stored(self.zeros.box(blocks))
        if self.global_shape is not None:
            found["global"] = whole(self.global_shape)
        if self.groups is not None:
            found["groups"] = Box(box.start[1:], box.stop[1:])
        return found

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        import torch

        if not box.numel:
            return torch.empty(box.sizes, dtype=torch_dtype(self.dtype), device=parts["codes"].device)
        blocks = self._blocks(box)
        scales = parts["scales"].reshape(blocks.sizes)
        if self.global_shape is not None:
            scales = widened(scales) / parts["global"]
        scales, rest = factors(self.name, scales, self.codes.lift)
        zeros = None
        if self.zeros is not None:
            zeros = self.zeros.floats(blocks, parts["zeros"]).reshape(blocks.sizes)
        if self.groups is not None:
            groups = self.check_groups(parts["groups"], box)
            scales = scales.index_select(1, groups)
            zeros = zeros if zeros is None else zeros.index_select(1, groups)
        found = torch.empty(box.sizes, dtype=torch_dtype(self.dtype), device=scales.device)
        for slab in slabs(box):
            rows = slice(slab.start[0] - box.start[0], slab.stop[0] - box.start[0])
            near = self._blocks(slab)
            own = slice(near.start[0] - blocks.start[0], near.stop[0] - blocks.start[0])
            values = self.codes.floats(slab, parts["codes"][rows])
            if zeros is not None:
                some, each = self._in_step(values, zeros[own], slab)
                some.sub_(each)
            if rest != 1:
                values.mul_(rest)
            some, each = self._in_step(values, scales[own], slab)
            some.mul_(each)
            found[rows] = values
        return found

    def check_groups(self, groups: torch.Tensor, box: Box) -> torch.Tensor:
        """The groups of the box's columns. Raises :class:`IntegrityError` for a group that doesn't exist."""
        return groups_within(self.name, groups, self.groups or 0)

    def _blocks(self, box: Box) -> Box:
        """The blocks whose scales a box needs."""
        if self.groups is None:
            return blocks_of(box, self.block)
        return Box((box.start[0], 0), (box.stop[0], self.groups))

    def _stored(self, blocks: Box) -> Box:
        """The box of stored scales; one for the whole tensor may have fewer dims."""
        return blocks if len(self.scales_shape) == 2 else whole(self.scales_shape)

    def _in_step(
        self, values: torch.Tensor, scales: torch.Tensor, slab: Box
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.groups is None:
            return in_step(values, scales, slab, self.block)
        return values, scales


# ----------------------------------------------------------------------------------------------------
# Makes one tensor of the parts that a source stores for it.


def coded(
    name: str, dtype: str, shape: tuple[int, ...], parts: Mapping[str, StoredTensor], rule: Rule
) -> Coded:
    """The tensor called ``name``, as its parts stand for it. ``dtype``: that of what the rule decodes."""
    first = next(iter(parts.values())).chunks[0]
    path = f"{first.path}#{first.offset_bytes:016d}#{name}"
    return Coded(StoredTensor(name, dtype, shape, (Chunk(whole(shape), path, 0),)), dict(parts), rule)


# ----------------------------------------------------------------------------------------------------
# FP4 (E2M1): a sign, two bits of exponent, one of mantissa; two in each byte, low bits first.
#
# Their four bits, put at the same places of an fp16 number, make one that is smaller by 2**14: exponents of E2M1 start at 1, those
# of fp16 at 15. Zeros and subnormals come out right, too. A shift and a mask for many numbers at once cost less than a table.

#: Numbers come divided by 2 to this power.
FP4_LIFT = 14
#: Sign, the two lowest bits of the exponent, the highest of the mantissa, of fp16 as int16.
_MASK = 0x8E00 - 0x10000


@frozen
class Fp4Pairs:
    """Pairs along the last of two dims. Implements :class:`.Codes`."""

    lift = FP4_LIFT

    def box(self, box: Box) -> Box:
        (row, column), (last_row, last_column) = box.start, box.stop
        return Box((row, column // 2), (last_row, -(-last_column // 2)))

    def floats(self, box: Box, stored: torch.Tensor) -> torch.Tensor:
        import torch

        octets = stored.to(torch.int32, memory_format=torch.contiguous_format)
        # the highest bits of each half of 32 become its number's
        halves = (octets << 24).bitwise_or_(octets.bitwise_left_shift_(12)).view(torch.int16)
        numbers = halves.bitwise_right_shift_(3).bitwise_and_(_MASK).view(torch.float16)
        first = box.start[1] % 2
        return numbers[:, first : first + box.sizes[1]].to(torch.float32)


def numbers_of_halves(halves: torch.Tensor) -> torch.Tensor:
    """The four numbers of each int16, in rows one after another, in fp16."""
    import torch

    found = torch.empty((halves.shape[0], 4, halves.shape[1]), dtype=torch.int16, device=halves.device)
    for k in range(4):
        torch.bitwise_left_shift(halves, 12 - 4 * k, out=found[:, k])
    return found.bitwise_right_shift_(3).bitwise_and_(_MASK).view(torch.float16).flatten(0, 1)


# ----------------------------------------------------------------------------------------------------
# Consecutive elements of rows that share a scale, and a zero point: blocks of bitsandbytes, groups of GPTQ and AWQ.


def pieces(values: torch.Tensor, start: int, size: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """The columns of a matrix by groups, the first of which is column ``start``: views [rows, groups, columns of each].

    The groups that are whole come as one view; one at an end that is cut comes as its own. With each, the groups that it is of,
    from the first that the columns touch. So groups are never spread over elements, which costs more than all arithmetic.
    """
    stop, first = start + values.shape[-1], start // size
    whole = min(stop, -(-start // size) * size)
    tail = max(whole, stop // size * size)
    for begin, end in ((start, whole), (whole, tail), (tail, stop)):
        if begin < end:
            groups = slice(begin // size - first, -(-end // size) - first)
            view = values.narrow(-1, begin - start, end - begin)
            yield view.unflatten(-1, (groups.stop - groups.start, -1)), groups


def scaled(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, start: int, size: int) -> None:
    """``(codes − zeros) × scales`` in place, of columns from ``start`` on, in groups of ``size``.

    All in one dtype that holds differences of codes exactly: F32, or F16.
    """
    for view, groups in pieces(codes, start, size):
        view.sub_(zeros[:, groups].unsqueeze(-1)).mul_(scales[:, groups].unsqueeze(-1))


# ----------------------------------------------------------------------------------------------------
# Integers of few bits, packed without gaps into int32 words: element *i* has the bits from ``i * bits`` on.
#
# Source: ``pack_to_int32`` of compressed-tensors. Codes are unsigned; half their range is subtracted.

_WORD_BITS = 32


def packed_size(size: int, bits: int) -> int:
    """Words that hold ``size`` integers."""
    return -(-size * bits // _WORD_BITS)


@frozen
class PackedIntegers:
    """Integers packed along one of two dims. Implements :class:`.Codes`."""

    bits: int
    dim: int = 1
    """Along which they are packed."""
    lift = 0

    def box(self, box: Box) -> Box:
        start, stop = list(box.start), list(box.stop)
        start[self.dim] = box.start[self.dim] * self.bits // _WORD_BITS
        stop[self.dim] = packed_size(box.stop[self.dim], self.bits)
        return Box(tuple(start), tuple(stop))

    def floats(self, box: Box, stored: torch.Tensor) -> torch.Tensor:
        import torch

        words = stored if self.dim == 1 else stored.t()
        if words.stride(1) != 1:
            words = words.clone(memory_format=torch.contiguous_format)
        found = self._integers(words, box.start[self.dim], box.stop[self.dim]).to(torch.float32)
        return found if self.dim == 1 else found.t()

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
# One code an element, times a scale: FP8 and INT8 with a scale per tensor, per channel or per block.


@frozen
class Scaled:
    """``codes × scale`` of the block. Implements :class:`.Rule`; parts: ``codes`` and ``scales``.

    In fp32, rounded once to ``dtype``: the rule of transformers' ``Fp8Dequantize``. A block at an edge of the tensor may be cut
    short.
    """

    format: str
    name: str
    dtype: str
    block: tuple[int, ...]
    """Elements of a block in each dim; one scale each."""

    def boxes(self, box: Box) -> Mapping[str, Box]:
        return {"codes": box, "scales": blocks_of(box, self.block)}

    def decode(self, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found, lift = lowered(parts["codes"])
        scales, rest = factors(self.name, parts["scales"], lift)
        if rest != 1:
            found.mul_(rest)
        if box.numel:
            values, each = in_step(found, scales, box, self.block)
            values.mul_(each)
        return found.to(torch_dtype(self.dtype))


# ----------------------------------------------------------------------------------------------------
# Checks of stored parts: whether they are there, of the dtype and shape that their format says, and the same bytes reshaped.

T = TypeVar("T")


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


def stems_with(names: Iterable[str], last: tuple[str, ...]) -> list[str]:
    """The modules with a tensor of one of these last names, each as the start of its tensors' names."""
    parted = (name.rpartition(".") for name in names)
    return sorted({stem + dot for stem, dot, end in parted if end in last})


def each_module(
    source: Source,
    method: str,
    last: tuple[str, ...],
    settings_of: Callable[[Mapping[str, Any]], T],
    make: Callable[[Source, str, T], Coded],
) -> Found:
    """What a family finds whose modules each have tensors of these last names. Errors of ``settings_of`` and ``make`` become problems."""
    found = Found()
    stems = stems_with(source.tensors, last)
    if source.settings.get("quant_method") != method or not stems:
        return found
    try:
        settings = settings_of(source.settings)
    except FormatError as error:
        found.problems.append(f"{stems[0]}qweight can't be decoded, as {len(stems)} modules in all: {error}")
        return found
    for stem in stems:
        try:
            found.add(make(source, stem, settings))
        except SourceError as error:
            found.problems.append(str(error))
    return found


def group_size_of(size: object) -> int:
    """Inputs of a group; -1: all of them. Raises :class:`FormatError`."""
    if type(size) is not int or (size < 1 and size != -1):
        raise FormatError(
            f"expected a positive number or -1 as group_size in config.json, found {brief(size)}"
        )
    return size


def words_of(
    tensors: Mapping[str, StoredTensor], stem: str
) -> tuple[StoredTensor, StoredTensor, StoredTensor]:
    """``qweight``, ``qzeros`` and ``scales`` of a module, each in two dims. Raises :class:`FormatError` if it has no such three."""
    if f"{stem}weight" in tensors:
        raise FormatError(f"stored plainly, too: expected either it or {stem}qweight", path=f"{stem}weight")
    codes, zeros, scales = (
        require(tensors, stem + one, f"{stem}weight") for one in ("qweight", "qzeros", "scales")
    )
    for part, dtype in ((codes, "I32"), (zeros, "I32"), (scales, "F16")):
        if part.dtype != dtype or len(part.shape) != 2 or not all(part.shape):
            raise FormatError(
                f"expected {dtype} in two dims, found {part.dtype} {list(part.shape)}", path=part.name
            )
    return codes, zeros, scales


# ----------------------------------------------------------------------------------------------------
# Codes of a few bits, packed into bytes and words: unpacked without loops over elements, and which words a box needs.


def covering(start: int, stop: int, unit: int) -> tuple[int, int]:
    """The units (bytes, words, groups) that hold the elements from ``start`` to ``stop``; none for no elements."""
    first = start // unit
    return first, max(first, -(-stop // unit)) if stop > start else first


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


def transposed_halves(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix of words, or of bytes in whole words, as int16, transposed: each column of 16 bits becomes a row. Memory: as much."""
    import torch

    if matrix.stride(-1) != 1 or (matrix.storage_offset() | matrix.stride(0)) * matrix.itemsize % 2:
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(torch.int16).t().contiguous()
