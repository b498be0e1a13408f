"""Reads ledgers: one record per process, and processes that ran together as one start. Takes any file: what does not fit is skipped."""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import SourceError
from ..limits import MAX_CONFIG_DEPTH
from ..objects import frozen

__all__ = [
    "Note",
    "Phase",
    "Process",
    "Sample",
    "Start",
    "json_lines",
    "json_object",
    "read_process",
    "starts_of",
]

#: Far above what a week writes; a longer file is read up to here.
_MOST_BYTES = 256 * 1024**2
_LONGEST_LINE = 256 * 1024
#: Records with memory of one process that are kept; of more, neighbors become one.
_MOST_SAMPLES = 100_000
#: Memory and bytes of a record; peaks have ``peak_`` before them.
_VALUES = {
    f"{name}_bytes"
    for name in (
        *("anonymous", "file", "shared", "swap", "high_water", "cgroup", "page_cache", "cgroup_high_water"),
        *("device_allocated", "device_reserved", "device_high_water"),
        *("read", "written", "requested_read", "requested_written"),
        *("peak_anonymous", "peak_resident", "peak_cgroup"),
    )
}


@frozen
class Sample:
    """What a process used at one moment, ``t`` seconds after its ledger began; names as in the file."""

    t: float
    values: Mapping[str, int]

    def get(self, name: str) -> int:
        """A value; 0 if the system did not report it."""
        return self.values.get(name, 0)


@frozen
class Phase:
    """A phase of a process."""

    number: int
    name: str
    parent: int | None
    began: Sample
    step: int | None
    ended: Sample | None = None
    """None: the process ended in it."""
    error: str | None = None


@frozen
class Note:
    """An outcome: the report of a load, a save, a resume, an export."""

    t: float
    name: str
    report: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Process:
    """One ledger."""

    file: str
    rank: int
    world_size: int
    host: str
    cgroup: str
    began_s: float
    """Unix time."""
    samples: list[Sample] = field(default_factory=list)
    """All records with memory in order of time, those of phases among them."""
    phases: dict[int, Phase] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    has_ended: bool = False
    """Whether the program left the ledger's block; else it was killed, or still runs."""
    error: str | None = None
    skipped_lines: int = 0

    @property
    def last_t(self) -> float:
        """Seconds from the first record to the last."""
        return max((s.t for s in self.samples), default=0.0)

    @property
    def stopped_in(self) -> Phase | None:
        """The outermost phase in which the process ended without a word."""
        left = [p for p in self.phases.values() if p.ended is None]
        return min(left, key=lambda p: p.number) if left and not self.has_ended else None

    def peak(self, name: str) -> int:
        """The highest value of a kind of memory, looks between the records included."""
        return max(
            (max(s.get(f"{name}_bytes"), s.get(f"peak_{name}_bytes")) for s in self.samples), default=0
        )


@frozen
class Start:
    """The processes of one start of the program, by rank."""

    number: int
    processes: tuple[Process, ...]

    @property
    def began_s(self) -> float:
        """Unix time of the first ledger."""
        return min(p.began_s for p in self.processes)

    @property
    def seconds(self) -> float:
        """To the last record of any rank."""
        return max(p.began_s + p.last_t for p in self.processes) - self.began_s

    @property
    def is_whole(self) -> bool:
        """Whether every process left its block without an error."""
        return all(p.has_ended and p.error is None for p in self.processes)

    @property
    def culprit(self) -> Process | None:
        """The process that a start that did not finish most likely ended by: the first one that failed, otherwise the one whose
        records end first, as a launcher ends the other ranks when one has died. None if every process finished."""
        failed = [p for p in self.processes if p.error is not None]
        died = [p for p in self.processes if not p.has_ended]
        return min(failed or died, key=lambda p: (p.began_s + p.last_t, p.rank), default=None)

    def notes(self, name: str) -> list[tuple[Process, Note]]:
        """Outcomes of one kind, by rank, then by time."""
        return [(p, note) for p in self.processes for note in p.notes if note.name == name]


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The objects of a file of JSON lines; None for a line that is none. Raises :class:`SourceError`; never waits for a pipe."""
    try:
        with open(path, "rb", opener=_opened) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise SourceError("can't be read: not a regular file", path=str(path))
            while stream.tell() < _MOST_BYTES and (line := stream.readline(_LONGEST_LINE)):
                yield json_object(line)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror or error}", path=str(path)) from error


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def json_object(text: bytes) -> dict[str, Any] | None:
    """The object that a JSON text is; None for anything else, and for one nested deeper than any that a report shows."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_shallow(found) else None


def _is_shallow(found: dict[str, Any]) -> bool:
    waiting: list[tuple[Any, int]] = [(found, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_CONFIG_DEPTH:
            return False
        inner = value.values() if isinstance(value, dict) else value
        waiting += [(one, depth + 1) for one in inner if isinstance(one, dict | list)]
    return True


def read_process(path: Path) -> Process | None:
    """The ledger in a file; None if the file is something else. Raises :class:`SourceError`."""
    process: Process | None = None
    for record in json_lines(path):
        if process is None:
            if record is None or record.get("kind") != "begin":
                return None
            process = _begun(path, record)
        elif record is None or not _take(process, record):
            process.skipped_lines += 1
            continue
        if (sample := _sample(record)).values:
            process.samples.append(sample)
            if len(process.samples) > _MOST_SAMPLES:
                process.samples = _merged(process.samples)
    return process


def _merged(samples: Sequence[Sample]) -> list[Sample]:
    """Half as many samples: two become one at the time of the later, with the higher of each value."""
    found = []
    for first, second in itertools.zip_longest(samples[::2], samples[1::2]):
        if second is None:
            found.append(first)
        else:
            both = first.values.keys() | second.values.keys()
            found.append(Sample(second.t, {name: max(first.get(name), second.get(name)) for name in both}))
    return found


def _begun(path: Path, record: Mapping[str, Any]) -> Process:
    return Process(
        file=str(path),
        rank=_count(record.get("rank")),
        world_size=_count(record.get("world_size")),
        host=str(record.get("host", "")),
        cgroup=str(record.get("cgroup", "")),
        began_s=_number(record.get("time_s")),
    )


def _take(process: Process, record: Mapping[str, Any]) -> bool:
    """Add a record. False if it is none that a ledger has."""
    kind, number = record.get("kind"), _count(record.get("id"))
    told = record.get("error")
    if kind == "phase":
        facts, parent = record.get("facts"), record.get("parent")
        step = facts.get("step") if isinstance(facts, dict) else None
        process.phases[number] = Phase(
            number,
            str(record.get("name", "")),
            _count(parent) if parent is not None else None,
            _sample(record),
            _count(step) if step is not None else None,
        )
    elif kind == "phase-end" and number in process.phases:
        phase = process.phases[number]
        process.phases[number] = replace(
            phase, ended=_sample(record), error=None if told is None else str(told)
        )
    elif kind == "note" and isinstance(record.get("report"), dict):
        process.notes.append(Note(_number(record.get("t")), str(record.get("name", "")), record["report"]))
    elif kind == "end":
        process.has_ended = True
        process.error = None if told is None else str(told)
    else:
        return kind == "sample"
    return True


def _sample(record: Mapping[str, Any]) -> Sample:
    values = {n: _count(v) for n, v in record.items() if n in _VALUES}
    return Sample(_number(record.get("t")), values)


def _count(value: object) -> int:
    return int(min(max(_number(value), 0), 2**62))


def _number(value: object) -> float:
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if ok and abs(value) < 2**62 and math.isfinite(value) else 0.0  # type: ignore[arg-type]


def starts_of(processes: Iterable[Process]) -> list[Start]:
    """Processes in groups that ran together: a rank that comes again, or another number of ranks, begins the next one."""
    groups: list[list[Process]] = []
    for process in sorted(processes, key=lambda p: (p.began_s, p.rank, p.file)):
        last = groups[-1] if groups else []
        same = last and last[0].world_size == process.world_size
        if not same or any(p.rank == process.rank for p in last):
            groups.append([])
        groups[-1].append(process)
    ordered = [sorted(group, key=lambda p: p.rank) for group in groups]
    return [Start(k, tuple(group)) for k, group in enumerate(ordered, 1)]
