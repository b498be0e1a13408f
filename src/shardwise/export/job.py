"""What an export writes, as the places that it writes to see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from ..checkpoint.verify import runs_of
from ..dtypes import itemsize
from ..layout.boxes import Box
from ..layout.wanted import Wanted
from ..objects import frozen
from ..planning.build import transfers_of
from ..ranks.ranks import Ranks
from ..recipe.tiles import Tile
from ..transfer.copy import Filler, Staging
from .files import HubFiles
from .tensors import HubTensors

__all__ = ["Job", "Together", "Window", "Windows", "bytes_in", "windows_of"]

#: Writes what this rank made of what the ranks brought together. Rank-local.
Together = Callable[[Filler], None]

#: Of a file that is written from front to back, so many bytes are put together at a time.
WINDOW_BYTES = 32 * 1024**2


@frozen
class Window:
    """A byte range of a file, and the boxes of hub tensors that fill it."""

    file: str
    start: int
    stop: int
    parts: tuple[tuple[str, Box], ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Windows(Protocol):
    """The content of files, window by window, for a place where a file is written from front to back."""

    is_spread: bool
    """Whether every rank has elements of every window; otherwise any rank can fill any window alone."""

    def fill(self, window: Window, filler: Filler) -> None:
        """Write the elements of a window that this rank has. Rank-local."""

    def fill_together(self, window: Window, owner: int, filler: Filler) -> None:
        """Write, on the rank ``owner``, the elements that ranks only make together. Of spread windows; every rank must call it."""

    def finish(self) -> list[int]:
        """After the last window: as :meth:`Job.write`."""


class Job(Protocol):
    """One export: of a live model, or of a stored one."""

    def share_bytes(self, contents: HubTensors, output: HubFiles, staging: Staging, ranks: Ranks) -> int:
        """The bytes that :meth:`write` and :meth:`together` write on this rank; about, if that takes long to find out."""

    def write(
        self, contents: HubTensors, output: HubFiles, filler: Filler, staging: Staging, ranks: Ranks
    ) -> list[int]:
        """Write this rank's elements of all files, in any order. Returns its shares of digest sums."""

    def together(self, output: HubFiles) -> Iterable[Together]:
        """What ranks only make together, after :meth:`write`. Every rank must go through it, and call each in one round."""

    def windows(self, contents: HubTensors, output: HubFiles, staging: Staging, ranks: Ranks) -> Windows:
        """The same, window by window."""

    def check(self, sums: Sequence[int]) -> None:
        """Compare the digest sums of all ranks with what is recorded. Raises :class:`IntegrityError`."""

    def assets(self) -> Mapping[str, bytes]:
        """The small files beside the tensors."""


def bytes_in(tiles: Iterable[Tile], wanted: Wanted, output: HubFiles) -> int:
    """The bytes of files that the elements of a box fill."""
    found = [one for tile in tiles for one in transfers_of(tile, wanted, output.tensors)]
    return sum(one.numel * itemsize(one.source_dtype) for one in found)


def windows_of(output: HubFiles, file: str) -> Iterator[Window]:
    """The payload of a file in order, cut into windows; one that is empty if the file has none."""
    parts: list[tuple[str, Box]] = []
    start = stop = len(output.headers[file])
    for key, box, nbytes in _parts_of(output, file):
        if parts and stop + nbytes - start > WINDOW_BYTES:
            yield Window(file, start, stop, tuple(parts))
            parts, start = [], stop
        parts.append((key, box))
        stop += nbytes
    assert stop == output.sizes[file], (file, stop, output.sizes[file])
    yield Window(file, start, stop, tuple(parts))


def _parts_of(output: HubFiles, file: str) -> Iterator[tuple[str, Box, int]]:
    """The tensors of a file in its order, each in boxes whose bytes follow each other."""
    inside = [
        (t.chunks[0].offset_bytes, key) for key, t in output.tensors.items() if t.chunks[0].path == file
    ]
    for _, key in sorted(inside):
        t = output.tensors[key]
        size = itemsize(t.dtype)
        for start, sizes, _ in runs_of((0,) * len(t.shape), t.shape, WINDOW_BYTES // size):
            stop = tuple(a + n for a, n in zip(start, sizes, strict=True))
            yield key, Box(start, stop), math.prod(sizes) * size
