"""A live model's elements by hub tensor: which of them this rank brings, and windows of files that it fills with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..format.slices import SliceTensor, assign_owners, owner_ranks
from ..layout.live import LiveModel
from ..layout.model import wanted_of
from ..layout.spec import TensorSpec
from ..layout.wanted import Wanted
from ..planning.build import transfers_of
from ..recipe.tiles import Tile, cut
from ..transfer.copy import Destination, Filler, Staging, write_back
from .files import HubFiles
from .job import Window

__all__ = ["Brought", "LiveWindows", "Near", "Piece", "brought_by", "by_hub", "pieces_by"]

#: By hub tensor: boxes of this rank's tensors, and the tiles that say what they are of it.
Brought = Mapping[str, Sequence[tuple[Wanted, Tile]]]
#: A box of a tensor, and the tiles that say what of hub tensors its tensor holds.
Piece = tuple[Wanted, Sequence[Tile]]
#: The elements of a box that a part of a tile has: the box itself, or a smaller one around them.
Near = Callable[[Wanted, Tile], Iterable[tuple[Wanted, Destination]]]


def brought_by(
    rank: int, live: LiveModel, tensors: Mapping[str, torch.Tensor], tiles: Mapping[str, Sequence[Tile]]
) -> Brought:
    """What a rank brings of each hub tensor: among replicas one rank, chosen as in a save. Rank-local."""
    return by_hub(pieces_by(rank, live, tensors, tiles))


def pieces_by(
    rank: int, live: LiveModel, tensors: Mapping[str, torch.Tensor], tiles: Mapping[str, Sequence[Tile]]
) -> list[Piece]:
    """The same, by the model's tensors. Rank-local."""
    owned = assign_owners([SliceTensor(n, *TensorSpec.of(t), live.geometries[n]) for n, t in tensors.items()])
    return [
        (wanted_of(t.name, tensors[t.name], t.geometry), tiles.get(t.name, ()))
        for t in owned
        if rank in owner_ranks(t.geometry, t.owner)
    ]


def by_hub(pieces: Iterable[Piece]) -> Brought:
    """Pieces by hub tensor."""
    brought: dict[str, list[tuple[Wanted, Tile]]] = {}
    for wanted, tiles in pieces:
        for tile in tiles:
            brought.setdefault(tile.source, []).append((wanted, tile))
    return brought


class LiveWindows:
    """As :class:`.Windows`. Memory: half the staging limit, for elements that are strided, cast or on a device; what ``near`` reads."""

    is_spread = True

    def __init__(self, near: Near, brought: Brought, output: HubFiles, staging: Staging) -> None:
        self._near, self._brought, self._output, self._staging = near, brought, output, staging

    def fill(self, window: Window, filler: Filler) -> None:
        for key, box in window.parts:
            for wanted, tile in self._brought.get(key, ()):
                for part in cut(tile, "source", box):
                    for held, elements in self._near(wanted, part):
                        transfers = transfers_of(part, held, self._output.tensors)
                        write_back(transfers, filler, elements, self._staging)

    def fill_together(self, window: Window, owner: int, filler: Filler) -> None:
        """Does nothing: each rank has its elements."""

    def finish(self) -> list[int]:
        """Nothing: a live model has no recorded digests."""
        return []
