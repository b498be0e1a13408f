"""Elasticity, with torchrun's own agents: one is killed with its worker, another one joins; the run goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.publish.places import published_steps
from tests.checkpoint import _elastic_fns as fns
from tests.harness.elastic_log import lives
from tests.harness.pool import RankPool
from tests.harness.process import ROOT, worker_env

SAVE_EVERY = 5
GLOBAL_BATCH = 12


class Agents:
    """torchrun agents of one job on this host, each with one worker; the first holds the rendezvous."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def start(self) -> None:
        holds = not self._processes
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"),
            *("--max-restarts", "3", "--monitor-interval", "0.2", "--rdzv-id", "elastic"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}"),
            # Short, so that an agent that is gone is soon counted as gone.
            *(
                "--rdzv-conf",
                f"is_host={int(holds)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=6",
            ),
            str(ROOT / "examples/elastic.py"),
            *("--out", str(self.out), "--steps", "100000"),
            *("--save-every", str(SAVE_EVERY), "--step-seconds", "0.1"),
        ]
        with (self._folder / f"agent-{len(self._processes)}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=worker_env(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def kill(self, index: int) -> None:
        """SIGKILL to an agent and all that it started, as when its host is lost. Workers have sessions of their own."""
        process = self._processes[index]
        pids = [process.pid] if process.poll() is None else []
        for pid in pids:  # grows
            with contextlib.suppress(FileNotFoundError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                pids += map(int, children)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for index in range(len(self._processes)):
            self.kill(index)

    def wait_for(self, what: str, found: Callable[[], bool], timeout_s: float = 160.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not found():
            assert self._processes[0].poll() is None, f"the first agent ended before {what}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
            time.sleep(0.05)

    def report(self) -> str:
        """All that agents, workers and the example have written."""
        files = [*self._folder.glob("agent-*.log"), *self.out.glob("rank-*.jsonl")]
        return "\n".join(f"---- {f.name} ----\n{f.read_text(errors='replace')}" for f in sorted(files))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(tmp_path)
    yield found
    found.close()


def last_step(out: Path, rank: int, world_size: int) -> int:
    """Of a rank's latest start, if it is in a group of this size; else 0."""
    head, steps = (lives(out, rank) or [({"world_size": 0}, [])])[-1]
    return steps[-1]["step"] if steps and head["world_size"] == world_size else 0


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.skipif(sys.platform != "linux", reason="finds workers in /proc")
def test_a_lost_agent_and_a_new_one(agents: Agents, ranks: RankPool, tmp_path: Path) -> None:
    try:
        run_through(agents)
        check(agents.out, ranks, tmp_path / "uninterrupted")
    except BaseException as error:
        error.add_note(agents.report())
        raise


def run_through(agents: Agents) -> None:
    """Two agents; one is lost; a new one joins."""
    out = agents.out
    agents.start()
    agents.start()
    agents.wait_for("step 12 on 2 ranks", lambda: last_step(out, 1, 2) >= 12)
    agents.kill(1)
    alone = last_step(out, 1, 2) + 3
    agents.wait_for("a few steps on 1 rank", lambda: last_step(out, 0, 1) >= alone)
    agents.start()
    starts = len(lives(out, 1))
    agents.wait_for(
        "a few steps on 2 ranks again",
        lambda: len(lives(out, 1)) > starts and last_step(out, 1, 2) >= last_step(out, 0, 2) - 1 > alone,
    )
    agents.wait_for("their save", lambda: max(published_steps(str(out / "checkpoints"))) > alone)
    agents.close()


def check(out: Path, ranks: RankPool, alone: Path) -> None:
    """Each start goes on from the newest step; each step has the samples and the loss of a run that never stopped."""
    found = lives(out, 0)
    heads = [head for head, _ in found]
    assert [h for h in heads if h["world_size"] == 1 and h["saved_on"] == 2], "went on with fewer ranks"
    assert [h for h in heads if h["world_size"] == 2 and h["saved_on"] == 1], "went on with more ranks"
    reached = 0
    for head, steps in found:
        resumed = head["resumed"]
        assert resumed % SAVE_EVERY == 0
        assert reached - SAVE_EVERY <= resumed <= reached, "lost more than the steps since the newest save"
        assert [s["step"] for s in steps] == list(range(resumed + 1, resumed + 1 + len(steps)))
        reached = resumed + len(steps)
    furthest = max(step["step"] for rank in (0, 1) for _, steps in lives(out, rank) for step in steps)
    ranks.run_ranks(1, fns.uninterrupted, str(alone), furthest)
    ((_, expected),) = lives(alone, 0)
    for rank in (0, 1):
        for head, steps in lives(out, rank):
            share = GLOBAL_BATCH // head["world_size"]
            for step in steps:
                truth = expected[step["step"] - 1]
                assert step["ids"] == truth["ids"][rank * share : (rank + 1) * share], (rank, head, step)
                assert step["loss"] == pytest.approx(truth["loss"], rel=1e-3, abs=1e-5), (rank, head, step)
    newest = next(iter(published_steps(str(out / "checkpoints")).values()))
    assert sw.verify(newest).problems == ()
