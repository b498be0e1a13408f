"""The weights of an export into the source's own format: those of a live model, or of a stored one that is read piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from ..catalog import StoredTensor
from ..digests.digest import partial_sum
from ..layout.boxes import Box
from ..layout.spec import TensorSpec
from ..layout.wanted import Wanted
from ..names import Named
from ..planning.build import transfers_of
from ..ranks.ranks import Ranks
from ..recipe.origin import recall
from ..recipe.tiles import Tile, bounds, identity
from ..transfer.box import wanted_box
from ..transfer.copy import Destination, Filler, Staging, write_back
from .files import HubFiles
from .live import LiveJob
from .live_windows import Piece
from .stored import StoredJob
from .stored_windows import share_of
from .tensors import HubTensors

__all__ = ["LiveWeights", "StoredWeights", "Weights"]

#: Bytes of a stored tensor that are read, compared and digested at a time, unless half the staging limit is less.
_PIECE_BYTES = 8 * 1024**2


class Weights(Protocol):
    """The tensors of a model. What reads elements gives memory that is used again for the next ones."""

    home: str | None
    """Where a stored model's own code lies."""

    def contents(self, stored: Mapping[str, StoredTensor]) -> HubTensors:
        """The hub tensors, with the further names under which the source, which holds ``stored``, stores tied ones."""

    def pieces(self, contents: HubTensors, ranks: Ranks) -> list[Piece]:
        """What this rank brings: each element comes from one rank. Rank-local."""

    def whole(self, wanted: Wanted, staging: Staging) -> Destination:
        """The elements of a piece. Rank-local; to be called once for each piece, for the digests."""

    def near(self, wanted: Wanted, part: Tile, staging: Staging) -> Iterable[tuple[Wanted, Destination]]:
        """The elements of a piece that a part of a tile has, and what lies between them. Rank-local."""

    def write(
        self, contents: HubTensors, output: HubFiles, filler: Filler, staging: Staging, ranks: Ranks
    ) -> None:
        """Write this rank's elements of these tensors."""

    def sums(self) -> list[int]:
        """This rank's shares of digest sums, after :meth:`whole` of all pieces."""

    def check(self, sums: Sequence[int]) -> None:
        """As :meth:`.Job.check`."""

    def assets(self) -> Mapping[str, bytes]:
        """The small files beside the tensors."""

    def close(self) -> None:
        """Close the files."""


class LiveWeights:
    """A live model's, where they are."""

    home: str | None = None

    def __init__(self, job: LiveJob) -> None:
        self._job = job
        self._local = Destination(job.live.local_tensors())

    def contents(self, stored: Mapping[str, StoredTensor]) -> HubTensors:
        contents, origin, tensors = self._job.contents(), recall(self._job.live.root), self._job.tensors
        more = [
            (name, tile)
            for name, recipe in (origin.recipes.items() if origin is not None else ())
            for copy in recipe.copies
            for tile in copy
        ]
        specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
        return _with_ties(contents, specs, self._job.live.stored, stored, more)

    def pieces(self, contents: HubTensors, ranks: Ranks) -> list[Piece]:
        return self._job.pieces(contents, ranks.rank)

    def whole(self, wanted: Wanted, staging: Staging) -> Destination:
        return self._local

    def near(self, wanted: Wanted, part: Tile, staging: Staging) -> Iterable[tuple[Wanted, Destination]]:
        return ((wanted, self._local),)

    def write(
        self, contents: HubTensors, output: HubFiles, filler: Filler, staging: Staging, ranks: Ranks
    ) -> None:
        self._job.write(contents, output, filler, staging, ranks)

    def sums(self) -> list[int]:
        """Nothing: a live model has no recorded digests."""
        return []

    def check(self, sums: Sequence[int]) -> None:
        """Does nothing: a live model has no recorded digests."""

    def assets(self) -> Mapping[str, bytes]:
        return self._job.assets()

    def close(self) -> None:
        """Does nothing: no file is open."""


class StoredWeights:
    """A stored model's. Memory: a piece, and what reading it takes."""

    def __init__(self, job: StoredJob, limit_bytes: int) -> None:
        self._job, self._piece_bytes = job, min(_PIECE_BYTES, limit_bytes // 2)
        self.home: str | None = job.home
        self._sums = dict.fromkeys(job.recorded(), 0)

    def contents(self, stored: Mapping[str, StoredTensor]) -> HubTensors:
        contents = self._job.contents()
        more = self._job.copies(contents, stored)
        return _with_ties(contents, self._job.specs, self._job.named(), stored, more)

    def pieces(self, contents: HubTensors, ranks: Ranks) -> list[Piece]:
        specs = self._job.specs
        return [
            (wanted_box(name, *specs[name], box), contents.tiles.get(name, ()))
            for name, box in share_of(specs, self._piece_bytes, ranks)
        ]

    def whole(self, wanted: Wanted, staging: Staging) -> Destination:
        piece = self._job.read(wanted, staging)
        if wanted.name in self._sums:
            total = partial_sum(piece, _box(wanted).start)
            self._sums[wanted.name] = (self._sums[wanted.name] + total) % 2**64
        return Destination({wanted.name: piece})

    def near(self, wanted: Wanted, part: Tile, staging: Staging) -> Iterator[tuple[Wanted, Destination]]:
        box = _box(wanted).intersect(bounds(part, "target")) if part.numel else None
        if box is not None:
            held = wanted_box(wanted.name, wanted.dtype, wanted.shape, box)
            yield held, Destination({held.name: self._job.read(held, staging)})

    def write(
        self, contents: HubTensors, output: HubFiles, filler: Filler, staging: Staging, ranks: Ranks
    ) -> None:
        for wanted, tiles in self.pieces(contents, ranks):
            for tile in tiles:
                for held, elements in self.near(wanted, tile, staging):
                    write_back(transfers_of(tile, held, output.tensors), filler, elements, staging)

    def sums(self) -> list[int]:
        return list(self._sums.values())

    def check(self, sums: Sequence[int]) -> None:
        self._job.check(sums)

    def assets(self) -> Mapping[str, bytes]:
        return self._job.assets()

    def close(self) -> None:
        self._job.close()


def _box(wanted: Wanted) -> Box:
    return wanted.boxes[0].box


def _with_ties(
    contents: HubTensors,
    specs: Mapping[str, TensorSpec],
    named: Iterable[Named],
    stored: Mapping[str, StoredTensor],
    more: Iterable[tuple[str, Tile]],
) -> HubTensors:
    """The hub tensors of a model, with the further names under which the source stores tied ones; ``more``: tiles of them."""
    hub, tiles = dict(contents.hub), {name: list(found) for name, found in contents.tiles.items()}
    for name, tile in more:
        hub[tile.source] = TensorSpec(specs[name].dtype, stored[tile.source].shape)
        tiles[name].append(tile)
    for tied in named:
        for alias in tied.names[1:] if tied.names[0] in tiles else ():
            name = tied.names[0]
            shape = specs[name].shape
            if alias not in hub and alias in stored and stored[alias].shape == shape:
                hub[alias] = specs[name]
                tiles[name].append(identity(alias, shape))
    return HubTensors(hub, {name: tuple(found) for name, found in tiles.items()})
