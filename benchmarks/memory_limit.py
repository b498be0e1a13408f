"""A limit on the memory of some processes: by the kernel, in a cgroup of their own, where one can be made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.operations.host_budget import cgroups_with

__all__ = ["MemoryLimit", "limited_memory"]


@dataclass(frozen=True)
class MemoryLimit:
    """A cgroup below this process's own, empty at first. The kernel kills a process in it that it has no memory for."""

    directory: Path
    version: int

    def join(self) -> None:
        """Put the calling process into it. Memory that it shares with its parent stays the parent's."""
        (self.directory / "cgroup.procs").write_text(str(os.getpid()))

    def held_bytes(self) -> int:
        """What its processes hold now, without page cache: anonymous memory, and the kernel's for them."""
        counted = dict(line.split() for line in (self.directory / "memory.stat").read_text().splitlines())
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        return int((self.directory / name).read_text()) - int(
            counted["file" if self.version == 2 else "cache"]
        )

    def set(self, nbytes: int) -> None:
        """Allow so many bytes from now on, page cache included: the kernel reclaims it first."""
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        (self.directory / name).write_text(str(nbytes))

    def kills(self) -> int:
        """Processes that the kernel killed here so far."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        counted = dict(line.split()[:2] for line in (self.directory / name).read_text().splitlines())
        return int(counted.get("oom_kill", 0))


@contextmanager
def limited_memory() -> Iterator[MemoryLimit | None]:
    """A cgroup while the context lasts; None where none can be made (no root, no memory controller)."""
    found = None
    for version, own in cgroups_with("memory"):
        directory = own / f"shardwise-bench-{os.getpid()}"
        try:
            directory.mkdir()
        except OSError:
            continue
        found = MemoryLimit(directory, version)
        if (directory / ("memory.max" if version == 2 else "memory.limit_in_bytes")).exists():
            break
        directory.rmdir()
        found = None
    try:
        yield found
    finally:
        if found is not None:
            with contextlib.suppress(OSError):  # a process that is being killed may still be in it
                found.directory.rmdir()
