"""Ranks forked from one process that has imported everything: a pair costs a tenth of a second, not six.

The forking process has one thread and no process group. What it waits for it polls, so that several scenarios
go on at a time: most of their time is spent waiting for the timeout of a rank whose peer is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy.random
import safetensors.torch
import torch
import torch._dynamo  # fully_shard imports it: here once, not in every rank
import torch.distributed as dist
import torch.distributed.fsdp

import shardwise
from tests.harness.process import install_stack_dump, warnings_as_in_pytest

__all__ = ["Forks", "Launch", "Scenario", "run_all"]

T = TypeVar("T")
#: Yields what it waits for, as a function that says whether it has come; returns its result.
Scenario = Generator[Callable[[], bool], None, T]

#: No rank of any scenario takes as long, unless it hangs: those that lose a peer wait a few seconds for it.
DEADLINE_S = 120.0
_HOST = "127.0.0.1"


class Forks:
    """Forks ranks, each in a fresh gloo group, that call a function. ``base`` holds their logs and results."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._count = 0
        self._launches: list[Launch] = []
        torch.set_num_threads(1)
        safetensors.torch.save({"warm": torch.zeros(1)})
        numpy.random.default_rng()
        assert shardwise.save
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        self._host_pid, self._port = self._start_store()

    def start(
        self, world_size: int, fn: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S
    ) -> Launch:
        """Fork ``world_size`` ranks that call ``fn(*args)``. It may be any function: nothing of it is pickled."""
        self._count += 1
        directory = self.base / f"launch-{os.getpid()}-{self._count}"
        directory.mkdir()
        sys.stdout.flush()
        sys.stderr.flush()
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                self._rank_main(directory, rank, world_size, fn, args)
            pids.append(pid)
        launch = Launch(directory, pids, time.monotonic() + deadline_s)
        self._launches.append(launch)
        return launch

    def run(self, world_size: int, fn: Callable[..., T], *args: Any) -> list[T]:
        """Fork ranks, wait for them, and give their results by rank; AssertionError if one fails."""
        launch = self.start(world_size, fn, *args)
        while not launch.ended():
            time.sleep(0.002)
        return [launch.result(rank) for rank in range(world_size)]

    def close(self) -> None:
        """End whatever still runs."""
        self.end_own()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._host_pid, signal.SIGKILL)
            os.waitpid(self._host_pid, 0)

    def disown(self) -> None:
        """In a fork of the forking process: its ranks are not ours to end."""
        self._launches = []

    def end_own(self) -> None:
        """End the ranks that still run."""
        for launch in self._launches:
            launch.kill_all()

    def _start_store(self) -> tuple[int, int]:
        """A process that serves all groups, because it must outlive every rank and because it has threads."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _end_with_parent()
            store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
            os.write(writer, str(store.port).encode())
            while True:
                time.sleep(3600)
        os.close(writer)
        port = int(os.read(reader, 16))
        os.close(reader)
        return pid, port

    def _rank_main(
        self, directory: Path, rank: int, world_size: int, fn: Callable[..., Any], args: Sequence[Any]
    ) -> None:
        status = 1
        try:
            os.setpgid(0, 0)
            log = os.open(directory / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            _end_with_parent()
            install_stack_dump()
            with warnings_as_in_pytest():
                self._join(directory.name, rank, world_size)
                value = fn(*args)
            partial = directory / f"partial-{rank}"
            partial.write_bytes(pickle.dumps(value))
            partial.rename(directory / f"result-{rank}")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _join(self, name: str, rank: int, world_size: int) -> None:
        timeout = timedelta(seconds=60)
        served = dist.TCPStore(_HOST, self._port, is_master=False, timeout=timeout)
        store = dist.PrefixStore(name, served)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


class Launch:
    """Ranks that were started together."""

    def __init__(self, directory: Path, pids: list[int], deadline: float) -> None:
        self.directory = directory
        self.pids = pids
        self.statuses: dict[int, int] = {}
        """Exit status by rank, of those that ended; negative for a signal."""
        self.stopped: set[int] = set()
        self.hung: set[int] = set()
        """Ranks that still ran at the deadline."""
        self._deadline = deadline

    def ended(self, ranks: Iterable[int] | None = None) -> bool:
        """Whether ranks (all by default) have ended. Past the deadline they are made to, and are in ``hung``."""
        self._reap()
        left = set(range(len(self.pids)) if ranks is None else ranks) - self.statuses.keys()
        if left and time.monotonic() > self._deadline:
            self.hung |= left - self.stopped if ranks is None else left
            for rank in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], signal.SIGUSR1)  # writes its stacks
                    os.kill(self.pids[rank], signal.SIGCONT)
            time.sleep(0.5)
            self.kill_all()
        return left <= self.statuses.keys()

    def has_stopped(self, rank: int) -> bool:
        """Whether a rank is stopped by a signal, or has ended."""
        self._reap()
        return rank in self.stopped or rank in self.statuses or self.ended([rank])

    def send(self, rank: int, signum: signal.Signals) -> None:
        """A signal to one rank. Not reaped while it is in use here, so its id is still its own."""
        if rank not in self.statuses:
            self.stopped.discard(rank)
            os.kill(self.pids[rank], signum)

    def kill_all(self) -> None:
        """End every rank and its children."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self.statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def has_result(self, rank: int) -> bool:
        return (self.directory / f"result-{rank}").exists()

    def result(self, rank: int) -> Any:
        """What a rank's function returned; AssertionError with its output if it did not."""
        if not self.has_result(rank):
            status = "hung" if rank in self.hung else f"exit status {self.statuses.get(rank)}"
            raise AssertionError(f"rank {rank} gave no result ({status}):\n{self.output(rank)}")
        return pickle.loads((self.directory / f"result-{rank}").read_bytes())

    def output(self, rank: int) -> str:
        log = self.directory / f"log-{rank}"
        return log.read_text(errors="replace")[-6000:] if log.exists() else ""

    def forget(self) -> None:
        """Delete logs and results."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _reap(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank in self.statuses:
                continue
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                self.stopped.add(rank)
            elif found:
                self.statuses[rank] = os.waitstatus_to_exitcode(status)


def run_all(scenarios: Iterable[Callable[[], Scenario[T]]], lanes: int) -> list[T]:
    """Run scenarios, ``lanes`` of them at a time; their results in order."""
    waiting = list(enumerate(scenarios))[::-1]
    active: list[tuple[int, Scenario[T], Callable[[], bool]]] = []
    results: dict[int, T] = {}

    def advance(index: int, scenario: Scenario[T]) -> None:
        try:
            active.append((index, scenario, next(scenario)))
        except StopIteration as stop:
            results[index] = stop.value

    while waiting or active:
        while waiting and len(active) < lanes:
            index, make = waiting.pop()
            advance(index, make())
        ready = [entry for entry in active if entry[2]()]
        for entry in ready:
            active.remove(entry)
            advance(entry[0], entry[1])
        if not ready:
            time.sleep(0.002)
    return [results[index] for index in sorted(results)]


def _end_with_parent() -> None:
    """Be killed when the forking process ends, also while stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
