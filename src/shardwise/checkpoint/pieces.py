"""The pieces that a rank hands to the writer, in order, and where their bytes come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, repeat
from typing import Protocol

import torch

from ..devices import copies_late
from ..digests.pending import PendingSums
from ..dtypes import itemsize, torch_dtype
from ..layout.boxes import Box, LocalBox
from ..layout.model import local_tensor
from .collect import Collected
from .own_files import Piece
from .stage import StagingBuffer, room_for
from .verify import boxes_of_run, runs_of

__all__ = [
    "Contents",
    "InParts",
    "LiveContents",
    "StagedContents",
    "StagedPieces",
    "boxes_from",
    "live_piece",
    "pieces_of",
]

#: Pinned memory of a save that waits: two copies of 8 MiB are under way or being written.
_RING_BYTES = 16 * 1024**2
_SUM_BYTES = 8
#: The most that the buffer adds to the bytes of a tensor.
_ROUNDING_BYTES = 64


def live_piece(piece: Piece) -> torch.Tensor:
    """The live tensor's elements in the box: a view."""
    found = local_tensor(piece.live.tensor).detach()
    for dim, (start, size) in enumerate(zip(piece.held.local_start, piece.held.box.sizes, strict=True)):
        if size != found.shape[dim]:
            found = found.narrow(dim, start, size)
    return found


def pieces_of(collected: Collected) -> Iterator[Piece]:
    """The pieces that a rank hands to the writer, in order. The writer writes them, or only sums replicas."""
    for part in collected.own:
        for file in part.files:
            yield from file.pieces
        yield from part.summed


# --- contents --------------------------------------------------------------------------------------------


class Contents(Protocol):
    """Gives the writer the bytes of pieces. It asks once for each piece of :func:`pieces_of`, in order."""

    def parts_of(self, piece: Piece) -> Iterator[tuple[Box | None, torch.Tensor]]:
        """The piece as consecutive tensors on the CPU, each valid until the next is asked for.

        Each comes with its box, to sum its digest; without one if the device sums the piece.
        """

    def device_sums(self) -> list[int]:
        """Digest sums of the pieces on a device that count, in order. After the last piece."""


#: Gives the tensor of a :class:`Piece`, on the CPU.
TensorOf = Callable[[Piece], torch.Tensor]


class InParts:
    """Asks ``tensor_of`` for each piece; for a piece of more than ``most_bytes``, for each part."""

    def __init__(self, tensor_of: TensorOf, most_bytes: int) -> None:
        self._tensor_of = tensor_of
        self._most_bytes = most_bytes

    def parts_of(self, piece: Piece) -> Iterator[tuple[Box, torch.Tensor]]:
        box, first = piece.held.box, piece.held.local_start
        limit = max(1, self._most_bytes // itemsize(piece.live.stored.dtype))
        for start, sizes, _ in runs_of(box.start, box.sizes, limit):
            part = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
            local = tuple(at + a - b for at, a, b in zip(first, start, box.start, strict=True))
            yield part, self._tensor_of(Piece(piece.live, LocalBox(part, local)))

    def device_sums(self) -> list[int]:
        return []


class StagedPieces:
    """The content of a :class:`StagingBuffer`: pieces, followed by the digest sums that devices compute."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self.is_pinned = any(copies_late(p.live.tensor.device) for p in pieces)
        """Whether pinned memory helps."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of it in the buffer."""
        sums = _SUM_BYTES * len(self._counted)
        devices = {p.live.tensor.device for p in self._counted}
        copied = sum(room_for(live_piece(p)) for p in self._pieces if p.is_copied)
        return copied + sums + _ROUNDING_BYTES * len(devices)

    def tensors(self, buffer: StagingBuffer) -> Iterator[torch.Tensor]:
        """What :meth:`StagingBuffer.copying` copies."""
        for piece in self._pieces:
            if piece.is_copied:
                yield live_piece(piece)
        vectors = self.sums.vectors
        buffer.order()
        yield from vectors

    @property
    def _counted(self) -> list[Piece]:
        return [p for p in self._pieces if p.is_on_device and p.live.counted]

    @cached_property
    def sums(self) -> PendingSums:
        """Digest sums of the pieces on devices; being made from the first call on."""
        return PendingSums((live_piece(p), p.held.box.start) for p in self._counted)

    def take_sums(self, take: Callable[[], torch.Tensor]) -> list[int]:
        """The sums from the buffer, after all pieces. ``take``: its next bytes."""
        if not any(piece.nbytes for piece in self._counted):
            return [0] * len(self._counted)
        views = chain([take()], (take() for _ in repeat(None)))  # the first one tells that the sums are made
        return self.sums.on_host([_joined(v.nbytes, views).view(v.dtype) for v in self.sums.vectors])


def _joined(nbytes: int, views: Iterator[torch.Tensor]) -> torch.Tensor:
    found = torch.empty(0, dtype=torch.uint8)
    while found.numel() < nbytes:
        found = torch.cat([found, next(views)])
    return found


class LiveContents:
    """The live tensors: in place on the CPU; from a device through a small ring, while the writer writes."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._staging = StagedPieces([p for p in pieces if p.is_on_device])
        self._buffer = StagingBuffer()
        self._copying: Iterator[None] | None = None

    @property
    def staging_bytes(self) -> int:
        """Host memory of the ring; 0 if no tensor lies on a device."""
        return self._buffer.nbytes

    def parts_of(self, piece: Piece) -> Iterator[tuple[Box | None, torch.Tensor]]:
        if not piece.is_on_device:
            yield piece.held.box, live_piece(piece)
            return
        left = piece.nbytes if piece.is_copied else 0
        while left:
            part = self._take()
            left -= part.numel()
            yield None, part

    def device_sums(self) -> list[int]:
        return self._staging.take_sums(self._take)

    def _take(self) -> torch.Tensor:
        if self._copying is None:
            nbytes = min(_RING_BYTES, self._staging.nbytes)
            self._buffer.reserve(nbytes, pinned=self._staging.is_pinned)
            self._copying = self._buffer.copying(self._staging.tensors(self._buffer))
            next(self._copying, None)
            _ = self._staging.sums  # made beside the copies
        return self._buffer.pull(self._copying)


def boxes_from(take: Callable[[], torch.Tensor], box: Box, dtype: str) -> Iterator[tuple[Box, torch.Tensor]]:
    """A box of a tensor from a buffer, as consecutive boxes. ``take``: its next bytes, valid until the next call."""
    numel, done = math.prod(box.sizes), 0
    while done < numel:
        values = take().view(torch_dtype(dtype))
        for start, sizes in boxes_of_run(box.start, box.sizes, done, done + values.numel()):
            count = math.prod(sizes)
            part, values = values[:count], values[count:]
            yield Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True))), part.view(sizes)
            done += count


class StagedContents:
    """Copies of all pieces, from a buffer into which another thread puts :meth:`StagedPieces.tensors`."""

    def __init__(self, staging: StagedPieces, buffer: StagingBuffer) -> None:
        self._staging = staging
        self._buffer = buffer

    def parts_of(self, piece: Piece) -> Iterator[tuple[Box | None, torch.Tensor]]:
        if not piece.is_on_device:
            if piece.is_copied:
                yield from boxes_from(self._buffer.take, piece.held.box, piece.live.stored.dtype)
            else:
                yield piece.held.box, live_piece(piece)
            return
        left = piece.nbytes if piece.is_copied else 0
        while left:
            part = self._buffer.take()
            left -= part.numel()
            yield None, part

    def device_sums(self) -> list[int]:
        return self._staging.take_sums(self._buffer.take)
