"""Units: the parts of a checkpoint's files that prove themselves. Each is a header, or a block of 16 MiB, with its checksum in the manifest.

A step is held where every unit of every file of its manifest is proved on some host: then every box of every tensor is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import xxhash

from ..errors import FormatError
from ..format.manifest import BLOCK_BYTES, FileEntry
from ..objects import frozen
from .below import open_below

__all__ = ["Runs", "Unit", "are_all", "proved_units", "runs_of", "units_in", "units_of"]

#: Numbers of units, as first and stop of each run of consecutive ones: a host holds most files whole, and every rank hears of all files.
Runs = Sequence[list[int]]

#: Small enough to stay in a core's cache between reading and hashing.
_PIECE_BYTES = 1024**2


@frozen
class Unit:
    """Consecutive bytes of a file, and their checksum."""

    start: int
    nbytes: int
    xxh3: str

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


def units_of(entry: FileEntry, *, path: str | None = None) -> list[Unit]:
    """The units of a file, in order. Raises :class:`FormatError` if the manifest has more or fewer checksums than it has blocks."""
    starts = range(entry.header_bytes, entry.nbytes, BLOCK_BYTES)
    if len(starts) != len(entry.blocks):
        raise FormatError(
            f"the manifest has {len(entry.blocks)} block checksums, expected {len(starts)}", path=path
        )
    found = [Unit(0, entry.header_bytes, entry.header_xxh3)]
    for start, checksum in zip(starts, entry.blocks, strict=True):
        found.append(Unit(start, min(BLOCK_BYTES, entry.nbytes - start), checksum))
    return found


def units_in(entry: FileEntry) -> int:
    """How many units a file has."""
    return 1 + len(entry.blocks)


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers in rising order as runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return runs


def are_all(runs: Runs, count: int) -> bool:
    """Whether runs, in any order, hold all numbers below ``count``."""
    reached = 0
    for first, stop in sorted(runs):
        if first > reached:
            return False
        reached = max(reached, stop)
    return reached >= count


def proved_units(path: str, entry: FileEntry, on_progress: Callable[[], object]) -> list[int]:
    """The numbers of the units of a file whose bytes are those that were saved. None of a file that is lost or has another size, or
    whose checksums are not those of its blocks."""
    try:
        fd = open_below(*os.path.split(path))
    except OSError:
        return []
    try:
        if os.fstat(fd).st_size != entry.nbytes:
            return []
        found = []
        for number, unit in enumerate(units_of(entry)):
            if _checksum(fd, unit) == unit.xxh3:
                found.append(number)
            on_progress()
        return found
    except (OSError, FormatError):
        return []
    finally:
        os.close(fd)


def _checksum(fd: int, unit: Unit) -> str:
    total, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(_PIECE_BYTES, unit.nbytes)))
    for piece in _pieces(fd, unit, buffer):
        total.update(piece)
    return total.hexdigest()


def _pieces(fd: int, unit: Unit, buffer: memoryview) -> Iterator[memoryview]:
    at = unit.start
    while at < unit.stop:
        count = os.preadv(fd, [buffer[: unit.stop - at]], at)
        if not count:
            return  # the file became shorter: the checksum will differ
        yield buffer[:count]
        at += count
