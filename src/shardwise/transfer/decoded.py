"""Reads tensors that a source stores as codes: boxes of their parts from files, decoded in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from ..catalog.records import Coded, ColumnsRule, OpeningRule, StoredTensor
from ..dtypes import itemsize, torch_dtype
from ..layout.boxes import Box
from ..layout.wanted import contiguous_strides
from ..planning.buckets import Span
from ..planning.build import transfers_of
from ..planning.records import IOOptions, Transfer
from ..planning.source_box import boxes_of_range
from ..recipe.tiles import identity
from .box import read_box, wanted_box
from .checked import ROWS, CheckedScales, elements_at_a_time, inside
from .converted import Reader
from .copy import Staging, parts_of, spans_of

__all__ = ["DecodingReader", "spans_of_box"]


#: Elements that are decoded at a time: what comes between stays in a processor's cache, and calls of torch weigh little.
_ELEMENTS = 1024 * 1024
#: Bytes of memory that the decoding of an element takes on the way: its code, zero point, scale and result.
_BYTES_PER_ELEMENT = 16
Decode = Callable[[Box], torch.Tensor]


class DecodingReader:
    """Reads files. A path that names a tensor in parts reads boxes of its parts, and decodes them.

    Rank-local. Memory: within ``IOOptions.staging_bytes``, if that is 22 MiB or more. Kept scales take up to 3/8 of it, parts
    3/16 (twice for an :class:`.OpeningRule`), decoded elements 1/4. Scales and parts are recorded in ``peak_bytes``.
    """

    def __init__(self, files: Reader, coded: Mapping[str, Coded], io: IOOptions) -> None:
        """``coded``: by path."""
        self._files = files
        self._coded = coded
        self._staging = Staging(io)
        self._rooms: dict[str, Staging] = {}
        self._checked = CheckedScales(io.staging_bytes)
        self._announced: dict[str, list[Box]] = {}
        self._held: tuple[str, Box, Decode] | None = None
        self._opened_bytes = 0
        self._io = io
        self._elements_at_a_time = max(ROWS, min(_ELEMENTS, io.staging_bytes // 4 // _BYTES_PER_ELEMENT))
        if coded:
            _let_malloc_keep_memory()

    @property
    def peak_bytes(self) -> int:
        """Host memory for parts."""
        return (
            self._checked.nbytes
            + self._staging.peak_bytes
            + sum(room.peak_bytes for room in self._rooms.values())
            + self._opened_bytes
        )

    def check_scales(self, boxes: Iterable[tuple[Coded, Box]]) -> None:
        """Read the scales of boxes, and keep them for the decoding, as far as there is room.

        Raises :class:`IntegrityError` for scales that are NaN or infinite. Those that are too many to be kept are checked when their
        codes are read.
        """
        from ..quantized.finite_scales import check_scales, scales_in

        for one, box in boxes:
            asked = scales_in(one, box)
            if not asked or (is_kept := self._checked.has_room(one, asked)) is None:
                continue
            parts = {role: self._box(role, one.parts[role], part) for role, part in asked.items()}
            check_scales(one, box, parts)
            for role, part in asked.items() if is_kept else ():
                self._checked.keep(one.parts[role].name, part, parts[role])

    def announce(self, boxes: Iterable[tuple[Coded, Box]]) -> None:
        """Parts of these boxes are read at a time, and kept for the reads of ranges of bytes within them: each is read once."""
        self._announced = {}
        for one, box in boxes:
            self._announced.setdefault(one.path, []).append(box)

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
            for piece, decode in self._pieces(one, box):
                for slab in _slabs(piece, self._elements_at_a_time):
                    nbytes = slab.numel * size
                    made = _checked(one, slab, decode(slab)).to(torch_dtype(one.tensor.dtype))
                    found[at : at + nbytes] = made.reshape(-1).view(torch.uint8)
                    at += nbytes

    def _pieces(self, one: Coded, box: Box) -> Iterator[tuple[Box, Decode]]:
        """A contiguous box in pieces, in order, each with what decodes boxes within the announced box around it."""
        within = [
            (around, piece)
            for around in self._announced.get(one.path, ())
            if (piece := around.intersect(box))
        ]
        if sum(piece.numel for _, piece in within) != box.numel:  # not announced
            within = [(box, box)]
        for around, piece in within:
            if self._held is None or self._held[:2] != (one.path, around):
                self._held = (one.path, around, self._opened(one, around))
            yield piece, self._held[2]

    def elements(self, transfer: Transfer) -> Iterator[tuple[Transfer, torch.Tensor]] | None:
        """The elements of a transfer, in parts with their loops as dims; None if they lie in a file."""
        one = self._coded.get(transfer.path)
        return self._files.elements(transfer) if one is None else self._elements(one, transfer)

    def _elements(self, one: Coded, transfer: Transfer) -> Iterator[tuple[Transfer, torch.Tensor]]:
        transfer = transfer.along_dims(one.tensor.shape)
        slab_bytes = _slab_bytes(transfer, self._elements_at_a_time)
        most = elements_at_a_time(one, self._io.parts_bytes)
        slabs = most * itemsize(transfer.source_dtype) // slab_bytes
        for large in _by_columns(one, transfer, most) or parts_of(transfer, max(1, slabs) * slab_bytes):
            decode = self._opened(one, large.box_in(one.tensor.shape).box)
            for part in parts_of(large, slab_bytes):
                found = part.box_in(one.tensor.shape)
                made = _checked(one, found.box, decode(found.box))
                sizes = [loop.size for loop in part.loops]
                yield part, torch.as_strided(made, found.sizes, found.strides).reshape(sizes)

    def _opened(self, one: Coded, box: Box) -> Decode:
        """Read the parts of a box, into memory that the next call takes again; what decodes boxes within it."""
        self._held, boxes = None, one.rule.boxes(box)
        parts = {role: self._box(role, one.parts[role], part) for role, part in boxes.items()}
        if not isinstance(one.rule, OpeningRule):
            return lambda inner: one.rule.decode(inner, _inner(one, inner, boxes, parts))
        self._opened_bytes = max(self._opened_bytes, sum(part.nbytes for part in parts.values()))
        return one.rule.opened(box, parts)

    def _box(self, role: str, stored: StoredTensor, box: Box) -> torch.Tensor:
        """A box of a stored tensor, in memory that the next box of this role takes again."""
        if (kept := self._checked.find(stored.name, box)) is not None:
            return kept
        wanted = wanted_box(stored.name, stored.dtype, stored.shape, box)
        if role not in self._rooms:
            self._rooms[role] = Staging(replace(self._io, staging_bytes=2**62))  # as much as the largest box
        tile = identity(stored.name, stored.shape)
        return read_box(wanted, (tile,), {stored.name: stored}, self._files, self._staging, self._rooms[role])


def _by_columns(one: Coded, transfer: Transfer, most: int) -> list[Transfer]:
    """A transfer in pieces of whole groups of columns, of at most ``most`` elements; none where rows are read as well.

    ``transfer``: with loops along dims. Each piece of a transposed matrix is then contiguous in the file, and nothing is read twice.
    """
    if not isinstance(one.rule, ColumnsRule) or not transfer.loops or transfer.loops[-1].source_stride != 1:
        return []
    loop, together = transfer.loops[-1], one.rule.columns_together
    step = most // max(1, transfer.numel // loop.size) // together * together
    if not step:
        return []
    first = transfer.offset_bytes // itemsize(transfer.source_dtype) % one.tensor.shape[1]
    found, at = [], 0
    while at < loop.size:
        count = min(step - (first + at) % together, loop.size - at)
        found.append(
            replace(
                transfer,
                offset_bytes=transfer.offset_bytes + at * itemsize(transfer.source_dtype),
                target_offset=transfer.target_offset + at * loop.target_stride,
                loops=(*transfer.loops[:-1], replace(loop, size=count)),
            )
        )
        at += count
    return found


def _let_malloc_keep_memory() -> None:
    """Make ``malloc`` reuse what each decoded slab frees; on the machine measured, a third of the time of a decoding load.

    glibc gives freed blocks back to the system, so that each slab faults in its pages anew, unless they are smaller than half
    of the largest block that was freed before (``M_MMAP_THRESHOLD``, mallopt(3)). This one is never touched.
    """
    torch.empty(16 * 1024**2, dtype=torch.uint8)


def _checked(one: Coded, box: Box, made: torch.Tensor) -> torch.Tensor:
    assert made.shape == box.sizes, one.tensor.name
    assert made.dtype in (torch_dtype(one.tensor.dtype), torch.float32), one.tensor.name
    return made.contiguous()


def _inner(
    one: Coded, box: Box, boxes: Mapping[str, Box], parts: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parts of a smaller box, from those of ``boxes``, with the strides that their shape has by itself."""
    inner = {role: parts[role][inside(boxes[role], part)] for role, part in one.rule.boxes(box).items()}
    return {
        role: part
        if part.stride() == contiguous_strides(part.shape)
        else part.clone(memory_format=torch.contiguous_format)
        for role, part in inner.items()
    }


def spans_of_box(one: Coded, box: Box) -> Iterator[Span]:
    """What the parts of a box are read from."""
    for role, part in one.rule.boxes(box).items():
        stored = one.parts[role]
        wanted = wanted_box(stored.name, stored.dtype, stored.shape, part)
        tile = identity(stored.name, stored.shape)
        yield from spans_of(transfers_of(tile, wanted, {stored.name: stored}))


def _slab_bytes(transfer: Transfer, elements: int) -> int:
    """Bytes of the slabs that a transfer is decoded in: about ``elements`` elements."""
    row = transfer.numel // transfer.loops[0].size if transfer.loops else 1
    if elements >= ROWS * row:
        elements -= elements % (ROWS * row)
    return elements * itemsize(transfer.source_dtype)


def _slabs(box: Box, elements: int) -> Iterator[Box]:
    """A contiguous box in contiguous parts of about ``elements`` elements."""
    dim = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if dim is None or box.numel <= elements:
        yield box
        return
    step = max(1, elements * box.sizes[dim] // box.numel)
    for start in range(box.start[dim], box.stop[dim], step):
        stop = min(start + step, box.stop[dim])
        part = Box(
            (*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :])
        )
        yield from _slabs(part, elements) if part.numel > elements and stop - start == 1 else (part,)
