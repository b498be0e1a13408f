"""Quantizes as the formats' own libraries do: INT, FP8, NVFP4, MX and 4-bit codes, with scales per tensor, channel, group or block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ..catalog.records import Coded
from ..dtypes import torch_dtype
from ..errors import UnsupportedConversionError
from ..objects import frozen
from ..tensors.boxes import Box
from .bitsandbytes import FourBit, book_of
from .rules import Fp4Pairs, PackedIntegers, Scaled, by_blocks, packed_size

if TYPE_CHECKING:
    import torch


#: The parts of a tensor, by role.
Parts = Mapping[str, "torch.Tensor"]


# ----------------------------------------------------------------------------------------------------
# Quantizes weights again into the format that a source stores them in.
#
# An encoder is the other direction of a :class:`.Rule`: elements in, parts out, with the same layout of codes and the same blocks. It
# follows the format's own reference, which the docstring of its function names.


@frozen
class Window:
    """The part of a tensor that is encoded at once."""

    box: Box
    values: torch.Tensor
    """The finite elements of ``box``, in the dtype of the model."""
    kept: Parts
    """The source's own parts that the encoder doesn't make, for this box."""
    measured: tuple[torch.Tensor, ...]
    """What was found in the whole tensor before: its least and largest element, in the same dtype, where :attr:`Encoder.once` is not
    empty; the mean of its scales, where :attr:`Encoder.scales` is given; otherwise nothing."""


@frozen
class Encoder:
    """How the parts of one tensor are made from its elements. Pure, and the same however windows are cut at :attr:`unit`."""

    reference: str
    """The rule that it follows, in words, for reports."""
    unit: tuple[int, ...]
    """Elements in each dim that stay together: windows begin at a multiple of it, and end at one or at the tensor's end."""
    encode: Callable[[Window], Parts]
    """The parts of :attr:`makes` for a window, each with the sizes of its box of :meth:`.Rule.boxes`, in its stored dtype."""
    makes: tuple[str, ...] = ("codes", "scales")
    """The roles of the parts that it makes. The others are those of the source."""
    once: tuple[str, ...] = ()
    """Those of :attr:`makes` that are of the whole tensor, made from its least and largest element."""
    scales: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The scales of a window, where these are quantized, too, less the mean of all."""


def encoder_of(one: Coded, settings: Mapping[str, Any]) -> Encoder:
    """The encoder of a tensor that a source stores in parts. ``settings``: its ``quantization_config``.

    Raises :class:`UnsupportedConversionError` for a format that can't be quantized again, with the reason.
    """
    rule, made = one.rule, None
    reason = "no rule is known that makes its codes"
    if isinstance(rule, FourBit):
        reason = f"expected two dims, found {len(rule.shape)}"
        made = _four_bit(rule) if len(rule.shape) == 2 else None
    elif isinstance(rule, Scaled) and rule.method in ("awq", "gptq"):
        reason = "its scales come from calibration data, which an export doesn't have"
    elif isinstance(rule, Scaled) and rule.method == "fp8":
        made = _fp8(one, rule, settings)
    elif isinstance(rule, Scaled) and rule.method == "bitsandbytes":
        made = _row_int8(one)
    elif isinstance(rule, Scaled) and rule.method == "mxfp4":
        made = Encoder("MXFP4: OCP's rule as in compressed-tensors", (1, _MX_GROUP, 1), _mxfp4)
    elif isinstance(rule, Scaled) and rule.groups is not None:
        reason = "its columns are in the order of a calibration (weight_g_idx)"
    elif isinstance(rule, Scaled) and one.parts["scales"].dtype == "U8" and rule.block != (1, _MX_GROUP):
        reason = f"expected groups of {_MX_GROUP} for scales that are powers of two, found {rule.block[1]}"
    elif isinstance(rule, Scaled):
        made = _Grouped(rule, one.tensor.shape, one.parts["codes"].dtype, one.parts["scales"].dtype).encoder()
    if made is None:
        raise UnsupportedConversionError(
            f"{one.tensor.name}: was changed and can't be requantized as {rule.format}: {reason}. Export without quantize=, "
            f"for plain weights"
        )
    return made


# ----------------------------------------------------------------------------------------------------
# Quantizes to FP8 with scales per block, channel or tensor.


def _fp8(one: Coded, rule: Scaled, settings: Mapping[str, Any]) -> Encoder:
    """``scale = absolute maximum of the block ÷ largest number of the codes``.

    In fp32, as transformers' ``Fp8Quantize`` computes it, which takes two reciprocals. Where scales are powers of two (UE8M0) they are
    rounded up; codes are computed from the scale as it is stored. A channel or a tensor is one block. A block that the tensor's edge
    cuts short has the maximum of what there is of it.
    """
    codes, scales = (one.parts[role].dtype for role in ("codes", "scales"))
    power_of_two = settings.get("scale_fmt") == "ue8m0" or scales in ("U8", "F8_E8M0")
    rounded = ", scales rounded up to powers of two" if power_of_two else ""
    is_one = all(b >= n for b, n in zip(rule.block, one.tensor.shape, strict=True))
    return Encoder(
        f"FP8: absolute maximum / largest number, as transformers' Fp8Quantize{rounded}",
        tuple(1 for _ in rule.block) if is_one else rule.block,
        partial(_encode_fp8, rule.block, codes, scales, power_of_two),
        once=("scales",) if is_one else (),
    )


def _encode_fp8(block: tuple[int, ...], codes: str, scales: str, power_of_two: bool, window: Window) -> Parts:
    import torch

    code_type, values = torch_dtype(codes), window.values.to(torch.float32, copy=True)
    most = torch.finfo(code_type).max
    if window.measured:
        low, high = window.measured
        largest = torch.maximum(low.abs(), high.abs()).float().view((1,) * len(block))
    else:
        largest = _blockwise(values.abs(), block, largest=True)
    one = torch.ones_like(largest)
    factors = torch.where(largest > 0, most / torch.where(largest > 0, largest, one), one)
    made = (1.0 / factors).to(torch.float32)
    if power_of_two:
        tiny = torch.finfo(torch.float32).tiny
        made = torch.pow(2.0, torch.ceil(torch.log2(made.clamp(min=tiny))))
    stored = made.to(torch.float8_e8m0fnu if scales == "U8" else torch_dtype(scales))
    if stored.dtype != torch.float32 or power_of_two:
        factors = 1.0 / stored.float()
    if values.numel():
        by_blocks(torch.Tensor.mul_, values, factors, window.box, block)
    return {
        "codes": values.clamp_(-most, most).to(code_type),
        "scales": stored.view(torch_dtype(scales)),
    }


def _blockwise(values: torch.Tensor, block: tuple[int, ...], *, largest: bool) -> torch.Tensor:
    """The largest (or the least) element of each block, or zero if that is further. The first block begins at the first element."""
    import torch

    block = tuple(min(b, max(1, n)) for b, n in zip(block, values.shape, strict=True))
    short = [-n % b for b, n in zip(block, values.shape, strict=True)]
    padded = torch.nn.functional.pad(values, [x for n in reversed(short) for x in (0, n)])
    sizes = [x for b, n in zip(block, padded.shape, strict=True) for x in (n // b, b)]
    apart = padded.reshape(sizes)
    inside = tuple(range(1, len(sizes), 2))
    found = apart.amax(inside) if largest else apart.amin(inside)
    return found.clamp(min=0) if largest else found.clamp(max=0)


# ----------------------------------------------------------------------------------------------------
# Packs codes as the formats store them: the other direction of the arrangements in :mod:`.rules`.


def integer_words(integers: torch.Tensor, bits: int, dim: int = 1) -> torch.Tensor:
    """Signed integers of some bits, packed without gaps along one of two dims into int32 words, as :class:`.PackedIntegers` reads them.

    Eight integers are put together as one large integer, which has as many bytes as each of them has bits. Source:
    ``pack_to_int32`` of compressed-tensors.
    """
    import torch

    rows = integers if dim == 1 else integers.t()
    columns = rows.shape[1]
    unsigned = (rows.to(torch.int64) + (1 << (bits - 1))) & ((1 << bits) - 1)
    eights = torch.nn.functional.pad(unsigned, (0, -columns % 32)).unflatten(1, (-1, 8))
    large = torch.zeros(eights.shape[:-1], dtype=torch.int64)
    for k in range(8):
        large |= eights[..., k] << k * bits
    octets = torch.stack([(large >> 8 * k) & 0xFF for k in range(bits)], -1).to(torch.uint8)
    words = octets.flatten(1).contiguous().view(torch.int32)[:, : packed_size(columns, bits)]
    return (words if dim == 1 else words.t()).contiguous()


def nibble_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Pairs of 4-bit codes along the last dim in bytes, low bits first."""
    import torch

    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return torch.bitwise_or(pairs[..., 0], pairs[..., 1] << 4)


def _fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """The nearest FP4 numbers (E2M1) of finite values, ties to even, as codes of 4 bits.

    A negative value that becomes zero keeps its sign, a zero has none. Source: ``cast_to_fp4`` and ``pack_fp4_to_uint8`` of
    compressed-tensors.
    """
    import torch

    size = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    for above, takes_it in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False)):
        codes += (size >= above) if takes_it else (size > above)
    codes += size >= 3.5
    codes += size > 5.0
    codes |= (values < 0).to(torch.uint8) << 3
    return codes


def fp4_bytes(values: torch.Tensor) -> torch.Tensor:
    """The nearest FP4 numbers of values, two in each byte along the last dim."""
    return nibble_bytes(_fp4_codes(values))


# ----------------------------------------------------------------------------------------------------
# Quantizes as compressed-tensors does: INT, FP8, NVFP4 and MX codes with scales per tensor, channel, group or block.

#: Largest number of NVFP4's scales (E4M3) and of its codes.
_SCALES_END, _CODES_END = 448.0, 6.0
#: Instead of a scale of zero, for scales in E4M3.
_LEAST_E4M3 = 0.125
#: Columns of a group of the MX formats.
_MX_GROUP = 32


@frozen
class _Grouped:
    """Scales and zero points from the least and largest element of each block.

    Source: ``calculate_qparams``, ``generate_gparam``, ``generate_mx_scales`` and ``quantize`` of compressed-tensors 0.20, in the dtype of
    the weight, as its own dynamic observer runs them. A global scale is that of the tensor alone.
    """

    rule: Scaled
    shape: tuple[int, ...]
    codes: str
    scales: str

    def encoder(self) -> Encoder:
        rule = self.rule
        zeros = ("zeros",) if rule.zeros is not None else ()
        parts = ("scales", *zeros, *(("global",) if rule.has_global else ()))
        rows = 1 if self._one_scale else rule.block[0]
        if isinstance(rule.zeros, PackedIntegers) and not self._one_scale:
            rows = math.lcm(rows, 32)  # zero points of 32 rows fill whole words
        once = ("global",) if rule.has_global else parts if self._one_scale else ()
        return Encoder(
            "compressed-tensors: minimum and maximum, calculate_qparams",
            (rows, max(1, self.shape[1])),
            self._encode,
            ("codes", *parts),
            once,
        )

    @property
    def _one_scale(self) -> bool:
        return not self.rule.has_global and all(
            b >= n for b, n in zip(self.rule.block, self.shape, strict=True)
        )

    @property
    def _is_float(self) -> bool:
        return isinstance(self.rule.codes, Fp4Pairs) or self.codes.startswith("F8")

    def _ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the largest number that a code stands for, as tensors without dims: they widen no dtype."""
        import torch

        half = 2.0 ** (self.rule.codes.bits - 1)
        top = {4: _CODES_END, 8: _SCALES_END}[self.rule.codes.bits] if self._is_float else half - 1
        return torch.tensor(-top if self._is_float else -half), torch.tensor(top)

    def _encode(self, window: Window) -> Parts:
        values, measured, boxes = window.values, window.measured, self.rule.boxes(window.box)
        if self._one_scale:
            low, high = (end.view(1, 1) for end in measured)
            low, high = low.clamp(max=0), high.clamp(min=0)
        else:
            low = _blockwise(values, self.rule.block, largest=False)
            high = _blockwise(values, self.rule.block, largest=True)
        whole = None
        if self.rule.has_global:
            whole = _global_scale(*measured)
        scales, zeros = self._parameters(low, high, whole)
        codes = self._codes(values, scales, zeros, whole)
        found = {"codes": codes, "scales": self._stored_scales(scales).reshape(boxes["scales"].sizes)}
        if self.rule.zeros is not None:
            assert zeros is not None
            packed = isinstance(self.rule.zeros, PackedIntegers)
            found["zeros"] = integer_words(zeros, self.rule.codes.bits, dim=0) if packed else zeros
            found["zeros"] = found["zeros"].reshape(boxes["zeros"].sizes)
        if whole is not None:
            found["global"] = whole
        return found

    def _parameters(
        self, low: torch.Tensor, high: torch.Tensor, whole: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales as the weight's module holds them, and zero points in int8: ``calculate_qparams``."""
        import torch

        first, last = self._ends()
        steps, zeros = (last - first).to(high.dtype), None
        if self.rule.zeros is not None:
            scales = (high - low) / steps
            zeros = torch.clamp(first - low / scales, first, last)
            zeros = torch.round(torch.clamp(zeros, -128, 127)).to(torch.int8)
        elif self.scales == "U8":
            exponents = _mx_exponents(torch.maximum(low.abs(), high.abs()), self.rule.codes.bits)
            return torch.pow(2.0, (exponents.to(torch.int32) - 127).float()).to(high.dtype), None
        else:
            scales = torch.maximum(low.abs(), high.abs()) / (steps / 2)
        if whole is not None:
            scales = whole * scales
        least = torch.finfo(scales.dtype).eps
        if self.scales == "F8_E4M3":
            scales = torch.clamp(scales, -_SCALES_END, _SCALES_END).to(torch.float8_e4m3fn).to(scales.dtype)
            least = _LEAST_E4M3
        scales = torch.where(scales == 0, torch.tensor(least, dtype=scales.dtype), scales)
        return scales if self.scales == "F8_E4M3" else scales.to(torch_dtype(self.scales)), zeros

    def _stored_scales(self, scales: torch.Tensor) -> torch.Tensor:
        import torch

        if self.scales == "U8":
            return (127 + torch.floor(torch.log2(scales)).to(torch.int32)).to(torch.uint8)
        return scales.to(torch_dtype(self.scales))

    def _codes(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        whole: torch.Tensor | None,
    ) -> torch.Tensor:
        """The rounded codes, packed: ``quantize``, and the format's own packing."""
        import torch

        if whole is not None:
            scales = scales / whole
        scaled = self._in_blocks(values) / scales[:, None, :, None]
        if zeros is not None:
            scaled += zeros[:, None, :, None].to(values.dtype)
        scaled = torch.clamp(scaled, *self._ends()).flatten(2).flatten(0, 1)
        scaled = scaled[: values.shape[0], : values.shape[1]]
        if isinstance(self.rule.codes, Fp4Pairs):
            return fp4_bytes(scaled)
        if self._is_float:
            return scaled.to(torch_dtype(self.codes))
        integers = torch.round(scaled).to(torch.int8)
        return (
            integer_words(integers, self.rule.codes.bits)
            if isinstance(self.rule.codes, PackedIntegers)
            else integers
        )

    def _in_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """[blocks of rows, rows, blocks of columns, columns], with zeros where a block is cut short."""
        import torch

        height, width = (min(b, max(1, n)) for b, n in zip(self.rule.block, values.shape, strict=True))
        padded = torch.nn.functional.pad(values, (0, -values.shape[1] % width, 0, -values.shape[0] % height))
        return padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)


def _global_scale(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """``generate_gparam``: the divisor of all scales that lets the largest one be the largest E4M3."""
    import torch

    largest = torch.maximum(low.clamp(max=0).abs(), high.clamp(min=0).abs())
    found = _SCALES_END * _CODES_END / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    return torch.nan_to_num(found, nan=1.0, posinf=1.0, neginf=1.0).to(torch.float32).reshape(1)


def _mx_exponents(largest: torch.Tensor, bits: int) -> torch.Tensor:
    """The exponents (plus 127, in a byte) of MX scales, from the largest absolute element of each group.

    The largest element, rounded to a power of two (up from 1.75), less the power of the largest code: ``generate_mx_scales`` of
    compressed-tensors, which sums up OCP's rule for MX formats.
    """
    import torch

    integer, mantissa, exponent = {
        torch.bfloat16: (torch.int16, 7, 8),
        torch.float16: (torch.int16, 10, 5),
        torch.float32: (torch.int32, 23, 8),
    }[largest.dtype]
    wide = largest.view(integer).to(torch.int64) + (1 << (mantissa - 2))
    power = (wide & (((1 << (exponent + 1)) - 1) << mantissa)).to(integer).view(largest.dtype)
    found = 127 + torch.floor(torch.log2(power)) - {4: 2, 8: 8}[bits]
    return torch.round(torch.clamp(found, 0, 255)).to(torch.uint8)


# ----------------------------------------------------------------------------------------------------
# Quantizes to bitsandbytes' NF4 and FP4, and to its INT8.

#: Instead of an absolute maximum of zero.
_LEAST = 1e-38


def _four_bit(rule: FourBit) -> Encoder:
    """The code nearest to ``element ÷ absolute maximum of the block``; where scales are quantized, too, they are, less their mean, codes of
    the source's book.

    Source: ``quantize_4bit`` of bitsandbytes 0.50 in plain torch, which its CPU backend runs, and ``quantize_blockwise``. GPU kernels may
    choose the other of two codes for an element that is in the middle. The CPU kernel looks codes of scales up in a coarse table first:
    about one of a thousand is the neighboring code.
    """
    reference = f"{rule.quant_type.upper()}: absolute maximum of the block, as bitsandbytes' quantize_4bit"
    encode = partial(_encode_four_bit, rule)
    if rule.nested is None:
        return Encoder(reference, _rows_of_whole_blocks(rule, rule.block), encode)
    return Encoder(
        f"{reference}, scales by quantize_blockwise",
        _rows_of_whole_blocks(rule, rule.block * rule.nested.block),
        encode,
        ("codes", "scales", "nested"),
        scales=lambda values: _scaled(values, rule.block)[1],
    )


def _encode_four_bit(rule: FourBit, window: Window) -> Parts:
    import torch

    scaled, scales = _scaled(window.values, rule.block)
    boxes = rule.boxes(window.box)
    found = {"codes": _codes(scaled, rule.quant_type).view(boxes["codes"].sizes)}
    if rule.nested is not None:
        (mean,), book = window.measured, window.kept["book"]
        outer, found["nested"] = _scaled(scales - mean, rule.nested.block)
        scales = torch.bucketize(outer, (book[:-1] + book[1:]) / 2, out_int32=True).to(torch.uint8)
    return {**found, "scales": scales.view(boxes["scales"].sizes)}


def _rows_of_whole_blocks(rule: FourBit, size: int) -> tuple[int, int]:
    """As many rows as fill whole blocks, which lie in the tensor one after another; so whole bytes, too: blocks are even."""
    rows, columns = rule.shape
    return min(max(1, rows), size // math.gcd(size, max(1, columns))), max(1, columns)


def _scaled(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements in a row, divided by the absolute maximum of their block, and these maxima. The last block may be short."""
    import torch

    flat = values.reshape(-1).float()
    rest = flat.numel() % block
    apart = flat[: flat.numel() - rest].view(-1, block)
    largest = apart.abs().amax(-1)
    scaled = torch.clamp(apart * (1.0 / largest.clamp(min=_LEAST).view(-1, 1)), -1, 1).reshape(-1)
    if rest:
        last = flat[flat.numel() - rest :]
        most = last.abs().amax().clamp(min=_LEAST)
        largest = torch.cat([largest, most.unsqueeze(0)])
        scaled = torch.cat([scaled, torch.clamp(last / most, -1, 1)])
    return scaled, largest


def _codes(scaled: torch.Tensor, quant_type: str) -> torch.Tensor:
    """The nearest codes, two a byte, the first in the high bits."""
    import torch

    bounds, order = _bounds(quant_type)
    padded = torch.nn.functional.pad(scaled, (0, scaled.numel() % 2))
    codes = order[torch.bucketize(padded, bounds, out_int32=True)].to(torch.uint8)
    return torch.bitwise_or(codes[::2] << 4, codes[1::2])


@cache
def _bounds(quant_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The middles between the numbers of the book in order, and the code of each."""
    import torch

    book = book_of(quant_type)
    order = torch.argsort(book)
    return (book[order[:-1]] + book[order[1:]]) / 2, order


def _row_int8(one: Coded) -> Encoder:
    """``round(element × 127 ÷ absolute maximum of the row)``, of elements in F16.

    Source: ``Int8Params`` and ``int8_vectorwise_quant`` of bitsandbytes 0.50.
    """
    import torch

    def encode(window: Window) -> Parts:
        halves = window.values.to(torch.float16)
        largest = halves.abs().amax(1).float()
        scaled = halves * (127.0 / largest.unsqueeze(-1))
        return {"codes": torch.round(scaled).nan_to_num_(0).to(torch.int8), "scales": largest}

    reference = "INT8: absolute maximum of the row, as bitsandbytes' int8_vectorwise_quant"
    return Encoder(reference, (1, max(1, one.tensor.shape[1])), encode)


# ----------------------------------------------------------------------------------------------------
# Quantizes experts to MXFP4, as gpt-oss stores them.


def _mxfp4(window: Window) -> Parts:
    """Exponents by :func:`_mx_exponents`, codes rounded to the nearest, ties to even.

    OpenAI published codes and no quantizer; this is the rule that compressed-tensors has for MXFP4.
    """
    import torch

    blocks = window.values.transpose(1, 2).unflatten(2, (-1, _MX_GROUP))
    exponents = _mx_exponents(blocks.abs().amax(-1), 4)
    scales = torch.pow(2.0, (exponents.to(torch.int32) - 127).float())
    scaled = (blocks.float() / scales.unsqueeze(-1)).clamp_(-6, 6)
    return {"codes": fp4_bytes(scaled), "scales": exponents}
