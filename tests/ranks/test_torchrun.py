"""torchrun --max-restarts 3, by examples/preemptible.py: which stops and crashes start the ranks again, and its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.process import ROOT, worker_env

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class _Case:
    who: str
    """``torchrun``, or ``worker`` for one of its two ranks."""
    number: signal.Signals
    options: tuple[str, ...] = ()
    status: int = 0
    lives: int = 1
    stopped: int = 1
    """How many lives ended by a stop, with the step saved."""


CASES = {
    "the scheduler stops torchrun": _Case("torchrun", signal.SIGTERM, status=1),
    "one rank is asked to stop": _Case("worker", signal.SIGUSR1, lives=2),
    "one rank is asked to stop for good": _Case("worker", signal.SIGUSR1, ("--exit-status", "0")),
    "one rank is killed": _Case("worker", signal.SIGKILL, lives=2, stopped=0),
}


class _Job:
    def __init__(self, out: Path, case: _Case) -> None:
        out.mkdir()
        self.case, self._losses, self.log = case, out / "losses.jsonl", out / "log"
        with self.log.open("wb") as log:
            self.agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                    *("--max-restarts", "3", "--monitor-interval", "0.2"),
                    *(str(ROOT / "examples/preemptible.py"), "--out", str(out), "--steps", "60"),
                    *("--save-every", "10", "--step-seconds", "0.1", *case.options),
                ],
                cwd=ROOT,
                env=worker_env(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def lines(self) -> list[dict[str, int]]:
        text = self._losses.read_text() if self._losses.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def found(self, key: str) -> list[int]:
        return [line[key] for line in self.lines() if key in line]

    def send(self) -> None:
        """The signal, after step 12."""
        end = time.monotonic() + 120
        while len(self.found("step")) < 12:
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            assert self.agent.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.05)
        agent = self.agent.pid
        workers = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        pid = agent if self.case.who == "torchrun" else int(workers[0])
        os.kill(pid, self.case.number)


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_stops_and_restarts(tmp_path: Path) -> None:
    jobs = {name: _Job(tmp_path / f"job-{k}", case) for k, (name, case) in enumerate(CASES.items())}
    try:
        for job in jobs.values():
            job.send()
        for name, job in jobs.items():
            status, case = job.agent.wait(120), job.case
            said = f"{name}: status {status}\n{job.lines()[-3:]}\n{job.log.read_text()[-2000:]}"
            assert status == case.status, said
            resumed, stopped = job.found("resumed"), job.found("stopped")
            assert (len(resumed), len(stopped)) == (case.lives, case.stopped), said
            if case.who == "torchrun":
                log = job.log.read_text()
                line = f"the newest saved step is {stopped[0]}\n"
                assert 0 < log.find(line) < log.find("SignalException: Process"), (
                    "as docs/howto/preemption.md says"
                )
            if case.lives == 2:  # it comes to its end; from the step of the stop, or from the last save
                last = max(line["step"] for line in job.lines() if line.get("life") == 0 and "step" in line)
                saved = {last // 10 * 10, (last - 1) // 10 * 10}  # killed in a save, too
                assert resumed[1] in (set(stopped) or saved - {0}), said
                assert job.found("step")[-1] == 60, said
            else:
                assert job.found("step")[-1] == stopped[0] < 60, said
    finally:
        for job in jobs.values():
            job.agent.kill()
            job.agent.wait()
