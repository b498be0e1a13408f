"""Reads files of a step of which other hosts hold the units."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial

from ..errors import CheckpointError, IntegrityError, LowSpaceError
from ..format.manifest import FileEntry
from .copies import copy_units, receive_bytes, receive_unit
from .link import Reader
from .units import Runs, Unit, units_of

__all__ = ["Holdings", "RemoteFiles"]

#: For each file of a step, the ranks that have proved units of it: rank, slot, and which units.
Holdings = Mapping[str, Sequence[tuple[int, str, Runs]]]

#: At most so many reads of a unit come alone, and so many bytes by them; the next read brings the unit. Few hosts hold the bytes
#: that every rank of a run reads, such as the optimizer's count of steps: to send each rank 16 MiB would keep these hosts busy.
_MOST_ALONE, _MOST_BYTES_ALONE = 8, 1024**2


class RemoteFiles:
    """The files of ``entries``, read from the ranks that hold them. Rank-local; not for several threads.

    Each read tries the holders in their order; a holder that was away comes last from then on. ``reader_of`` takes a holder's rank. A connection
    lasts for one read: a host answers some connections at a time, and closes one that is idle. Calls ``on_progress`` whenever some bytes
    have come. Memory: one unit (16 MiB). Methods raise :class:`CheckpointError` if no host sends the bytes.
    """

    def __init__(
        self,
        entries: Mapping[str, FileEntry],
        holdings: Holdings,
        reader_of: Callable[[int], Reader],
        on_progress: Callable[[], object],
    ) -> None:
        self.taken = Counter[int]()
        """Bytes that came, by the rank that sent them."""
        self._entries, self._holdings = entries, holdings
        self._reader_of, self._on_progress = reader_of, on_progress
        self._reading: tuple[str, Sequence[Unit]] = "", ()
        self._memory: memoryview | None = None
        self._kept: tuple[str, int] | None = None  # the unit in memory: its file and number
        self._away = set[int]()  # holders that did not send what was asked of them
        # By unit: reads while it was not here, and their bytes.
        self._alone: dict[tuple[str, int], tuple[int, int]] = {}

    def close(self) -> None:
        """Give the memory back."""
        self._memory = self._kept = None

    def copy(self, name: str, path: str) -> None:
        """Copy a whole file into the one at ``path``, which has its size. Raises :class:`LowSpaceError` if there is no room."""
        for number, unit in enumerate(units_of(self._entries[name], path=name)):

            def bring(reader: Reader, remote: str, unit: Unit = unit) -> None:
                copy_units(reader, remote, [unit], path, self._on_progress)

            self._from_a_holder(name, number, unit.nbytes, bring)

    def read_into(self, name: str, offset_bytes: int, view: memoryview) -> None:
        """Fill ``view`` with bytes of a file.

        Whole units come, each compared with its checksum, and the last one stays in memory, because reads go through a file in order.
        A few short reads of a unit come alone, with the tag of the connection: the holder has proved the unit.
        Raises :class:`IntegrityError` for bytes beyond the end.
        """
        if self._reading[0] != name:
            self._reading = name, units_of(self._entries[name], path=name)
        units, at, stop = self._reading[1], offset_bytes, offset_bytes + view.nbytes
        if stop > self._entries[name].nbytes:
            raise IntegrityError(f"ends before byte {stop}: truncated", path=name)
        number = bisect_right(units, at, key=lambda unit: unit.start) - 1
        while at < stop:
            unit = units[number]
            end = min(stop, unit.stop)
            part = view[at - offset_bytes : end - offset_bytes]
            if self._comes_alone(name, number, part):
                self._from_a_holder(name, number, part.nbytes, partial(receive_bytes, start=at, memory=part))
            else:
                part[:] = self._unit(name, number, unit)[at - unit.start : end - unit.start]
            number, at = number + 1, end
            self._on_progress()

    def _comes_alone(self, name: str, number: int, part: memoryview) -> bool:
        """Whether a part of a unit is read by itself: the unit is not here, and few bytes of it were read."""
        if (name, number) == self._kept:
            return False
        count, nbytes = self._alone.get((name, number), (0, 0))
        self._alone[name, number] = count + 1, nbytes + part.nbytes
        return count < _MOST_ALONE and nbytes + part.nbytes <= _MOST_BYTES_ALONE

    def _unit(self, name: str, number: int, unit: Unit) -> memoryview:
        """A unit in memory, until the next one is read."""
        if self._memory is None or self._memory.nbytes < unit.nbytes:
            self._memory = self._kept = None  # before the next one is there
            self._memory = memoryview(bytearray(unit.nbytes))
        memory = self._memory[: unit.nbytes]
        if (name, number) != self._kept:
            self._kept = None  # until all of the unit has come
            self._from_a_holder(name, number, unit.nbytes, partial(receive_unit, unit=unit, memory=memory))
            self._kept = name, number
        return memory

    def _from_a_holder(
        self, name: str, number: int, nbytes: int, bring: Callable[[Reader, str], None]
    ) -> None:
        """Bring bytes of a unit from the first of its holders that sends them."""
        problem = "no host holds all of it"
        for rank, slot, runs in sorted(self._holdings[name], key=lambda holder: holder[0] in self._away):
            if not any(first <= number < stop for first, stop in runs):
                continue
            try:
                with closing(self._reader_of(rank)) as reader:
                    bring(reader, f"{slot}/{name}")
            except LowSpaceError:
                raise
            except (CheckpointError, IntegrityError) as error:
                problem = str(error)
                if isinstance(error, CheckpointError):
                    self._away.add(rank)
                continue
            self.taken[rank] += nbytes
            return
        raise CheckpointError(f"{name}: {problem}")
