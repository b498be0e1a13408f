"""A stored model's tensors in pieces: the share of each rank, and windows of files that one rank fills alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ..checkpoint.verify import runs_of
from ..dtypes import itemsize
from ..layout.boxes import Box
from ..layout.spec import TensorSpec
from ..ranks.ranks import Ranks
from ..recipe.tiles import Tile, bounds, cut, is_dense
from ..transfer.copy import Filler, Staging
from .files import HubFiles
from .job import Window, windows_of
from .tensors import HubTensors

__all__ = ["StoredWindows", "share_of"]


def share_of(specs: Mapping[str, TensorSpec], limit_bytes: int, ranks: Ranks) -> Sequence[tuple[str, Box]]:
    """The pieces of all tensors that one rank copies: a contiguous share of the bytes."""
    found = []
    total = max(1, sum(spec.nbytes for spec in specs.values()))
    done = 0
    for name, (dtype, shape) in specs.items():
        size = itemsize(dtype)
        for start, sizes, _ in runs_of((0,) * len(shape), shape, limit_bytes // size):
            if done * ranks.world_size // total == ranks.rank:
                found.append((name, Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))))
            done += math.prod(sizes) * size
    return found


class Pieces(Protocol):
    """A stored model that writes pieces of its tensors."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Dtype and shape of each tensor."""

    def recorded(self) -> list[str]:
        """Tensors with a digest, in one order on all ranks."""

    def write_piece(
        self, name: str, box: Box, tiles: Sequence[Tile], output: HubFiles, filler: Filler, staging: Staging
    ) -> int:
        """Write one piece. Returns its digest sum as read."""


class StoredWindows:
    """As :class:`.Windows`. Reads each element once, but those of tensors that windows cut across: their bounds are read for
    each window, and once more for the digest."""

    is_spread = False

    def __init__(
        self, job: Pieces, contents: HubTensors, output: HubFiles, staging: Staging, ranks: Ranks
    ) -> None:
        self._job, self._output, self._staging, self._ranks = job, output, staging, ranks
        self._made_of: dict[str, list[tuple[str, Tile]]] = {}
        for name, tiles in contents.tiles.items():
            for tile in tiles:
                self._made_of.setdefault(tile.source, []).append((name, tile))
        self._sums = dict.fromkeys(job.recorded(), 0)
        self._later = self._cut_across()

    def _cut_across(self) -> set[str]:
        """Tensors whose digest is not the sum of what windows read: parts that are no boxes, or not of the whole tensor."""
        found, numel = set(), dict.fromkeys(self._sums, 0)
        for file in self._output.headers:
            for window in windows_of(self._output, file):
                for name, part in self._parts_of(window):
                    if name in numel:
                        numel[name] += part.numel
                        if not is_dense(part, "target"):
                            found.add(name)
        return found | {name for name, n in numel.items() if n != math.prod(self._job.specs[name].shape)}

    def _parts_of(self, window: Window) -> Iterator[tuple[str, Tile]]:
        for key, box in window.parts:
            for name, tile in self._made_of.get(key, ()):
                for part in cut(tile, "source", box):
                    yield name, part

    def fill(self, window: Window, filler: Filler) -> None:
        for name, part in self._parts_of(window):
            reach = bounds(part, "target")
            for box in _pieces(reach, self._job.specs[name].dtype, self._staging):
                total = self._write(name, box, (part,), filler)
                if name in self._sums and name not in self._later:
                    self._sums[name] = (self._sums[name] + total) % 2**64

    def fill_together(self, window: Window, owner: int, filler: Filler) -> None:
        """Does nothing: any rank can fill any window alone."""

    def finish(self) -> list[int]:
        """Read what :meth:`fill` did not count. Returns this rank's shares of digest sums."""
        left = {name: self._job.specs[name] for name in self._sums if name in self._later}
        for name, box in share_of(left, self._staging.limit_bytes // 2, self._ranks):
            self._sums[name] = (self._sums[name] + self._write(name, box, (), _Nowhere())) % 2**64
        return list(self._sums.values())

    def _write(self, name: str, box: Box, tiles: Sequence[Tile], filler: Filler) -> int:
        return self._job.write_piece(name, box, tiles, self._output, filler, self._staging)


class _Nowhere:
    """As :class:`.Filler`, for what is only read."""

    def write_at(self, name: str, offset_bytes: int, view: memoryview) -> None:
        raise AssertionError("nothing was to be written")


def _pieces(box: Box, dtype: str, staging: Staging) -> Iterator[Box]:
    for start, sizes, _ in runs_of(box.start, box.sizes, staging.limit_bytes // 2 // itemsize(dtype)):
        yield Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
