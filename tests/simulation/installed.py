"""Puts the simulation under the production code: the modules that it calls, by name, for as long as a block lasts."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from shardwise.checkpoint import checkpointer
from shardwise.checkpoint import save as async_save
from shardwise.checkpoint import sites as local_parts
from shardwise.checkpoint import take as stage
from shardwise.publish import lock
from shardwise.publish import lock as shared_fs
from shardwise.publish import places as publish
from shardwise.publish import sites as local_places
from shardwise.ranks import protocol, ranks
from shardwise.ranks import protocol as beats
from shardwise.ranks import protocol as parts
from shardwise.ranks import protocol as tree
from shardwise.ranks import ranks as patience
from shardwise.ranks import stop as leases
from shardwise.ranks import stop as stops
from tests.simulation import threads
from tests.simulation.files import Files, Hands
from tests.simulation.hosts import Network, opened_new
from tests.simulation.world import Process, World

__all__ = ["PART_BYTES", "Group", "Stage", "installed"]

#: Payloads of more bytes travel in parts, so that small ones do in some schedules.
_INLINE_BYTES, PART_BYTES, _INLINE_IN_TREE_BYTES = 120, 100, 60


class Stage:
    """The present schedule: what every patched module looks at."""

    def __init__(self) -> None:
        self.world = World(0)
        self.disks = [Files(self.world)]
        """By host; one, if all hosts share it."""
        self.network = Network(lambda: self.world, lambda: self.files)

    @property
    def files(self) -> Files:
        """The disk of the process that runs now."""
        task = self.world.task
        return self.disks[0 if task is None or len(self.disks) == 1 else task.process.host]


class Group:
    """A process group, as far as ranks look at it. Each process has one."""

    def __init__(self, size: int) -> None:
        self.size = size


class _Distributed:
    """Stands for ``torch.distributed``."""

    def __init__(self, on: Stage) -> None:
        self._on = on
        self.distributed_c10d = SimpleNamespace(PrefixStore=lambda prefix, store: store.under(prefix))
        self.ProcessGroup = object
        self.group = self

    @property
    def WORLD(self) -> Any:
        return self._on.world.process.group

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self._on.world.process.group is not None

    def get_rank(self) -> int:
        return self._on.world.process.rank

    def get_world_size(self) -> int:
        return int(self._on.world.process.group.size)


class _Opening:
    """Stands for the lock under which a process opens its agreements: one for each process."""

    def __init__(self, on: Stage) -> None:
        self._on = on

    def __enter__(self) -> None:
        self._on.world.process.opening.__enter__()

    def __exit__(self, *error: object) -> None:
        self._on.world.process.opening.__exit__()


def _name_in_lock(process: Process) -> str:
    """Shorter at each launch: what is left of an older note shows behind a newer one."""
    return f"host{process.host}" + "-" * max(0, 5 - process.launch)


def _replacements(on: Stage) -> Iterator[tuple[Any, str, Any]]:
    def world() -> World:
        return on.world

    time, threading = threads.Time(world), threads.Threading(world)
    hands = Hands(lambda: on.files)
    for module in (protocol, beats, patience, shared_fs, leases, stops):
        yield module, "time", time
    for module in (protocol, patience, async_save, stage):
        yield module, "threading", threading
    distributed = _Distributed(on)
    yield ranks, "dist", distributed
    yield protocol, "dist", distributed
    for module in (protocol, stops):
        yield module, "default_store", lambda: on.world.process.store
    yield protocol, "_opening", _Opening(on)
    yield protocol, "_INLINE_BYTES", _INLINE_BYTES
    yield protocol, "_INLINE_IN_TREE_BYTES", _INLINE_IN_TREE_BYTES
    yield parts, "_PART_BYTES", PART_BYTES
    yield tree, "FAN", 2  # so that few ranks make a deep tree
    yield patience, "_here", threads.TaskLocal(world)
    yield async_save, "_lower_priority", lambda: None
    yield lock, "_HELD", threads.Locks(world)
    yield lock, "socket", SimpleNamespace(gethostname=lambda: _name_in_lock(on.world.process))
    kinds = {n: getattr(fcntl, n) for n in ("F_WRLCK", "LOCK_EX", "LOCK_NB")}
    yield lock, "fcntl", SimpleNamespace(fcntl=hands.fcntl, **kinds)
    secrets = SimpleNamespace(token_hex=lambda n: f"{on.world.draw.getrandbits(8 * n):0{2 * n}x}")
    for module in (lock, publish, checkpointer, stops, local_places, local_parts):
        yield module, "secrets", secrets
    yield (
        local_places,
        "socket",
        SimpleNamespace(gethostname=lambda: f"host{on.world.process.host}"),
    )
    yield local_parts, "address_toward_store", lambda: f"address of host{on.world.process.host}"
    yield local_parts, "Server", on.network.server
    yield local_parts, "Reader", on.network.reader
    yield local_parts, "open", opened_new(hands)
    for name, function in hands.functions().items():
        yield os, name, function


@contextlib.contextmanager
def installed(on: Stage) -> Iterator[None]:
    """Simulated modules in place of real ones, in this process."""
    before = [(where, name, getattr(where, name, None)) for where, name, _ in _replacements(on)]
    for where, name, value in _replacements(on):
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in before:
            if value is None:  # a builtin, which the module did not have under this name
                delattr(where, name)
            else:
                setattr(where, name, value)
