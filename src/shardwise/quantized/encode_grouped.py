"""Quantizes as compressed-tensors does: INT, FP8, NVFP4 and MX codes with scales per tensor, channel, group or block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..dtypes import torch_dtype
from ..layout.boxes import Box
from ..objects import frozen
from .encode_scaled import blockwise
from .fp4 import Fp4Pairs
from .grouped import Grouped
from .packed import PackedIntegers
from .packing import fp4_bytes, integer_words

if TYPE_CHECKING:
    import torch

__all__ = ["GroupedEncoder", "mx_exponents"]

#: Largest number of NVFP4's scales (E4M3) and of its codes.
_SCALES_END, _CODES_END = 448.0, 6.0
#: Instead of a scale of zero, for scales in E4M3.
_LEAST_E4M3 = 0.125
#: Columns of a group of the MX formats.
_MX_GROUP = 32


@frozen
class GroupedEncoder:
    """Scales and zero points from the least and largest element of each block. Implements :class:`.Encoder`.

    Source: ``calculate_qparams``, ``generate_gparam``, ``generate_mx_scales`` and ``quantize`` of compressed-tensors 0.20, in the dtype of
    the weight, as its own dynamic observer runs them. A global scale is that of the tensor alone.
    """

    rule: Grouped
    shape: tuple[int, ...]
    codes: str
    scales: str

    @classmethod
    def of(cls, rule: Grouped, shape: tuple[int, ...], codes: str, scales: str) -> GroupedEncoder | str:
        if rule.groups is not None:
            return "its columns are in the order of a calibration (weight_g_idx)"
        if scales == "U8" and rule.block != (1, _MX_GROUP):
            return f"expected groups of {_MX_GROUP} for scales that are powers of two, found {rule.block[1]}"
        return cls(rule, shape, codes, scales)

    @property
    def reference(self) -> str:
        return "compressed-tensors: minimum and maximum, calculate_qparams"

    @property
    def makes(self) -> tuple[str, ...]:
        zeros = ("zeros",) if self.rule.zeros is not None else ()
        return ("codes", "scales", *zeros, *(("global",) if self._has_global else ()))

    @property
    def once(self) -> tuple[str, ...]:
        if self._has_global:
            return ("global",)
        return tuple(role for role in self.makes if role != "codes") if self._one_scale else ()

    @property
    def unit(self) -> tuple[int, ...]:
        rows = 1 if self._one_scale else self.rule.block[0]
        if isinstance(self.rule.zeros, PackedIntegers) and not self._one_scale:
            rows = math.lcm(rows, 32)  # zero points of 32 rows fill whole words
        return rows, max(1, self.shape[1])

    @property
    def _has_global(self) -> bool:
        return self.rule.global_shape is not None

    @property
    def _one_scale(self) -> bool:
        return not self._has_global and all(b >= n for b, n in zip(self.rule.block, self.shape, strict=True))

    @property
    def _is_float(self) -> bool:
        return isinstance(self.rule.codes, Fp4Pairs) or self.codes.startswith("F8")

    @property
    def _bits(self) -> int:
        if isinstance(self.rule.codes, PackedIntegers):
            return self.rule.codes.bits
        return 4 if isinstance(self.rule.codes, Fp4Pairs) else self.rule.bits

    def _ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the largest number that a code stands for, as tensors without dims: they widen no dtype."""
        import torch

        half = 2.0 ** (self._bits - 1)
        top = {4: _CODES_END, 8: _SCALES_END}[self._bits] if self._is_float else half - 1
        return torch.tensor(-top if self._is_float else -half), torch.tensor(top)

    def encode(
        self,
        box: Box,
        values: torch.Tensor,
        kept: Mapping[str, torch.Tensor],
        measured: tuple[torch.Tensor, ...],
    ) -> Mapping[str, torch.Tensor]:

        if self._one_scale:
            low, high = (end.view(1, 1) for end in measured)
            low, high = low.clamp(max=0), high.clamp(min=0)
        else:
            low = blockwise(values, self.rule.block, largest=False)
            high = blockwise(values, self.rule.block, largest=True)
        whole = None
        if self._has_global:
            whole = _global_scale(*measured)
        scales, zeros = self._parameters(low, high, whole)
        codes = self._codes(values, scales, zeros, whole)
        found = {"codes": codes, "scales": self._stored_scales(scales).reshape(self._sizes("scales", box))}
        if self.rule.zeros is not None:
            assert zeros is not None
            packed = isinstance(self.rule.zeros, PackedIntegers)
            found["zeros"] = integer_words(zeros, self._bits, dim=0) if packed else zeros
            found["zeros"] = found["zeros"].reshape(self._sizes("zeros", box))
        if whole is not None:
            found["global"] = whole
        return found

    def _sizes(self, role: str, box: Box) -> tuple[int, ...]:
        return self.rule.boxes(box)[role].sizes

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
            exponents = mx_exponents(torch.maximum(low.abs(), high.abs()), self._bits)
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
            integer_words(integers, self._bits) if isinstance(self.rule.codes, PackedIntegers) else integers
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


def mx_exponents(largest: torch.Tensor, bits: int) -> torch.Tensor:
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
