"""Export of tensors on devices: cast there, and copied through a small ring while the files are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..checkpoint.own_files import Piece, boxes_on
from ..checkpoint.pieces import InParts, boxes_from, live_piece
from ..checkpoint.snapshot import Live
from ..checkpoint.stage import StagingBuffer
from ..devices import copies_late
from ..dtypes import torch_dtype
from ..layout.boxes import Box
from ..planning.build import transfers_of
from ..recipe.tiles import Tile
from ..transfer.box import wanted_box
from ..transfer.copy import Destination, Filler, Staging, write_back
from .files import HubFiles

__all__ = ["write_from_devices"]

#: Bytes of a tensor that are cast at a time.
_PART_BYTES = 8 * 1024**2


def write_from_devices(
    tensors: Sequence[tuple[Live, Sequence[Tile]]],
    output: HubFiles,
    filler: Filler,
    staging: Staging,
    rank: int,
) -> None:
    """Write this rank's boxes of tensors, each by its tiles. Memory: two parts of 8 MiB, pinned; one on the device."""
    buffer = StagingBuffer()
    if not tensors:
        return
    buffer.reserve(2 * _PART_BYTES, pinned=any(copies_late(live.tensor.device) for live, _ in tensors))

    def cast() -> Iterator[torch.Tensor]:
        for live, tiles in tensors:
            dtype = torch_dtype(_dtype(tiles, output))
            for _, part in _parts(live, rank):
                if part.dtype != dtype:
                    part = part.to(dtype)
                    buffer.order()
                yield part

    copying = buffer.copying(cast())
    for live, tiles in tensors:
        t, dtype = live.stored, _dtype(tiles, output)
        for whole, _ in _parts(live, rank):
            for box, part in boxes_from(lambda: buffer.pull(copying), whole, dtype):
                wanted, source = wanted_box(t.name, dtype, t.shape, box), Destination({t.name: part})
                for tile in tiles:
                    write_back(transfers_of(tile, wanted, output.tensors), filler, source, staging)


def _dtype(tiles: Sequence[Tile], output: HubFiles) -> str:
    """The dtype in the files: a tensor's hub tensors all have the same."""
    return output.tensors[tiles[0].source].dtype


def _parts(live: Live, rank: int) -> Iterator[tuple[Box, torch.Tensor]]:
    cut = InParts(live_piece, _PART_BYTES)
    for held in boxes_on(live.stored, rank):
        yield from cut.parts_of(Piece(live, held))
