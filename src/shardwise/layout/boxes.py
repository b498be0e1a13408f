"""Boxes: half-open hyper-rectangles in a tensor's global index space. Plain integers, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import FormatError
from ..limits import MAX_COMPARISONS_PER_CHUNK

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

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects the box's elements in the global tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common elements, or None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        for a, b in zip(start, stop, strict=True):  # no any(): this runs a million times
            if a >= b:
                return None
        return Box(start, stop)

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` lies in this box."""
        for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True):
            if c < a or b < d:
                return False
        return True


@dataclass(frozen=True, slots=True, order=True)
class LocalBox:
    """A box, and the index in the rank's local tensor at which its first element lies."""

    box: Box
    local_start: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects the box's elements in the local tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.local_start, self.box.sizes, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def find_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that share an element, or None.

    Boxes that are cells of a grid, as cuts along dims make them, cost O(N log N). Any other boxes are swept along the
    dim that separates most of them. Raises :class:`FormatError` if that takes more than
    :data:`~shardwise.limits.MAX_COMPARISONS_PER_CHUNK` comparisons per box.
    """
    live = sorted(b for b in boxes if b.numel)
    for first, second in pairwise(live):
        if first == second:
            return first, second
    if not live or not live[0].start:
        return None
    cuts = [_distinct(sorted((b.start[d], b.stop[d]) for b in live)) for d in range(len(live[0].start))]
    if all(before[1] <= after[0] for cut in cuts for before, after in pairwise(cut)):
        return None
    dim = max(range(len(cuts)), key=lambda d: len(cuts[d]))
    live.sort(key=lambda b: b.start[dim])
    left = MAX_COMPARISONS_PER_CHUNK * len(live)
    open_boxes: list[Box] = []
    for box in live:
        open_boxes = [b for b in open_boxes if b.stop[dim] > box.start[dim]]
        left -= len(open_boxes)
        if left < 0:
            raise FormatError(
                f"{len(live)} chunks of a tensor are cut so irregularly that it takes more than "
                f"{MAX_COMPARISONS_PER_CHUNK} comparisons for each to prove that none overlap"
            )
        for other in open_boxes:
            if other.intersect(box):
                return other, box
        open_boxes.append(box)
    return None


def _distinct(ordered: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Each pair once. Compares instead of hashing: a file could choose pairs whose hashes collide."""
    return [pair for k, pair in enumerate(ordered) if not k or pair != ordered[k - 1]]
