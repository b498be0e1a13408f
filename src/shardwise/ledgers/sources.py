"""What a process uses now, from the kernel's and torch's own counters, read without starting anything.

The files stay open and are read again and again: a look takes two reads. What is cheap is read at each look, the rest only
for a record. Sources: proc_pid_status(5), proc_pid_io(5), cgroup-v2.rst and cgroup-v1/memory.rst of Linux.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..models.host_budget import memory_cgroups
from ..objects import frozen

__all__ = ["Look", "Sources"]

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
        for version, level in memory_cgroups(root):
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
