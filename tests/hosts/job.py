"""Ranks on several hosts, each in a gloo group over the bridge, that call one function: as `tests.harness.launch`, but on hosts."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from tests.harness.process import target_of
from tests.hosts.hosts import SHARED, Host, Hosts

__all__ = ["Agents", "Job"]

_POLL_S = 0.02
_PORT = 29500
_numbers = itertools.count()


class Agents:
    """One process on each host that forks ranks. They end with the hosts, or with the block."""

    def __init__(
        self,
        hosts: Hosts,
        *,
        env: Mapping[int, Mapping[str, str]] | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        """``env``: variables of some hosts, by number. ``imports``: modules that ranks then have from the start."""
        self.hosts, self._env, self._imports = hosts, dict(env or {}), tuple(imports)
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for host in self.hosts.hosts:
            self.start(host)
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._agents.values():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was not sent yet: the agent is gone
                        pipe.close()

    def start(self, host: Host) -> None:
        """Start the agent of a host, also of one that has come back."""
        log = (self.hosts.folder / f"agent-{host.name}.log").open("ab")
        self._agents[host.number] = subprocess.Popen(
            host.command(host.python, "-m", "tests.hosts.agent", *self._imports),
            env=host.env | self._env.get(host.number, {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        log.close()

    def wait_until_ready(self) -> None:
        """Return when every agent has imported what ranks need."""
        for number, process in self._agents.items():
            assert process.stdout is not None
            if process.poll() is None and not process.stdout.closed:
                line = process.stdout.readline()
                text = (self.hosts.folder / f"agent-host{number}.log").read_text()
                assert line.strip() == b"ready", f"the agent of host{number} did not start: {text}"
                process.stdout.close()

    def order(self, number: int, what: Mapping[str, object]) -> None:
        """Send an order to the agent of a host."""
        stdin = self._agents[number].stdin
        assert stdin is not None
        stdin.write(json.dumps(what).encode() + b"\n")
        stdin.flush()


class Job:
    """``fn(*args)`` on ranks; ``places[rank]`` is the number of the rank's host. Rank 0 serves the group's store.

    A context manager: what is left of the ranks is killed on exit, and their output is added to an error.
    """

    def __init__(
        self, agents: Agents, places: Sequence[int], fn: Callable[..., Any], *args: Any, **env: str
    ) -> None:
        self._agents, self._places, self._env = agents, tuple(places), env
        name = f"job-{next(_numbers)}"
        self._folder, self._inside = agents.hosts.shared / name, SHARED / name
        self._call = pickle.dumps((target_of(fn), pickle.dumps((args, {}))))

    def __enter__(self) -> Self:
        self._folder.mkdir()
        (self._folder / "call").write_bytes(self._call)
        first = self._agents.hosts[self._places[0]]
        port = _PORT + next(_numbers)
        for rank, number in enumerate(self._places):
            on_host = [r for r, n in enumerate(self._places) if n == number]
            env = {"RANK": rank, "WORLD_SIZE": len(self._places), "LOCAL_RANK": on_host.index(rank)}
            env |= {"LOCAL_WORLD_SIZE": len(on_host), "MASTER_ADDR": first.address, "MASTER_PORT": port}
            order = {"folder": str(self._inside), "rank": rank}
            self._agents.order(number, order | {"env": {k: str(v) for k, v in env.items()} | self._env})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        for rank in range(len(self._places)):
            self.kill(rank)
        if error is not None:
            error.add_note(self.report())

    def kill(self, rank: int, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a rank, if it runs."""
        host = self._agents.hosts[self._places[rank]]
        pid, status = self._folder / f"pid-{rank}", self._folder / f"status-{rank}"
        if pid.exists() and not status.exists() and host.is_up:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                host.run("kill", f"-{int(signum)}", pid.read_text(), timeout_s=10)

    def wait(self, timeout_s: float, ranks: Iterable[int] | None = None) -> list[int]:
        """Exit statuses once all ranks ended; negative for a signal. AssertionError if they are not done in time."""
        chosen = list(range(len(self._places)) if ranks is None else ranks)
        deadline = time.monotonic() + timeout_s
        while (running := [r for r in chosen if not (self._folder / f"status-{r}").exists()]) and any(
            self._agents.hosts[self._places[r]].is_up for r in running
        ):
            assert time.monotonic() < deadline, f"ranks {running} still run after {timeout_s:g} s"
            time.sleep(_POLL_S)
        return [
            int((self._folder / f"status-{r}").read_text()) if r not in running else -signal.SIGKILL
            for r in chosen
        ]

    def wait_for_output(self, rank: int, text: str, timeout_s: float = 60.0) -> None:
        """Return once a rank has printed ``text``."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output(rank):
            assert time.monotonic() < deadline, f"rank {rank} did not print {text!r} in {timeout_s:g} s"
            assert not (self._folder / f"status-{rank}").exists() or text in self.output(rank), (
                f"rank {rank} ended"
            )
            time.sleep(_POLL_S)

    def output(self, rank: int) -> str:
        """What a rank has written."""
        path = self._folder / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def results(self, timeout_s: float) -> list[Any]:
        """What the function returned on each rank; AssertionError if it failed on one."""
        assert self.wait(timeout_s) == [0] * len(self._places), "a rank failed"
        return [self.result(r) for r in range(len(self._places))]

    def result(self, rank: int) -> Any:
        """What the function returned on a rank."""
        return pickle.loads((self._folder / f"result-{rank}").read_bytes())

    def report(self) -> str:
        """The output of all ranks."""
        return "\n".join(
            f"---- rank {r} on host{n} ----\n{self.output(r).rstrip()}" for r, n in enumerate(self._places)
        )
