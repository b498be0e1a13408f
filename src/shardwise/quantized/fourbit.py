"""bitsandbytes' 4-bit codes: NF4 and FP4, two a byte, with a scale for each block of consecutive elements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from ..dtypes import torch_dtype
from ..layout.boxes import Box, whole
from ..objects import frozen
from .groups import pieces
from .scales import finite
from .words import covering, looked_up

if TYPE_CHECKING:
    import torch

__all__ = ["FourBit", "Nested", "book_of"]

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
class FourBit:
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
            for view, blocks in pieces(values, box.start[-1], self.block):
                view.mul_(scales[..., blocks].unsqueeze(-1))
        return values.to(dtype)

    def _values(self, box: Box, codes: torch.Tensor) -> torch.Tensor:
        """What the codes of a box stand for, unscaled."""
        values = looked_up(codes, _pairs(self.quant_type))
        if self.shape[-1] % 2:
            first = covering(*_span(box, self.shape), 2)[0] * 2
            return values[_places(box, self.shape) - first]
        return values.narrow(-1, box.start[-1] % 2, box.sizes[-1])

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
