"""Ray Train: ``examples/ray_train.py`` with two workers, of which each is killed once."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.process import ROOT, worker_env

from .curves import curve_of, until_step
from .rows import NotHere, Row

__all__ = ["NAME", "run", "run_example", "version"]

NAME = "Ray Train"
PYTHON = ROOT / "build" / "ray" / "bin" / "python"
STEPS = 40
TIMEOUT_S = 240


def version() -> str:
    """Raises :class:`NotHere`."""
    if not PYTHON.exists():
        raise NotHere("Ray is not installed: sh tests/launchers/install_ray.sh")
    command = [str(PYTHON), "-c", "import importlib.metadata as m; print(m.version('ray'))"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise NotHere("build/ray has no Ray: remove it, then sh tests/launchers/install_ray.sh")
    return done.stdout.strip()


@contextmanager
def _started(out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The example as a process; it and all that Ray has started are gone after the block."""
    sessions = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets need a short name
    env = worker_env(
        RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=str(sessions), RAY_TRAIN_ENABLE_CONTROLLER_LOGGING="0"
    )
    env["PYTHONPATH"] = f"{ROOT / 'src'}:{env['PYTHONPATH']}"
    command = [str(PYTHON), str(ROOT / "examples/ray_train.py"), "--out", str(out)]
    command += ["--steps", str(STEPS), "--step-seconds", "0.1"]
    out.mkdir(parents=True)
    with (out / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        _end(process, sessions)
        shutil.rmtree(sessions, ignore_errors=True)


def _end(process: subprocess.Popen[bytes], sessions: Path) -> None:
    """Ray's daemons lead sessions of their own: they are those that have its folder in their environment."""
    process.kill()
    process.wait()
    mark = f"RAY_TMPDIR={sessions}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def run_example(out: Path, kills: tuple[tuple[int, int], ...] = ()) -> int:
    """The example to its end. ``kills``: of each life the worker to kill, and from which step on. Returns its status."""
    log = out / "log"
    with _started(out) as process:
        for life, (rank, step) in enumerate(kills):
            until_step(
                out / "losses.jsonl", step, of_life=life, timeout_s=120, said=lambda: log.read_text()[-5000:]
            )
            os.kill(int((out / "pids" / str(rank)).read_text()), signal.SIGKILL)
        return process.wait(TIMEOUT_S)


def run(out: Path) -> list[Row]:
    """A run without a failure, and one in which worker 1, then worker 0, dies."""
    version()
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=out.resolve()))
    rows = []
    status = run_example(folder / "whole")
    whole = curve_of(folder / "whole" / "losses.jsonl")
    holds = status == 0 and len(whole.losses) == STEPS
    rows.append(Row("two workers, not stopped", f"{len(whole.losses)} steps, status {status}", holds))
    status = run_example(folder / "killed", ((1, 13), (0, 27)))
    found = curve_of(folder / "killed" / "losses.jsonl")
    bitwise = found.repeated_alike and found.losses == whole.losses
    figure = f"steps by life: {found.words}; status {status}; {len(found.losses)} losses bitwise: {bitwise}"
    holds = bitwise and status == 0 and [first for first, _ in found.lives] == [0, 10, 20]
    rows.append(Row("worker 1, then worker 0 killed with SIGKILL", figure, holds))
    return rows
