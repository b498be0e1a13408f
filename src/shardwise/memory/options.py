"""``InMemoryCheckpoints``: how often a run keeps a step in memory, where, and how many copies."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["InMemoryCheckpoints"]

_DEFAULT_DIRECTORY = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemoryCheckpoints:
    """Keep a recent step in the hosts' memory between saves to disk. Pass it as ``Checkpointer(memory=…)``.

    Memory per rank, measured in shards (the bytes that the rank writes to disk): two slots for its own shard and one for a copy from each of
    ``copies - 1`` other hosts, so ``1 + copies``. With ``during_copies="all"``, twice ``copies``.

    Args:
        every: ``remember`` keeps each step that is divisible by this number.
        copies: number of hosts that keep each slice: its own and the next ones, so at most the number of hosts. On a single host each slice
            exists once: it survives killed processes, but not the loss of the host.
        directory: a directory on tmpfs, the same for all ranks of a host.
        host: name of this rank's host. Ranks with the same name share ``directory`` and are lost together; copies go to hosts with other names.
            None: the machine's own name. Set it if several machines fail together (a rack, one power supply), or if containers on
            one machine don't share ``/dev/shm`` and therefore count as separate hosts.
        address: IPv4 address, IPv6 address or name at which this host listens and other hosts reach it. None: the address from which it
            reaches the process group's store (``MASTER_ADDR``). Set it, on each host, to choose a network such as InfiniBand.
        during_copies: how much of the previous step is kept while other hosts receive the new one. ``"own"``: each host's own slices; if a
            host is lost at that moment, neither step is complete, and the resume uses the disk. ``"all"``: every copy, which needs
            more memory.
        timeout_s: give up on a host that sends nothing for this long; the step then lacks that copy.
    """

    every: int
    copies: int = 2
    directory: str = _DEFAULT_DIRECTORY
    host: str | None = None
    address: str | None = None
    during_copies: Literal["own", "all"] = "own"
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("copies", self.copies)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.during_copies not in ("own", "all"):
            raise ValueError(f"during_copies must be 'own' or 'all', got {self.during_copies!r}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")

    @property
    def host_name(self) -> str:
        """The host's name: the given one, or the machine's name with its boot id, because two machines may share a name."""
        if self.host is not None:
            return self.host
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:  # not Linux
            boot = ""
        return f"{socket.gethostname()} {boot}"

    @property
    def received_slots(self) -> int:
        """Number of slots for data from other hosts."""
        return 2 if self.during_copies == "all" else 1

    @property
    def root(self) -> str:
        """The directory, as an absolute path."""
        return os.path.abspath(self.directory)
