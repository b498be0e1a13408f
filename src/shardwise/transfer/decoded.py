"""Reads tensors that a source stores as codes: boxes of their parts from files, decoded in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from ..catalog.records import Coded, StoredTensor
from ..dtypes import itemsize, torch_dtype
from ..layout.boxes import Box
from ..planning.buckets import Span
from ..planning.build import transfers_of
from ..planning.records import IOOptions, Transfer
from ..planning.source_box import boxes_of_range
from ..quantized.finite_scales import check_scales, scales_in
from ..recipe.tiles import identity
from .box import read_box, wanted_box
from .checked import CheckedScales, inside
from .converted import Reader
from .copy import Staging, parts_of, spans_of

__all__ = ["DecodingReader", "spans_of_coded"]


#: Elements that are decoded at a time: they and what comes between stay in a core's cache.
_ELEMENTS = 512 * 1024


class DecodingReader:
    """Reads files. A path that names a tensor in parts reads boxes of its parts, and decodes them.

    Rank-local. Memory: a few times ``_ELEMENTS`` elements; the parts are read through ``staging``, recorded in ``peak_bytes``.
    """

    def __init__(self, files: Reader, coded: Mapping[str, Coded], io: IOOptions) -> None:
        """``coded``: by path."""
        self._files = files
        self._coded = coded
        self._staging = Staging(io)
        self._rooms: dict[str, Staging] = {}
        self._checked = CheckedScales()
        self._io = io

    @property
    def peak_bytes(self) -> int:
        """Host memory for parts."""
        return (
            self._checked.nbytes
            + self._staging.peak_bytes
            + sum(room.peak_bytes for room in self._rooms.values())
        )

    def check_scales(self, boxes: Iterable[tuple[Coded, Box]]) -> None:
        """Read the scales of boxes, and keep them for the decoding, as far as there is room.

        Raises :class:`IntegrityError` for scales that are NaN or infinite. Those that are too many to be kept are checked when their
        codes are read.
        """
        for one, box in boxes:
            asked = scales_in(one, box)
            if not asked or (is_kept := self._checked.has_room(one, asked)) is None:
                continue
            parts = {role: self._box(role, one.parts[role], part) for role, part in asked.items()}
            check_scales(one, box, parts)
            for role, part in asked.items() if is_kept else ():
                self._checked.keep(one.parts[role].name, part, parts[role])

    def expecting(self, spans: Iterable[Span]) -> AbstractContextManager[None]:
        """As :meth:`FileReader.expecting`. Each read of a box announces its own spans."""
        return self._files.expecting(span for span in spans if span[0] not in self._coded)

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """As :meth:`FileReader.read_into`. Raises :class:`IntegrityError` for scales that are NaN or infinite."""
        one = self._coded.get(path)
        if one is None:
            self._files.read_into(path, offset_bytes, view)
            return
        size, found = itemsize(one.tensor.dtype), torch.frombuffer(view, dtype=torch.uint8)
        start = offset_bytes // size
        assert start * size == offset_bytes, (path, offset_bytes)
        at = 0
        for box in boxes_of_range(start, start + view.nbytes // size, one.tensor.shape):
            boxes, parts = self._read(one, box)
            for slab in _slabs(box):
                nbytes = slab.numel * size
                inner = {
                    role: parts[role][inside(boxes[role], part)].clone(memory_format=torch.contiguous_format)
                    for role, part in one.rule.boxes(slab).items()
                }
                found[at : at + nbytes] = _decoded(one, slab, inner).reshape(-1).view(torch.uint8)
                at += nbytes

    def elements(self, transfer: Transfer) -> Iterator[tuple[Transfer, torch.Tensor]] | None:
        """The elements of a transfer, in parts with their loops as dims; None if they lie in a file."""
        one = self._coded.get(transfer.path)
        return self._files.elements(transfer) if one is None else self._elements(one, transfer)

    def _elements(self, one: Coded, transfer: Transfer) -> Iterator[tuple[Transfer, torch.Tensor]]:
        transfer = transfer.along_dims(one.tensor.shape)
        for part in parts_of(transfer, _ELEMENTS * itemsize(transfer.source_dtype)):
            found = part.box_in(one.tensor.shape)
            made = _decoded(one, found.box, self._read(one, found.box)[1])
            sizes = [loop.size for loop in part.loops]
            yield part, torch.as_strided(made, found.sizes, found.strides).reshape(sizes)

    def _read(self, one: Coded, box: Box) -> tuple[Mapping[str, Box], dict[str, torch.Tensor]]:
        """The boxes of the parts, and their elements."""
        boxes = one.rule.boxes(box)
        return boxes, {role: self._box(role, one.parts[role], part) for role, part in boxes.items()}

    def _box(self, role: str, stored: StoredTensor, box: Box) -> torch.Tensor:
        """A box of a stored tensor, in memory that the next box of this role takes again."""
        if (kept := self._checked.find(stored.name, box)) is not None:
            return kept
        wanted = wanted_box(stored.name, stored.dtype, stored.shape, box)
        if role not in self._rooms:
            self._rooms[role] = Staging(replace(self._io, staging_bytes=2**62))  # as much as the largest box
        tile = identity(stored.name, stored.shape)
        return read_box(wanted, (tile,), {stored.name: stored}, self._files, self._staging, self._rooms[role])


def _decoded(one: Coded, box: Box, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    made = one.rule.decode(box, parts)
    assert (made.dtype, tuple(made.shape)) == (torch_dtype(one.tensor.dtype), box.sizes), one.tensor.name
    return made.contiguous()


def spans_of_coded(one: Coded, span: Span) -> Iterator[Span]:
    """What a read of bytes of a tensor in parts reads from files."""
    size, (_, start, stop) = itemsize(one.tensor.dtype), span
    for box in boxes_of_range(start // size, -(-stop // size), one.tensor.shape):
        for role, part in one.rule.boxes(box).items():
            stored = one.parts[role]
            wanted = wanted_box(stored.name, stored.dtype, stored.shape, part)
            tile = identity(stored.name, stored.shape)
            yield from spans_of(transfers_of(tile, wanted, {stored.name: stored}))


def _slabs(box: Box) -> Iterator[Box]:
    """A contiguous box in contiguous parts of about ``_ELEMENTS`` elements."""
    dim = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if dim is None or box.numel <= _ELEMENTS:
        yield box
        return
    step = max(1, _ELEMENTS * box.sizes[dim] // box.numel)
    for start in range(box.start[dim], box.stop[dim], step):
        stop = min(start + step, box.stop[dim])
        part = Box(
            (*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :])
        )
        yield from _slabs(part) if part.numel > _ELEMENTS and stop - start == 1 else (part,)
