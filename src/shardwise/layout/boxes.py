"""Boxes: half-open hyper-rectangles in a tensor's global index space. Plain integers, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Box", "LocalBox", "find_overlap", "whole"]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements with ``start[d] <= index[d] < stop[d]`` for every dim d. A 0-d box holds one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common elements, or None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` lies in this box."""
        return all(a <= c for a, c in zip(self.start, other.start, strict=True)) and all(
            d <= b for b, d in zip(self.stop, other.stop, strict=True)
        )


@dataclass(frozen=True, slots=True, order=True)
class LocalBox:
    """A box, and the index in the rank's local tensor at which its first element lies."""

    box: Box
    local_start: tuple[int, ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def find_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that share an element, or None.

    Sweeps along dim 0, so that N boxes cut along dim 0 cost O(N log N), not O(N²).
    """
    live = sorted(b for b in boxes if b.numel)
    if live and not live[0].start:  # 0-d: two boxes are two copies of one element
        return (live[0], live[1]) if len(live) > 1 else None
    open_boxes: list[Box] = []
    for box in live:
        open_boxes = [b for b in open_boxes if b.stop[0] > box.start[0]]
        for other in open_boxes:
            if other.intersect(box):
                return other, box
        open_boxes.append(box)
    return None
