"""``memory_ledger``: a thread that looks at this process's memory, and phases with an exact record at both ends."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ..errors import CheckpointError
from ..objects import frozen
from ..storage.records import is_url
from .host_budget import cgroups_with
from .operation import rank_and_world_size, replace_current

# ----------------------------------------------------------------------------------------------------
# The file of one process's ledger: JSON lines, each written by one call, so that a killed process leaves whole lines.

_log = logging.getLogger(__name__)
_LONGEST_LIST = 32
_LONGEST_TEXT = 2_000


class LedgerFile:
    """Appends records. A disk that is full or lost ends the ledger with one warning, never the program."""

    def __init__(self, directory: str) -> None:
        """Make ``directory`` if needed, and a new file in it. Raises :class:`CheckpointError`."""
        rank, _ = rank_and_world_size()
        host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:64] or "host"
        started = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = f"rank-{rank:05d}.{host}.{started}.{os.getpid()}"
        try:
            os.makedirs(directory, exist_ok=True)
            for more in (
                "",
                *(f".{k}" for k in range(1, 100)),
            ):  # containers of a host may have equal names and pids
                self.path = os.path.join(directory, f"{name}{more}.jsonl")
                try:
                    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    self._file: int | None = os.open(self.path, flags, 0o644)
                    return
                except FileExistsError:
                    continue
            raise FileExistsError(f"{name}.jsonl, and 99 more")
        except OSError as error:
            raise CheckpointError(
                f"{directory}: a ledger can't be written there ({error.strerror or error}); give a directory, which may not exist yet"
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._file is None:
            return
        line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
        try:
            while line:  # a line is cut only where the disk is full: the reader skips it
                line = line[os.write(self._file, line) :]
        except OSError as error:
            _log.warning("%s: the ledger ends here: %s", self.path, error.strerror or error)
            self.close()

    def close(self) -> None:
        """Close the file; later records are dropped."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def shortened(value: Any) -> Any:
    """A report's values with long lists and texts cut, so that no outcome fills the file."""
    if isinstance(value, Mapping):
        kept = list(value.items())[:_LONGEST_LIST]
        return {str(name): shortened(one) for name, one in kept}
    if isinstance(value, list | tuple | set | frozenset):
        items = [shortened(one) for one in list(value)[:_LONGEST_LIST]]
        return [*items, f"and {len(value) - _LONGEST_LIST} more"] if len(value) > _LONGEST_LIST else items
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]}…"
    if isinstance(value, bool | int | float) or value is None:
        return value
    return shortened(str(value))


# ----------------------------------------------------------------------------------------------------
# What a process uses now, from the kernel's and torch's own counters, read without starting anything.
#
# The files stay open and are read again and again: a look takes two reads. What is cheap is read at each look, the rest only
# for a record. Sources: proc_pid_status(5), proc_pid_io(5), cgroup-v2.rst and cgroup-v1/memory.rst of Linux.

_STATUS = re.compile(
    rb"VmHWM:\s+(\d+) kB\nVmRSS:\s+\d+ kB\nRssAnon:\s+(\d+) kB\nRssFile:\s+(\d+) kB\nRssShmem:\s+(\d+) kB\n"
)
_SWAP = re.compile(rb"VmSwap:\s+(\d+) kB\n")
_IO = re.compile(rb"rchar: (\d+)\nwchar: (\d+)\n.*\nread_bytes: (\d+)\nwrite_bytes: (\d+)\n", re.DOTALL)
#: Charge, its peak, and in memory.stat the page cache with the shared memory that counts in it.
_FILES = {
    2: ("memory.current", "memory.peak", rb"^file (\d+)$", rb"^shmem (\d+)$"),
    1: (
        "memory.usage_in_bytes",
        "memory.max_usage_in_bytes",
        rb"^total_cache (\d+)$",
        rb"^total_shmem (\d+)$",
    ),
}
#: What ``torch.accelerator.memory_stats`` calls it.
_DEVICE = (
    ("device_allocated_bytes", "allocated_bytes.all.current"),
    ("device_reserved_bytes", "reserved_bytes.all.current"),
    ("device_high_water_bytes", "allocated_bytes.all.peak"),
)


@frozen
class Look:
    """Host memory of this process, and of its cgroup with all its processes, at one moment. 0 where the system says nothing."""

    anonymous_bytes: int = 0
    file_bytes: int = 0
    shared_bytes: int = 0
    high_water_bytes: int = 0
    """The most that was ever resident: ``VmHWM``."""
    cgroup_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """All that is resident now: what ``VmHWM`` is the peak of."""
        return self.anonymous_bytes + self.file_bytes + self.shared_bytes


class Sources:
    """The open files of one process. Of a fork's child they would still be its parent's: the child makes its own."""

    def __init__(self, root: Path = Path("/")) -> None:
        """``root``: the directory that holds ``proc`` and ``sys``."""
        self._status = _opened(root / "proc/self/status")
        self._io = _opened(root / "proc/self/io")
        self._charge = self._charge_peak = self._stat = None
        self.cgroup: str | None = None
        """The directory of the cgroup that is read."""
        for version, level in cgroups_with("memory", root):
            charge, peak, self._cache, self._shmem = _FILES[version]
            self._charge = _opened(level / charge)
            if self._charge is not None:
                self.cgroup = f"/{level.relative_to(root)}"
                self._charge_peak, self._stat = _opened(level / peak), _opened(level / "memory.stat")
                break

    def close(self) -> None:
        """Close the files."""
        for file in (self._status, self._io, self._charge, self._charge_peak, self._stat):
            if file is not None:
                os.close(file)

    def look(self) -> Look:
        """The cheap part. About 0.1 ms."""
        found = _STATUS.search(_read(self._status))
        high, anonymous, mapped, shared = (1024 * int(n) for n in found.groups()) if found else (0, 0, 0, 0)
        return Look(anonymous, mapped, shared, high, _number(self._charge))

    def record(self, look: Look) -> dict[str, int]:
        """A look with all the rest, by name; without what this system does not report."""
        found = {
            "anonymous_bytes": look.anonymous_bytes,
            "file_bytes": look.file_bytes,
            "shared_bytes": look.shared_bytes,
            "high_water_bytes": look.high_water_bytes,
        }
        if swap := _SWAP.search(_read(self._status)):
            found["swap_bytes"] = 1024 * int(swap[1])
        if self._charge is not None:
            stat = _read(self._stat)
            cache, shmem = (re.search(pattern, stat, re.MULTILINE) for pattern in (self._cache, self._shmem))
            found["cgroup_bytes"] = look.cgroup_bytes
            if cache:
                found["page_cache_bytes"] = int(cache[1]) - (int(shmem[1]) if shmem else 0)
            if peak := _number(self._charge_peak):
                found["cgroup_high_water_bytes"] = peak
        if io := _IO.search(_read(self._io)):
            names = ("requested_read_bytes", "requested_written_bytes", "read_bytes", "written_bytes")
            found.update(zip(names, map(int, io.groups()), strict=True))
        return found | _device()


def _device() -> dict[str, int]:
    """Memory that torch holds on all devices that this process uses. Starts no device, and does not import torch.

    Empty before the device is started, and for a kind of device whose allocator keeps no statistics.
    """
    torch: Any = sys.modules.get("torch")
    with suppress(
        AttributeError, RuntimeError
    ):  # torch is being imported, the device was lost, or none is told
        kind = torch.accelerator.current_accelerator()
        if kind is not None and torch.get_device_module(kind).is_initialized():
            devices = range(torch.accelerator.device_count())
            stats = [found for d in devices if (found := torch.accelerator.memory_stats(d))]
            return {name: sum(s[key] for s in stats) for name, key in _DEVICE if stats and key in stats[0]}
    return {}


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _read(file: int | None) -> bytes:
    try:
        return b"" if file is None else os.pread(file, 16_384, 0)
    except OSError:  # the cgroup was removed
        return b""


def _number(file: int | None) -> int:
    text = _read(file).strip()
    return int(text) if text.isdigit() else 0


# ----------------------------------------------------------------------------------------------------
# ``ledger``: a thread that looks at this process's memory, and phases with an exact record at both ends.

VERSION = 1
#: Looks are never closer than this, and farther apart where one costs more than `_SHARE` of the time between two.
_LEAST_PERIOD_S = 0.02
_SHARE = 0.005
#: A record of the looks is written so often at first, and half as often after each `_RECORDS_PER_PERIOD` of them.
_FIRST_RECORDS_S = 0.1
_RECORDS_PER_PERIOD = 2_000
#: Phases of one name of which each is written; of the next 9,000 each tenth, and so on.
_ALL_PHASES = 1_000
_MOST_NAMES = 256


class ScalarWriter(Protocol):
    """TensorBoard's ``SummaryWriter``, or anything with its ``add_scalar``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Take one value."""


@dataclass(slots=True)
class _Peak:
    """The most of each kind since it began."""

    anonymous_bytes: int = 0
    resident_bytes: int = 0
    cgroup_bytes: int = 0

    def take(self, look: Look) -> None:
        self.anonymous_bytes = max(self.anonymous_bytes, look.anonymous_bytes)
        self.resident_bytes = max(self.resident_bytes, look.resident_bytes)
        self.cgroup_bytes = max(self.cgroup_bytes, look.cgroup_bytes)

    def to_json(self) -> dict[str, int]:
        return {f"peak_{name}": nbytes for name, nbytes in asdict(self).items()}


@dataclass(slots=True)
class _Pace:
    """When the thread looks, and when it writes."""

    look_s: float = _LEAST_PERIOD_S
    records_s: float = _FIRST_RECORDS_S
    written: int = 0

    def looked(self, cost_s: float) -> None:
        """A look with all around it has cost so much CPU time: on average at most `_SHARE` of the time may go there."""
        self.look_s = max(_LEAST_PERIOD_S, 0.9 * self.look_s + 0.1 * cost_s / _SHARE, cost_s)

    def wrote(self) -> None:
        self.written += 1
        if self.written % _RECORDS_PER_PERIOD == 0:
            self.records_s *= 2


@dataclass(slots=True)
class _Counts:
    """Which phases are written."""

    seen: dict[str, int] = field(default_factory=dict)

    def next(self, name: str) -> tuple[int, bool]:
        """The number of this phase among those of its name, and whether it is written."""
        key = name if name in self.seen or len(self.seen) < _MOST_NAMES else ""
        count = self.seen[key] = self.seen.get(key, 0) + 1
        every = 10 ** max(0, int(math.log10(count / _ALL_PHASES)) + 1) if count >= _ALL_PHASES else 1
        return count, count % every == 0


def memory_ledger(path: str | os.PathLike[str], *, tensorboard: ScalarWriter | None = None) -> Ledger:
    """Record this process's memory use and I/O while a block runs, over time and by phase.

    ::

        with sw.reports.memory_ledger("runs/a/ledger") as ledger:
            model = sw.load_pretrained(…)
            with ledger.phase("warm-up"):
                …

    Any process can open one without the others, and ranks can share ``path``. Each process writes its own JSON Lines file there, with its
    rank and host in the name; even if the process is killed, every line in it is complete. ``load``, ``save``, ``resume``, ``restore``, ``clone``,
    ``export_hf``, ``verify``, ``diff``, ``copy_checkpoint`` and ``convert`` add their phases and reports automatically. The returned object's ``phase``
    adds your own, at about 0.3 ms each. ``shardwise report`` plots the result.

    It records, in bytes: the process's anonymous, file-backed, shared and swapped memory, and ``VmHWM``; usage and page cache of its
    cgroup (v1 or v2), which covers all processes in it; the memory that torch allocated and reserved on devices in use; and the bytes read and
    written. A thread samples every 20 ms, or less often if sampling takes more than 0.5% of a core. Peaks are the highest samples; the
    peak of a phase that raises ``VmHWM`` is exact. At first, records are written every 0.1 s; the interval doubles after every 2,000 records, which
    comes to about 10 MB a week. For each phase name, the first 1,000 phases are written, then every tenth, then every hundredth.

    Args:
        path: a local directory, created if needed.
        tensorboard: a writer that receives the same numbers as scalars ``ledger/…``. The thread calls its ``add_scalar(tag, value, step)``.

    A forked child writes nothing until it opens its own ledger. With nested ledgers, phases go to the innermost one. Raises
    :class:`CheckpointError` if ``path`` can't be written. If the disk fails later, the ledger ends with a warning.
    """
    return Ledger(path, tensorboard=tensorboard)


class Ledger:
    """The ledger of one process, while its block runs; see :func:`ledger`."""

    def __init__(self, path: str | os.PathLike[str], *, tensorboard: ScalarWriter | None = None) -> None:
        self._directory = os.fspath(path)
        self._writer = tensorboard
        self._lock = threading.RLock()  # a handler of a signal may begin a phase inside of one's record
        self._ids, self._counts = itertools.count(1), _Counts()
        self._open: dict[int, _Peak] = {}
        self._enclosing = threading.local()
        self._whole, self._since = _Peak(), _Peak()
        self._done, self._pace = threading.Event(), _Pace()
        self.pid = os.getpid()
        """The process that writes it."""

    def __enter__(self) -> Self:
        if is_url(self._directory):
            raise CheckpointError(f"{self._directory}: a ledger is written to a local directory; give one")
        self._file, self._sources = LedgerFile(self._directory), Sources()
        self.pid, self._began_s = os.getpid(), time.perf_counter()
        rank, world_size = rank_and_world_size()
        self._write(
            "begin",
            version=VERSION,
            time_s=time.time(),
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            pid=self.pid,
            cgroup=self._sources.cgroup,
            **self._exact(),
        )
        self._thread = threading.Thread(target=self._watch, name="shardwise-ledger", daemon=True)
        self._thread.start()
        self._before = replace_current(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pid != os.getpid():  # a forked child leaves its parent's block
            return
        replace_current(self._before)
        self._done.set()
        self._thread.join()
        with self._lock:
            exact = self._exact()
            self._write("end", **_told(error), **exact, **self._whole.to_json(), looks_s=self._pace.look_s)
            self._file.close()
            self._sources.close()

    @property
    def file(self) -> Path:
        """The file of this process."""
        return Path(self._file.path)

    @contextmanager
    def phase(self, name: str, **facts: object) -> Iterator[None]:
        """A phase around a block. ``facts``, a few short values, stand in its record. Any thread may call it."""
        if self.pid != os.getpid():  # a forked child, in which the lock may be held forever
            yield
            return
        with self._lock:
            count, is_written = self._counts.next(name)
        if not is_written:
            yield
            return
        number, parent = next(self._ids), getattr(self._enclosing, "number", None)
        began_s, peak = time.perf_counter(), _Peak()
        with self._lock:
            first = self._exact()
            peak.take(self._last)
            self._open[number] = peak
            known = {"id": number, "name": name, "parent": parent, "count": count, "facts": shortened(facts)}
            self._write("phase", **known, **first, **self._peak_since())
        self._enclosing.number = number
        raised: BaseException | None = None
        try:
            yield
        except BaseException as error:
            raised = error
            raise
        finally:
            self._enclosing.number = parent
            if self.pid == os.getpid():
                self._end(number, name, began_s, first, raised)

    def _end(
        self, number: int, name: str, began_s: float, first: Mapping[str, int], raised: BaseException | None
    ) -> None:
        with self._lock:
            last = self._exact()
            peak = self._open.pop(number)
            high = last.get("high_water_bytes", 0)
            is_exact = high > first.get("high_water_bytes", 0)
            if is_exact:  # the process never held more before: its high water is the phase's
                peak.resident_bytes = high
            self._write(
                "phase-end",
                id=number,
                name=name,
                seconds=round(time.perf_counter() - began_s, 6),
                **_told(raised),
                **last,
                **peak.to_json(),
                peak_is_exact=is_exact,
            )
            self._peak_since()

    def note(self, name: str, report: Mapping[str, Any]) -> None:
        """Write the outcome of something, a report for example; long lists in it are cut."""
        if self.pid != os.getpid():
            return
        with self._lock:
            _, is_written = self._counts.next(f"note {name}")
            if is_written:
                self._write("note", name=name, report=shortened(report))

    def _watch(self) -> None:
        pace = self._pace
        due_s = time.perf_counter() + pace.records_s
        before_s = time.thread_time()
        while not self._done.wait(pace.look_s):
            with self._lock:
                look = self._look()
                if time.perf_counter() >= due_s:
                    self._write_sample(look)
                    pace.wrote()
                    due_s = time.perf_counter() + pace.records_s
            after_s = time.thread_time()  # the wait costs something, too
            pace.looked(after_s - before_s)
            before_s = after_s

    def _look(self) -> Look:
        look = self._last = self._sources.look()
        for peak in (self._whole, self._since, *self._open.values()):
            peak.take(look)
        return look

    def _exact(self) -> dict[str, int]:
        """What is used now, as a phase begins or ends."""
        with self._lock:
            return self._sources.record(self._look())

    def _peak_since(self) -> dict[str, int]:
        """The peak since the last record, which the caller writes into the next one."""
        since, self._since = self._since, _Peak()
        return since.to_json()

    def _write_sample(self, look: Look) -> None:
        found = {**self._sources.record(look), **self._peak_since()}
        self._write("sample", **found)
        if self._writer is not None:
            try:
                for name, value in found.items():
                    self._writer.add_scalar(f"ledger/{name}", value, self._pace.written)
            except Exception as error:  # a writer may raise anything; the ledger goes on
                _log.warning("the ledger's tensorboard writer failed and is no longer used: %s", error)
                self._writer = None

    def _write(self, kind: str, **values: object) -> None:
        self._file.write({"kind": kind, "t": round(time.perf_counter() - self._began_s, 4), **values})


def _told(error: BaseException | None) -> dict[str, str]:
    return {} if error is None else {"error": shortened(f"{type(error).__name__}: {error}")[:300]}
