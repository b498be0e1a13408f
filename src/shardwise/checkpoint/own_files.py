"""The slice files that a rank writes in a save, and the pieces of tensors in them: worked out once, before any payload moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..catalog.checkpoint import directory
from ..dtypes import itemsize
from ..format.slices import Slice, SliceTensor, file_name, rank_files
from ..format.spread import file_count
from ..layout.boxes import LocalBox
from ..layout.placements import cut_boxes
from ..objects import frozen
from .snapshot import Live, ModelPart, OptimizerPart, Snapshot

__all__ = ["OwnFile", "OwnPart", "Piece", "boxes_on", "own_parts"]


class Piece(NamedTuple):  # as a slice
    """One box of a tensor on this rank."""

    live: Live
    held: LocalBox

    @property
    def is_on_device(self) -> bool:
        """Whether it is copied from a device, which then sums its digest."""
        return self.live.tensor.device.type not in ("cpu", "meta")

    @property
    def is_copied(self) -> bool:
        """Whether its bytes go anywhere. Of a tensor that the checkpoint only refers to they are summed where they lie."""
        return not self.live.refers

    @property
    def nbytes(self) -> int:
        return math.prod(self.held.box.sizes) * itemsize(self.live.stored.dtype)


@frozen
class OwnFile:
    """A slice file of this rank."""

    name: str
    """Its path in the checkpoint."""
    slices: Sequence[Slice]
    pieces: Sequence[Piece]
    """The content of each slice, in their order."""


@frozen
class OwnPart:
    """What this rank writes of one model or optimizer, and what it only sums: another rank writes it, or none."""

    files: Sequence[OwnFile]
    summed: Sequence[Piece]


def own_parts(snapshot: Snapshot, rank: int) -> tuple[OwnPart, ...]:
    """The files of a rank, for each of :attr:`Snapshot.parts`. Pure; linear in tensors, whatever the number of ranks."""
    return tuple([_own_part(part, rank) for part in snapshot.parts])


def _own_part(part: ModelPart | OptimizerPart, rank: int) -> OwnPart:
    by_name = {v.stored.name: v for v in part.live}
    stored = [v.stored for v in part.live if not v.refers]
    folder, count = directory(part.kind, part.name), file_count(stored)
    files = [
        OwnFile(
            f"{folder}/{file_name(part.kind, rank, k, count)}",
            slices,
            [Piece(by_name[s.tensor.name], s.held) for s in slices],
        )
        for k, slices in enumerate(rank_files(stored, rank))
    ]
    written = {s.tensor.name for file in files for s in file.slices}
    others = [v for v in part.live if v.counted and v.stored.name not in written]
    return OwnPart(files, [Piece(v, held) for v in others for held in boxes_on(v.stored, rank)])


def boxes_on(stored: SliceTensor, rank: int) -> tuple[LocalBox, ...]:
    """The boxes of a tensor that a rank holds."""
    coordinate = stored.geometry.coordinate(rank)
    return () if coordinate is None else cut_boxes(stored.shape, stored.geometry, coordinate)
