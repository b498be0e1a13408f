"""Ranks under a launcher tell each other what they saw, through a store and without a process group.

A process group can't start while a rank is missing, and does not say which one. Here each rank says that it is there, and rank
0 names those that do not come. Every wait has an end.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol, cast

import torch.distributed as dist

from ..objects import frozen
from .facts import Facts, Meeting, Place, Seen
from .probe import PREFIX
from .rule import Finding, number

__all__ = ["Assembly", "assembly_of"]

_CONNECT_S = 8.0
#: After its own facts, rank 0 waits so long for a rank that has started, and for one that has not.
_STARTED_S, _ABSENT_S = 8.0, 6.0
#: A file that another rank wrote must be seen within this time.
_SEEN_S = 2.0
_REPLY_S, _POLL_S = 4.0, 0.05
#: All waits end so long after the rank has looked for the store, whatever its own facts took; the last ones get a second.
_ALL_S = 26.0
_UNLIMITED = 1e18


class _Store(Protocol):
    """The methods of torch.distributed.Store that are used here. Its stub says str where it takes and gives bytes."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@frozen(kw_only=True)
class Assembly:
    """This rank's seat among the ranks of a launch. ``store`` is None if there is a ``problem``."""

    rank: int
    world_size: int
    is_first_here: bool
    """Whether it is the first rank of its host."""
    store: _Store | None
    problem: str
    """Why the store can't be had."""
    began_s: float
    hosts_store: bool

    def exchange(self, facts: Facts, findings: Iterable[Finding], files: Mapping[str, int]) -> Meeting | None:
        """Tell the other ranks, and wait for them; every rank calls it. Rank 0 gets the meeting, the other ranks None.

        A rank that does not hear of rank 0 gets a meeting that names rank 0 as missing. Takes about 25 s at most.
        """
        if self.store is None:
            return self._alone()
        marks = [os.path.join(p.path, f"{PREFIX}rank-{self.rank}") for p in _shared(facts.places)]
        try:
            for mark in marks:
                _touch(mark)
            self.store.set(f"here/{self.rank}", b"1")
            self.store.add("here", 1)
            present = self._present()
            if present is None:
                return self._alone()
            clock_s = time.time()
            seen = Seen(
                rank=self.rank,
                host=facts.machine.network.host,
                versions=facts.software,
                limits=_limits(facts),
                clock_s=clock_s,
                files=dict(files) if self.is_first_here else None,
                unseen=_unseen(facts.places, present, self.rank),
                findings=tuple(f.to_json() for f in findings) if self.is_first_here else (),
            )
            self.store.set(f"seen/{self.rank}", json.dumps(asdict(seen)).encode())
            self.store.add("seen", 1)
            return self._gathered(present) if self.rank == 0 else self._heard()
        except dist.DistError:  # the store ended with rank 0, or with the launcher
            return self._alone()
        finally:
            for mark in marks:
                _remove(mark)

    def _present(self) -> list[int] | None:
        """The ranks that are there, as rank 0 says; None if it does not."""
        assert self.store is not None
        if self.rank != 0:
            # rank 0 may look for longer than this rank did
            return json.loads(self.store.get("present")) if self._comes("present", _ALL_S) else None
        started, absent = self._end(_STARTED_S), self._end(_ABSENT_S)
        while self.store.add("here", 0) < self.world_size:
            now = time.monotonic()
            if now > started or (now > absent and self.store.add("started", 0) < self.world_size):
                break
            time.sleep(_POLL_S)
        present = [r for r in range(self.world_size) if self.store.check([f"here/{r}"])]
        self.store.set("present", json.dumps(present).encode())
        return present

    def _gathered(self, present: list[int]) -> Meeting:
        assert self.store is not None
        end = self._end(_SEEN_S + _REPLY_S)
        while self.store.add("seen", 0) < len(present) and time.monotonic() < end:
            time.sleep(_POLL_S)
        known = [r for r in present if self.store.check([f"seen/{r}"])]
        ranks = tuple(_read(self.store.get(f"seen/{r}")) for r in known)
        self.store.set("done", b"1")
        if self.hosts_store:  # it ends with this process
            end = self._end(_REPLY_S)
            while self.store.add("left", 0) < len(known) - 1 and time.monotonic() < end:
                time.sleep(_POLL_S)
        return Meeting(
            world_size=self.world_size,
            ranks=ranks,
            missing=tuple(r for r in range(self.world_size) if r not in known),
            waited_s=time.monotonic() - self.began_s,
        )

    def _heard(self) -> Meeting | None:
        """After rank 0 has all: None. Otherwise rank 0 is missing."""
        assert self.store is not None
        if not self._comes("done", _SEEN_S + 2 * _REPLY_S):
            return self._alone()
        self.store.add("left", 1)
        return None

    def _end(self, limit_s: float) -> float:
        """When a wait of ``limit_s`` ends, of which all waits leave at least a second."""
        now = time.monotonic()
        return now + max(1.0, min(limit_s, self.began_s + _ALL_S - now))

    def _comes(self, key: str, limit_s: float) -> bool:
        assert self.store is not None
        return _come(self.store, key, self._end(limit_s) - time.monotonic())

    def _alone(self) -> Meeting:
        cant_host = self.hosts_store and self.store is None
        return Meeting(
            world_size=self.world_size,
            ranks=(),
            missing=() if cant_host else (0,),
            waited_s=time.monotonic() - self.began_s,
            problem=self.problem if cant_host else None,
        )


def assembly_of(environment: Mapping[str, str]) -> Assembly | None:
    """This rank's seat, if a launcher has set rank, world size and the store's address; otherwise None.

    Every rank calls it, before it looks at anything. Connects within 8 s.
    """
    rank, world_size = number(environment.get("RANK")), number(environment.get("WORLD_SIZE"))
    address, port = environment.get("MASTER_ADDR"), number(environment.get("MASTER_PORT"))
    if rank is None or world_size is None or not address or not port or port >= 65_536:
        return None
    if world_size < 2 or rank >= world_size:
        return None
    began = time.monotonic()
    hosts_store = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store: _Store | None = None
    problem = "" if hosts_store or _answers(address, port) else f"no answer from {address}:{port}"
    try:
        if problem:
            raise dist.DistError(problem)
        tcp = dist.TCPStore(  # type: ignore[attr-defined]  # public, without __all__
            address,
            port,
            world_size,
            hosts_store,
            timeout=timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
        )
        # A launcher that starts the ranks again keeps its store.
        prefix = f"shardwise-doctor/{environment.get('TORCHELASTIC_RESTART_COUNT', '')}"
        store = cast(_Store, dist.distributed_c10d.PrefixStore(prefix, tcp))
        store.add("started", 1)
    except dist.DistError as error:
        store, problem = None, problem or " ".join(str(error).split())[:200]
    return Assembly(
        rank=rank,
        world_size=world_size,
        is_first_here=environment.get("LOCAL_RANK", "0") == "0",
        store=store,
        problem=problem,
        began_s=began,
        hosts_store=hosts_store,
    )


def _answers(address: str, port: int) -> bool:
    """Whether something listens there, or does so soon: torch's own client takes twice its timeout, and prints stacks."""
    end = time.monotonic() + _CONNECT_S
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), timeout=2.0).close()
            return True
        except OSError:
            time.sleep(4 * _POLL_S)
    return False


def _come(store: _Store, key: str, limit_s: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=limit_s))
        return True
    except dist.DistError:
        return False


def _read(raw: bytes) -> Seen:
    found: dict[str, Any] = json.loads(raw)
    unseen = {path: tuple(ranks) for path, ranks in found.pop("unseen").items()}
    return Seen(**{**found, "unseen": unseen, "findings": tuple(found["findings"])})


def _limits(facts: Facts) -> dict[str, float]:
    machine = facts.machine
    found: dict[str, float | None] = {
        "cores": machine.cores.usable,
        "GPUs": machine.gpus,
        "RLIMIT_NOFILE": machine.limits.open_files,
        "RLIMIT_FSIZE": machine.limits.file_bytes,
    }
    if machine.memory is not None:
        found["memory (bytes)"] = machine.memory.limit_bytes
        found["/dev/shm (bytes)"] = machine.memory.shm_bytes or 0
    return {name: _UNLIMITED if value is None else float(value) for name, value in found.items()}


# ----------------------------------------------------------------------------------------------------
# Files by which ranks see whether they share a directory


def _shared(places: Iterable[Place]) -> list[Place]:
    return [p for p in places if not p.failures.get("write") and os.path.isdir(p.path)]


def _unseen(places: Iterable[Place], present: list[int], own: int) -> dict[str, tuple[int, ...]]:
    end = time.monotonic() + _SEEN_S
    left = {p.path: [r for r in present if r != own] for p in _shared(places)}
    while any(left.values()):
        for path, ranks in left.items():
            left[path] = [r for r in ranks if not os.path.exists(os.path.join(path, f"{PREFIX}rank-{r}"))]
        if time.monotonic() > end:
            break
        time.sleep(_POLL_S)
    return {path: tuple(ranks) for path, ranks in left.items() if ranks}


def _touch(path: str) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError:
        return  # the probe has said so


def _remove(path: str) -> None:
    try:
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and not status.st_size:  # as `_touch` makes it
            os.unlink(path)
    except OSError:
        return
