"""Fresh ranks, started as torchrun would, for tests that kill or stop some of them."""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tests.harness.process import Process, dump_stacks, kill_all, spawn, target_of, worker_env

__all__ = ["Launch"]

_HOST = "127.0.0.1"
_POLL_S = 0.02


class Launch:
    """``world_size`` new processes, each in a gloo group, that call ``fn(*args, **kwargs)``.

    A context manager: ranks start on entry, and what is left of them is killed on exit. ``store`` says who
    serves the group's store: ``"agent"`` is this process, as under torchrun, so that it outlives every
    rank; ``"rank0"`` is rank 0, as when variables are set by hand. ``env`` adds variables to all ranks, which are new
    interpreters then, because libraries read variables when they are imported; with ``fresh`` they are in any case.
    """

    def __init__(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        store: Literal["agent", "rank0"] = "agent",
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        **kwargs: Any,
    ) -> None:
        self.world_size = world_size
        self._call = pickle.dumps((target_of(fn), pickle.dumps((args, kwargs))))
        self._store_host = store
        self._env = dict(env or {})
        self._fresh = fresh or bool(env)
        self._processes: list[Process] = []
        self._stack = contextlib.ExitStack()
        self._store: Any = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="launch-")))
            (self._directory / "call").write_bytes(self._call)
            stack.callback(lambda: kill_all(self._processes))
            env = worker_env(**self._env, **self._rendezvous())
            for rank in range(self.world_size):
                self._processes.append(self._start(rank, env))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._processes:
            error.add_note(self._report())
        self._stack.close()
        self._store = None

    def kill(self, rank: int, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send ``signum`` to one rank: SIGKILL, SIGTERM, SIGSTOP, SIGCONT."""
        self._processes[rank].send_signal(signum)

    def status(self, rank: int) -> int | None:
        """The return code of a rank, or None while it runs."""
        return self._processes[rank].poll()

    def wait(self, timeout_s: float, *, ranks: Iterable[int] | None = None) -> list[int]:
        """Return codes of ``ranks`` (all of them by default) once they ended; negative for a signal.

        Raises AssertionError with every rank's output and stacks if they are not done in time.
        """
        chosen = [self._processes[rank] for rank in (range(self.world_size) if ranks is None else ranks)]
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in chosen):
            if time.monotonic() > deadline:
                self._give_up(f"ranks still run after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return [process.returncode for process in chosen]

    def wait_for_output(self, rank: int, text: str, timeout_s: float = 60.0) -> None:
        """Return once ``rank`` has printed ``text``; AssertionError if it ends or takes longer."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output(rank):
            if time.monotonic() > deadline:
                self._give_up(f"rank {rank} did not print {text!r} within {timeout_s:g} s")
            if self._processes[rank].poll() is not None and text not in self.output(rank):
                self._give_up(f"rank {rank} ended without printing {text!r}")
            time.sleep(_POLL_S)

    def output(self, rank: int) -> str:
        """What the rank has written to stdout and stderr so far."""
        return self._log(rank).read_bytes().decode(errors="replace")

    def result(self, rank: int) -> Any:
        """What the rank's function returned; FileNotFoundError if it didn't."""
        return pickle.loads((self._directory / f"result-{rank}").read_bytes())

    def _start(self, rank: int, env: dict[str, str]) -> Process:
        return spawn(
            "tests.harness.worker_once",
            str(self._directory / "call"),
            str(self._directory / f"result-{rank}"),
            log=self._log(rank),
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            fresh=self._fresh,
        )

    def _rendezvous(self) -> dict[str, str]:
        env = {"MASTER_ADDR": _HOST}
        env |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.world_size))
        if self._store_host == "rank0":
            return env | {"MASTER_PORT": str(_free_port())}
        from torch.distributed import TCPStore  # here, so that collecting tests doesn't import torch

        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        return env | {"MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def _log(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.log"

    def _give_up(self, reason: str) -> None:
        dump_stacks(self._processes)
        kill_all(self._processes)
        raise AssertionError(reason)  # the report is added on exit

    def _report(self) -> str:
        lines = []
        for rank, process in enumerate(self._processes):
            lines.append(f"---- rank {rank}: return code {process.poll()} ----")
            lines.append(self.output(rank).rstrip())
        return "\n".join(lines)


def _free_port() -> int:
    # Another process may take it before rank 0 does; "agent" has no such gap and is the default.
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
