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
    """Keeps a step in the memory of the hosts, between saves to disk. For ``Checkpointer(memory=…)``.

    Memory per rank, in shards (the bytes that the rank writes to disk): two slots of its own, and one copy for each of
    ``copies - 1`` other hosts: ``1 + copies``. With ``during_copies="all"`` twice ``copies``.

    Args:
        every: ``remember`` keeps the steps that this number divides.
        copies: how many hosts hold each slice: its own, and the next ones. There can't be more than hosts: on one host each slice is held
            once, which outlives killed processes, but not the host.
        directory: a directory on tmpfs. All ranks of a host give the same one.
        host: the name of this rank's host. Ranks that give one name share ``directory`` and are lost together; copies go to hosts of other
            names. None: the machine's own name. Give it where several machines fail together (a rack, one power supply), or where
            containers on one machine don't share ``/dev/shm``: each is a host of its own then.
        address: the IPv4 or IPv6 address, or the name, of this host on which it listens and by which other hosts reach it. None: the
            address with which it reaches the process group's store (``MASTER_ADDR``). Give it to choose a network, such as that of the
            InfiniBand interface. Each host gives its own.
        during_copies: what stays of the step before while other hosts copy the new one. ``"own"``: each host's own slices; a host that is
            lost just then takes both steps along, and the resume falls through to disk. ``"all"``: every copy, for more memory.
        timeout_s: a host that sends nothing for this long is given up: the step stays without that copy.
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
        """The name of the host: as given, or with the boot's id, because two machines may have one name."""
        if self.host is not None:
            return self.host
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:  # not Linux
            boot = ""
        return f"{socket.gethostname()} {boot}"

    @property
    def received_slots(self) -> int:
        """Slots for what other hosts send."""
        return 2 if self.during_copies == "all" else 1

    @property
    def root(self) -> str:
        """The directory, absolute."""
        return os.path.abspath(self.directory)
