"""The tensors that a load has to fill, with this rank's boxes. Plain records, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ..dtypes import itemsize
from ..objects import frozen
from .boxes import LocalBox, whole

__all__ = ["Layout", "TensorKind", "Wanted", "contiguous_strides", "whole_tensor"]

TensorKind = Literal["parameter", "buffer", "state"]


@frozen
class Wanted:
    """A tensor to be filled on this rank.

    ``aliases`` are its other names (ties). ``local_shape`` and ``local_strides`` (in elements) describe the storage of
    the boxes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]
    local_shape: tuple[int, ...]
    local_strides: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    kind: TensorKind = "parameter"

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def local_nbytes(self) -> int:
        """Bytes that this rank holds, padding excluded."""
        return sum(b.box.numel for b in self.boxes) * itemsize(self.dtype)


@frozen
class Layout:
    """Every wanted tensor of a model on one rank, in module order."""

    wanted: tuple[Wanted, ...]

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.wanted)

    @property
    def local_nbytes(self) -> int:
        return sum(w.local_nbytes for w in self.wanted)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def whole_tensor(name: str, dtype: str, shape: Sequence[int]) -> Wanted:
    """A wanted tensor that lies whole and contiguous on this rank."""
    box = whole(shape)
    boxes = (LocalBox(box, box.start),) if box.numel else ()
    return Wanted(name, dtype, box.stop, boxes, box.stop, contiguous_strides(shape), kind="state")
