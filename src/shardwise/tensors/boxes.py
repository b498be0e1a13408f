"""Boxes: half-open hyper-rectangles in a tensor's global index space. Plain integers, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..dtypes import code_of, itemsize
from ..errors import FormatError
from ..limits import MAX_COMPARISONS_PER_CHUNK
from ..objects import frozen

if TYPE_CHECKING:
    import torch


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

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in the elements of another one that contains it."""
        ends = zip(outer.start, self.start, self.stop, strict=True)
        return tuple(slice(start - first, stop - first) for first, start, stop in ends)

    def intersect(self, other: Box) -> Box | None:
        """The common elements, or None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        for a, b in zip(start, stop, strict=True):  # no any(): this runs a million times
            if a >= b:
                return None
        return Box(start, stop)

    def moved(self, by: Sequence[int]) -> Box:
        """The same box, moved by so many elements in each dim."""
        return Box(tuple(map(add, self.start, by)), tuple(map(add, self.stop, by)))

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

    def intersect(self, other: Box) -> LocalBox | None:
        """The part within another box, or None."""
        common = self.box.intersect(other)
        if common is None:
            return None
        inside = zip(self.local_start, common.start, self.box.start, strict=True)
        return LocalBox(common, tuple(at + a - b for at, a, b in inside))


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


# ----------------------------------------------------------------------------------------------------
# The dtype and shape of a tensor, without its name, content or place.


class TensorSpec(NamedTuple):
    """A tensor's stored dtype (a safetensors code) and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a live tensor, whole. Raises :class:`FormatError` if its dtype can't be stored."""
        return cls(code_of(tensor.dtype), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * itemsize(self.dtype)


# ----------------------------------------------------------------------------------------------------
# The tensors that a load has to fill, with this rank's boxes. Plain records, no torch.

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


# ----------------------------------------------------------------------------------------------------
# The box of a stored tensor that strided loops take elements of. Plain integers, no torch.


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


def contiguous_parts(box: Box, most: int) -> Iterator[Box]:
    """Cuts a box into boxes of at most ``most`` elements, contiguous in it and in row-major order; none for an empty box."""
    numel, sizes = box.numel, box.sizes
    if numel <= most:
        if numel:
            yield box
        return
    dim = next(d for d, n in enumerate(sizes) if n > 1)
    rows = max(1, most // (numel // sizes[dim]))
    for start in range(box.start[dim], box.stop[dim], rows):
        stop = min(start + rows, box.stop[dim])
        part = Box(
            (*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :])
        )
        yield from contiguous_parts(part, most)


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
