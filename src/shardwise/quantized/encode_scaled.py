"""Quantizes to FP8 with scales per block, channel or tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..dtypes import torch_dtype
from ..layout.boxes import Box
from ..objects import frozen
from .scaled import Scaled
from .scales import in_step

if TYPE_CHECKING:
    import torch

__all__ = ["ScaledEncoder", "blockwise"]


@frozen
class ScaledEncoder:
    """``scale = absolute maximum of the block ÷ largest number of the codes``. Implements :class:`.Encoder`.

    In fp32, as transformers' ``Fp8Quantize`` computes it, which takes two reciprocals. Where scales are powers of two (UE8M0) they are
    rounded up; codes are computed from the scale as it is stored. A channel or a tensor is one block. A block that the tensor's edge
    cuts short has the maximum of what there is of it.
    """

    block: tuple[int, ...]
    shape: tuple[int, ...]
    codes: str
    scales: str
    power_of_two: bool

    makes = ("codes", "scales")

    @classmethod
    def of(
        cls, rule: Scaled, shape: tuple[int, ...], codes: str, scales: str, power_of_two: bool
    ) -> ScaledEncoder:
        return cls(rule.block, shape, codes, scales, power_of_two or scales in ("U8", "F8_E8M0"))

    @property
    def reference(self) -> str:
        rounded = ", scales rounded up to powers of two" if self.power_of_two else ""
        return f"FP8: absolute maximum / largest number, as transformers' Fp8Quantize{rounded}"

    @property
    def once(self) -> tuple[str, ...]:
        return ("scales",) if all(b >= n for b, n in zip(self.block, self.shape, strict=True)) else ()

    @property
    def unit(self) -> tuple[int, ...]:
        return tuple(1 for _ in self.shape) if self.once else self.block

    def encode(
        self,
        box: Box,
        values: torch.Tensor,
        kept: Mapping[str, torch.Tensor],
        measured: tuple[torch.Tensor, ...],
    ) -> Mapping[str, torch.Tensor]:
        import torch

        code_type, values = torch_dtype(self.codes), values.to(torch.float32, copy=True)
        most = torch.finfo(code_type).max
        if measured:
            low, high = measured
            largest = torch.maximum(low.abs(), high.abs()).float().view((1,) * len(self.shape))
        else:
            largest = blockwise(values.abs(), self.block, largest=True)
        one = torch.ones_like(largest)
        factors = torch.where(largest > 0, most / torch.where(largest > 0, largest, one), one)
        scales = (1.0 / factors).to(torch.float32)
        if self.power_of_two:
            tiny = torch.finfo(torch.float32).tiny
            scales = torch.pow(2.0, torch.ceil(torch.log2(scales.clamp(min=tiny))))
        stored = scales.to(torch.float8_e8m0fnu if self.scales == "U8" else torch_dtype(self.scales))
        if stored.dtype != torch.float32 or self.power_of_two:
            factors = 1.0 / stored.float()
        if values.numel():
            each, factor = in_step(values, factors, box, self.block)
            each.mul_(factor)
        codes = values.clamp_(-most, most).to(code_type)
        return {"codes": codes, "scales": stored.view(torch_dtype(self.scales))}


def blockwise(values: torch.Tensor, block: tuple[int, ...], *, largest: bool) -> torch.Tensor:
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
