"""Which scales a load needs, and those that were read, and found right, before the first weight is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from ..catalog.records import Coded, StoredTensor
from ..dtypes import itemsize
from ..layout.boxes import Box, whole
from ..planning.buckets import Span
from ..planning.records import Transfer
from ..planning.source_box import boxes_of_range
from ..recipe.host_convert import HostConversion
from .copy import parts_of

__all__ = [
    "ROWS",
    "CheckedScales",
    "boxes_of_conversions",
    "boxes_of_spans",
    "boxes_of_transfers",
    "elements_at_a_time",
    "inside",
]

#: Rows that are read or decoded at a time are a multiple of it, if there are as many: blocks of scales across rows are then seldom cut.
ROWS = 32
#: Elements of which the scales are read at a time, where a transfer takes some of a box.
_ELEMENTS = 512 * 1024
#: The share of the staging for scales that a rank keeps from the check to the decoding, so that it reads them once.
_KEPT_SHARE = 3 / 8
#: Scales of which codes have this many times the bytes are read twice, if there is no room to keep them.
_FEW = 64


class CheckedScales:
    """Boxes of scales in memory, by the stored tensor that they are of; a part of ``staging_bytes``."""

    def __init__(self, staging_bytes: int) -> None:
        self._most_bytes = int(_KEPT_SHARE * staging_bytes)
        self.nbytes = 0
        self._held: dict[str, list[tuple[Box, torch.Tensor]]] = {}

    def has_room(self, one: Coded, boxes: Mapping[str, Box]) -> bool | None:
        """Whether the scales of a box can be kept; None if they can't, and are too many to be read twice."""
        nbytes = sum(box.numel * itemsize(one.parts[role].dtype) for role, box in boxes.items())
        if self.nbytes + nbytes <= self._most_bytes:
            return True
        scales = sum(one.parts[role].nbytes for role in boxes)
        return False if scales * _FEW <= one.stored_bytes - scales else None

    def keep(self, name: str, box: Box, elements: torch.Tensor) -> None:
        """Keep a copy of the elements of a box."""
        self.nbytes += elements.nbytes
        self._held.setdefault(name, []).append((box, elements.clone()))

    def find(self, name: str, box: Box) -> torch.Tensor | None:
        """A copy of the elements of a box, if they are kept."""
        for outer, elements in self._held.get(name, ()):
            if outer.contains(box):
                return elements[inside(outer, box)].clone(memory_format=torch.contiguous_format)
        return None


def inside(outer: Box, inner: Box) -> tuple[slice, ...]:
    """The index of a box in the elements of another one that holds it."""
    ends = zip(outer.start, inner.start, inner.stop, strict=True)
    return tuple(slice(start - first, stop - first) for first, start, stop in ends)


def boxes_of_transfers(
    transfers: Iterable[Transfer], coded: Mapping[str, Coded]
) -> Iterator[tuple[Coded, Box]]:
    """The boxes of tensors in parts that transfers read."""
    for transfer in transfers:
        if (one := coded.get(transfer.path)) is not None:
            yield from ((one, box) for box in _boxes(transfer, one.tensor.shape))


def boxes_of_conversions(
    hosts: Iterable[HostConversion], coded: Mapping[str, Coded], stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[Coded, Box]]:
    """The tensors in parts that host conversions read, whole."""
    for name in dict.fromkeys(name for host in hosts for name in host.sources):
        chunks = stored[name].chunks
        if chunks and (one := coded.get(chunks[0].path)) is not None:
            yield one, whole(one.tensor.shape)


def _boxes(transfer: Transfer, shape: tuple[int, ...]) -> Iterator[Box]:
    """One box, if the transfer takes all of its elements, otherwise those of its parts."""
    transfer = transfer.along_dims(shape)
    box = transfer.box_in(shape).box
    if box.numel * itemsize(transfer.source_dtype) == transfer.bytes_to_read:
        yield box
        return
    for part in parts_of(transfer, _ELEMENTS * itemsize(transfer.source_dtype)):
        yield part.box_in(shape).box


def boxes_of_spans(
    spans: Iterable[Span], coded: Mapping[str, Coded], parts_bytes: int
) -> Iterator[tuple[Coded, Box]]:
    """The boxes of tensors in parts that :class:`.DecodingReader` reads at a time for spans that come in this order.

    ``parts_bytes``: :attr:`.IOOptions.parts_bytes` of the load.
    """
    for path, start, stop in _joined(spans):
        if (one := coded.get(path)) is not None:
            size = itemsize(one.tensor.dtype)
            for box in boxes_of_range(start // size, -(-stop // size), one.tensor.shape):
                yield from ((one, part) for part in _in_parts(one, box, parts_bytes))


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans of which one goes on where the one before ends, as one."""
    last: Span | None = None
    for span in spans:
        if last is not None and (last[0], last[2]) == span[:2]:
            last = (last[0], last[1], span[2])
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def elements_at_a_time(one: Coded, parts_bytes: int) -> int:
    """Elements whose parts have ``parts_bytes``: each read has its own small plan, and transposed parts come in longer runs."""
    return max(1, parts_bytes * one.tensor.nbytes // (max(1, one.stored_bytes) * itemsize(one.tensor.dtype)))


def _in_parts(one: Coded, box: Box, parts_bytes: int) -> Iterator[Box]:
    """A contiguous box in rows, of :func:`elements_at_a_time`."""
    dim = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if dim is None:
        yield box
        return
    rows = max(1, elements_at_a_time(one, parts_bytes) * box.sizes[dim] // box.numel)
    rows -= rows % ROWS if rows > ROWS else 0
    for first in range(box.start[dim], box.stop[dim], rows):
        last = min(first + rows, box.stop[dim])
        yield Box(
            (*box.start[:dim], first, *box.start[dim + 1 :]), (*box.stop[:dim], last, *box.stop[dim + 1 :])
        )
