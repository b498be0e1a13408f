"""A pool of ranks that live as long as a file of tests.

Their process group is made anew when the world size changes, after a failure, and every so many calls.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.harness.channel import Channel
from tests.harness.fork_server import FD
from tests.harness.process import dump_stacks, kill_all, spawn, target_of, worker_env

__all__ = ["RankPool"]

KEPT = 4
MAX_WORLD_SIZE = 16
#: Tests make meshes; each leaves threads, which poll, and sockets until its group is destroyed.
CALLS_PER_GROUP = 24
#: How long the others may go on once a rank has failed: they often wait for it in a collective.
GRACE_S = 10.0
#: For leaving or joining a group, and on top of it for each worker that is still importing torch.
JOIN_TIMEOUT_S = 30.0
START_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Reply:
    kind: str  # "ok", "raised", "died", "hung"
    value: Any = None
    text: str = ""


class _Worker:
    """One process, the channel to it, and the log that holds its output."""

    def __init__(self, log: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = spawn("tests.harness.worker", FD, log=log, env=worker_env(), fds=[theirs.fileno()])
        self.channel = Channel(ours)
        self._log = log
        self._mark = 0

    def mark(self) -> None:
        """Output counts from here."""
        self._mark = self._log.stat().st_size

    def output(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._mark)
            return file.read().decode(errors="replace")

    def send(self, message: tuple[Any, ...], timeout_s: float) -> None:
        # A dead or stuck worker shows when its reply is missing; there is one place that handles it.
        with contextlib.suppress(OSError):
            self.channel.send(message, timeout_s)

    def reply(self, timeout_s: float) -> _Reply:
        try:
            status, value = self.channel.receive(timeout_s)
        except TimeoutError:
            return _Reply("hung")
        except EOFError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2.0)
            return _Reply("died", text=f"exit status {self.process.poll()}\n")
        return _Reply("ok", value=pickle.loads(value)) if status == "ok" else _Reply("raised", text=value)


class RankPool:
    """Up to four persistent ranks (more on demand) that call functions of test modules."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._workers: list[_Worker] = []
        self._started = 0
        self._group_size = 0
        self._calls = 0
        self._file = ""

    def run_ranks(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks of one gloo group; their results by rank.

        ``fn`` is a module-level function of an importable module; arguments and results are pickled.
        Raises AssertionError with every rank's traceback and output if any raises, dies, or is not done
        after ``timeout_s`` (then with its stacks). The next call gets a group, or workers, that are new.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size is {world_size}, must be 1 to {MAX_WORLD_SIZE}")
        target, payload = target_of(fn), pickle.dumps((args, kwargs))
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        try:
            self._ensure_workers_of(test.partition("::")[0])
            self._ensure_group(world_size)
            members = self._workers[:world_size]
            calls = [("call", target, payload, test)] * world_size
            results = self._ask(members, calls, timeout_s, target)
        except BaseException:  # also an interrupt or the test's own timeout: nothing may stay half done
            self._group_size = 0
            raise
        finally:
            self._calls += 1
            self._trim(KEPT)
        return results

    def end(self) -> None:
        """Let every worker end by itself, and kill those that take longer than 5 s."""
        for worker in self._workers:
            worker.channel.close()
        deadline = time.monotonic() + 5.0
        with contextlib.suppress(subprocess.TimeoutExpired):
            for worker in self._workers:
                worker.process.wait(max(deadline - time.monotonic(), 0.0))
        self.close()

    def close(self) -> None:
        """Kill every worker."""
        self._trim(0)

    def _ensure_workers_of(self, file: str) -> None:
        """Each file of tests gets workers of its own: no group, thread or import of another file is left in them."""
        if file != self._file:
            self.end()
        self._file = file

    def _ensure_group(self, world_size: int) -> None:
        if self._group_size == world_size and self._calls < CALLS_PER_GROUP:
            return
        self._group_size = 0
        try:
            self._make_group(world_size)
        except AssertionError:
            # What an earlier test left in a worker may keep it from leaving its group; fresh ones have
            # no such past, so a second failure is real.
            self.close()
            self._make_group(world_size)
        self._group_size, self._calls = world_size, 0

    def _make_group(self, world_size: int) -> None:
        missing = max(world_size - len(self._workers), 0)
        self._workers += [self._start() for _ in range(missing)]
        timeout_s = JOIN_TIMEOUT_S + START_TIMEOUT_S * missing
        everyone, members = self._workers, self._workers[:world_size]
        self._ask(everyone, [("leave",)] * len(everyone), timeout_s, "leave the group")
        (port,) = self._ask(members[:1], [("host",)], JOIN_TIMEOUT_S, "host the store")
        joins = [("join", rank, world_size, port) for rank in range(world_size)]
        self._ask(members, joins, JOIN_TIMEOUT_S, "join the group")

    def _start(self) -> _Worker:
        self._started += 1
        return _Worker(self._log_dir / f"worker{self._started}.log")

    def _ask(
        self, workers: list[_Worker], messages: list[tuple[Any, ...]], timeout_s: float, label: str
    ) -> list[Any]:
        """Send each worker its message and return the values, or raise with everything that is known."""
        started = time.monotonic()
        try:
            for worker, message in zip(workers, messages, strict=True):
                worker.mark()
                worker.send(message, timeout_s)
            replies = _gather(workers, started + timeout_s)
            if any(reply.kind == "hung" for reply in replies):
                dump_stacks(worker.process for worker in workers)
        except BaseException:
            self.close()
            raise
        if all(reply.kind == "ok" for reply in replies):
            return [reply.value for reply in replies]
        report = _report(label, workers, replies, time.monotonic() - started)
        if any(reply.kind in ("died", "hung") for reply in replies):
            self.close()
        raise AssertionError(report)

    def _trim(self, kept: int) -> None:
        extra = self._workers[kept:]
        if not extra:
            return
        del self._workers[kept:]
        self._group_size = 0
        kill_all(worker.process for worker in extra)
        for worker in extra:
            worker.channel.close()


def _gather(workers: list[_Worker], deadline: float) -> list[_Reply]:
    """One reply per worker, by the deadline, or soon after the first one that isn't ok."""
    replies = [_Reply("hung")] * len(workers)
    pending = dict(enumerate(workers))
    while pending and (left_s := deadline - time.monotonic()) > 0:
        # Not only readable channels: a dead worker's child may hold its end of the socket open.
        gone = [rank for rank, worker in pending.items() if worker.process.poll() is not None]
        sockets = [worker.channel.sock for worker in pending.values()]
        ready = set(wait(sockets, 0 if gone else min(left_s, 0.5)))
        for rank, worker in list(pending.items()):
            if worker.channel.sock in ready:
                replies[rank] = worker.reply(max(deadline - time.monotonic(), 0.1))
            elif rank in gone:
                replies[rank] = _Reply("died", text=f"exit status {worker.process.poll()}\n")
            else:
                continue
            del pending[rank]
            if replies[rank].kind != "ok":
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return replies


def _report(label: str, workers: list[_Worker], replies: list[_Reply], elapsed_s: float) -> str:
    failed = sum(reply.kind != "ok" for reply in replies)
    lines = [f"{label}: {failed} of {len(replies)} ranks failed, after {elapsed_s:.1f} s"]
    for rank, (worker, reply) in enumerate(zip(workers, replies, strict=True)):
        lines.append(f"---- rank {rank}: {reply.kind} ----")
        lines += [text.rstrip() for text in (reply.text, worker.output()) if text.strip()]
    return "\n".join(lines)
