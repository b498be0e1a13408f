"""Codes of any arrangement times a scale per tensor, channel, group or block: the rules of compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..dtypes import torch_dtype
from ..layout.boxes import Box, whole
from ..objects import frozen
from .codes import Codes
from .scales import blocks_of, factors, groups_within, in_step, slabs, widened

if TYPE_CHECKING:
    import torch

__all__ = ["Grouped"]


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
