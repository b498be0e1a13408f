"""The box of a stored tensor that strided loops take elements of. Plain integers, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from ..layout.boxes import Box
from ..layout.wanted import contiguous_strides
from ..objects import frozen

__all__ = ["SourceBox", "along_dims", "boxes_of_range", "source_box"]


@frozen
class SourceBox:
    """The smallest box that holds the elements of a loop nest, and where they lie in it.

    ``sizes`` and ``strides`` (of the box, row-major and contiguous) are those of a strided view from its first element, in the
    order of the loops, some of which take several dims.
    """

    box: Box
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@frozen
class _Steps:
    """``size`` steps along one dim."""

    size: int
    dim: int
    step: int


def source_box(flat: int, loops: Iterable[tuple[int, int]], shape: Sequence[int]) -> SourceBox:
    """The box of loops (size and stride in elements) from the element at ``flat`` of a row-major tensor of this ``shape``.

    The loops are those of a tile that was cut, maybe merged where they go through whole rows.
    """
    first = _index(flat, shape)
    steps = [one for size, stride in loops for one in _along_dims(size, stride, first, shape)]
    reach = [0] * len(shape)
    for one in steps:
        reach[one.dim] += one.step * (one.size - 1)
    stop = tuple(a + n + 1 for a, n in zip(first, reach, strict=True))
    assert all(b <= n for b, n in zip(stop, shape, strict=True)), (flat, shape)
    box = Box(first, stop)
    strides = contiguous_strides(box.sizes)
    return SourceBox(box, tuple(s.size for s in steps), tuple(s.step * strides[s.dim] for s in steps))


def along_dims(
    flat: int, loops: Iterable[tuple[int, int]], shape: Sequence[int]
) -> Iterator[list[tuple[int, int]]]:
    """Each loop as loops along single dims, outermost first: their sizes and strides. For the arguments of :func:`source_box`."""
    first, strides = _index(flat, shape), contiguous_strides(tuple(shape))
    for size, stride in loops:
        yield [(s.size, s.step * strides[s.dim]) for s in _along_dims(size, stride, first, shape)]


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element by its place in row-major order."""
    found = []
    for n in reversed(shape):
        found.append(flat % n)
        flat //= n
    return tuple(reversed(found))


def _along_dims(size: int, stride: int, first: Sequence[int], shape: Sequence[int]) -> Iterator[_Steps]:
    """A loop as steps along single dims, outermost first: loops that go through whole rows had been merged."""
    strides = contiguous_strides(tuple(shape))
    # Of dims of one element, which share a stride with the next one, the loop means the one that has room.
    dim = min(d for d, (s, n) in enumerate(zip(strides, shape, strict=True)) if s <= stride and n > 1)
    found: list[_Steps] = []
    while size > 1:
        assert dim >= 0, (size, stride, first, shape)
        step = stride // strides[dim]
        assert step * strides[dim] == stride, (size, stride, first, shape)
        room = -(-(shape[dim] - first[dim]) // step)
        if size <= room:
            found.append(_Steps(size, dim, step))
            break
        room = strides[dim] * shape[dim] // stride
        assert room * stride == strides[dim] * shape[dim], (size, stride, first, shape)
        assert size % room == 0, (size, stride, first, shape)
        found.append(_Steps(room, dim, step))
        size, stride, dim = size // room, strides[dim] * shape[dim], dim - 1
        while dim > 0 and shape[dim] == 1:
            dim -= 1
    yield from reversed(found)


def boxes_of_range(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """The elements from ``start`` to ``stop`` in row-major order, as boxes that are contiguous, in order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # all in one row
        yield from _inside(last, start - last * row, stop - last * row, shape)
        return
    if start < first * row:
        yield from _inside(first - 1, start - (first - 1) * row, row, shape)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last, *shape[1:]))
    if last * row < stop:
        yield from _inside(last, 0, stop - last * row, shape)


def _inside(index: int, start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """The boxes of a range inside one row of the outermost dim."""
    for box in boxes_of_range(start, stop, shape[1:]):
        yield Box((index, *box.start), (index + 1, *box.stop))
