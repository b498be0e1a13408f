"""torchrun on two and three hosts (c10d rendezvous over the bridge): a worker killed, and nodes 3 -> 2 -> 3, by examples/elastic.py."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.elastic_log import lives
from tests.harness.process import ROOT
from tests.hosts.hosts import SHARED, Hosts, why_not
from tests.launchers.rows import NotHere, Row

__all__ = ["NAME", "run", "version"]

NAME = "torchrun"
SAVE_EVERY = 5
_RENDEZVOUS = "last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=10"


def version() -> str:
    if why := why_not():
        raise NotHere(why)
    from importlib.metadata import version as installed

    return f"torch {installed('torch')}"


class _Agents:
    """One agent with one worker on each host; host 0 holds the rendezvous."""

    def __init__(self, hosts: Hosts, nodes: str, out: str, steps: int) -> None:
        self.hosts, self.out = hosts, hosts.shared / out
        self._words = (nodes, out, steps)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        nodes, out, steps = self._words
        host = self.hosts[number]
        self.processes[number] = host.start(
            *(host.python, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"),
            *("--max-restarts", "3", "--monitor-interval", "0.2", "--rdzv-id", out, "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{self.hosts[0].address}:29400"),
            *("--rdzv-conf", f"is_host={int(number == 0)},{_RENDEZVOUS}"),
            *(str(ROOT / "examples/elastic.py"), "--out", str(SHARED / out), "--steps", str(steps)),
            *("--save-every", str(SAVE_EVERY), "--step-seconds", "0.1"),
            log=self.hosts.folder / f"{out}-agent-{number}.log",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    def wait(self, timeout_s: float = 120.0) -> list[int]:
        return [process.wait(timeout_s) for process in self.processes.values()]

    def wait_for(self, what: str, found: Callable[[], bool], timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not found():
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s\n{self.report()}"
            time.sleep(0.1)

    def report(self) -> str:
        return "\n".join(
            f"-- {log.name}\n{log.read_text()[-3000:]}" for log in self.hosts.folder.glob("*-agent-*.log")
        )


def _reached(out: Path, ranks: int, step: int) -> bool:
    """Whether the newest life of rank 0 is on so many ranks, and came to the step."""
    found = lives(out)
    return bool(
        found and found[-1][0]["world_size"] == ranks and found[-1][1] and found[-1][1][-1]["step"] >= step
    )


def _steps_of_newest(out: Path, ranks: int) -> int:
    """Steps of the newest life of rank 0, if that is on so many ranks and not the first."""
    found = lives(out)
    return len(found[-1][1]) if len(found) > 1 and found[-1][0]["world_size"] == ranks else 0


def _kill_worker(hosts: Hosts, number: int) -> None:
    hosts[number].run(
        "sh",
        "-c",
        "kill -9 $(pgrep -f '[p]ython.* -u .*elastic.py' || pgrep -f '[e]lastic.py --out' | tail -1)",
    )


def run(out: Path) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, Hosts(3, Path(folder)) as hosts:
        whole = _whole(hosts)
        rows = [_two_hosts(hosts, whole, out), _elastic(hosts, out)]
    return rows


def _whole(hosts: Hosts) -> dict[int, float]:
    """Losses by step of a run on two hosts that nothing stops."""
    agents = _Agents(hosts, "2", "whole", 60)
    for number in (0, 1):
        agents.start(number)
    assert agents.wait(180) == [0, 0], agents.report()
    return {entry["step"]: entry["loss"] for _, steps in lives(agents.out) for entry in steps}


def _two_hosts(hosts: Hosts, whole: dict[int, float], out: Path) -> Row:
    """A worker is killed with SIGKILL; both agents start theirs again."""
    agents = _Agents(hosts, "2", "killed", 60)
    for number in (0, 1):
        agents.start(number)
    agents.wait_for("step 12", lambda: _reached(agents.out, 2, 12))
    _kill_worker(hosts, 1)
    codes = agents.wait(180)
    found = lives(agents.out)
    unlike = [s["step"] for _, steps in found for s in steps if s["loss"] != whole[s["step"]]]
    _write_curve(out / "torchrun-two-hosts.json", found, whole)
    done = sum(len(steps) for _, steps in found)
    figure = (
        f"{len(found)} lives, resumed from step {found[-1][0]['resumed']}; {done} losses on 2 ranks, {len(unlike)} of them "
        f"differ in a bit from the run without interruption; exit statuses {codes}"
    )
    return Row(
        "two hosts, one worker killed (--max-restarts 3)",
        figure,
        codes == [0, 0] and len(found) > 1 and not unlike,
    )


def _elastic(hosts: Hosts, out: Path) -> Row:
    """Three nodes; a host vanishes; it comes back."""
    agents = _Agents(hosts, "2:3", "elastic", 100_000)
    for number in range(3):
        agents.start(number)
    agents.wait_for("step 12 on 3 ranks", lambda: _reached(agents.out, 3, 12))
    hosts[2].vanish()
    agents.processes.pop(2).wait()
    agents.wait_for("steps on 2 ranks", lambda: _reached(agents.out, 2, 25))
    hosts.restart(2)
    agents.start(2)
    agents.wait_for("10 steps on 3 ranks again", lambda: _steps_of_newest(agents.out, 3) >= 10)
    for number in range(3):
        for pid in hosts[number].processes()[1:]:
            subprocess.run(
                ["kill", f"-{int(signal.SIGKILL)}", str(pid)], check=False, stderr=subprocess.DEVNULL
            )
    found = lives(agents.out)
    alone = _Agents(hosts, "1", "alone", max(s["step"] for _, steps in found for s in steps))
    alone.start(0)
    assert alone.wait(300) == [0], alone.report()
    truth = {s["step"]: s["loss"] for _, steps in lives(alone.out) for s in steps}
    _write_curve(out / "torchrun-elastic.json", found, truth)
    worst = max(
        abs(s["loss"] - truth[s["step"]]) / abs(truth[s["step"]]) for _, steps in found for s in steps
    )
    sizes = [head["world_size"] for head, _ in found]
    figure = f"ranks {' -> '.join(map(str, sizes))}, resumed from {[h['resumed'] for h, _ in found]}; largest difference {worst:.1e}"
    order = [n for k, n in enumerate(sizes) if k == 0 or n != sizes[k - 1]]
    return Row(
        "nodes 3 -> 2 -> 3 (--nnodes 2:3), a host vanishes and comes back",
        figure,
        order == [3, 2, 3] and worst < 1e-3,
    )


def _write_curve(
    path: Path, found: list[tuple[dict[str, Any], list[dict[str, Any]]]], truth: dict[int, float]
) -> None:
    """Each loss with its life, ranks and the loss of the run without interruption."""
    rows = [
        {
            "life": k,
            "ranks": head["world_size"],
            "step": s["step"],
            "loss": s["loss"],
            "uninterrupted": truth[s["step"]],
        }
        for k, (head, steps) in enumerate(found)
        for s in steps
    ]
    path.write_text(json.dumps(rows))
