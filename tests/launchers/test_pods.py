"""The pods of examples/jobset.yaml without Kubernetes: their command as process 1 of PID namespaces, and ``SIGTERM`` to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.process import ROOT, worker_env

from .curves import Curve, curve_of, until_step
from .test_jobset import CONTAINER

pytestmark = pytest.mark.nightly

UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
STEPS = "40"


def _has_namespaces() -> bool:
    return (
        bool(shutil.which("unshare"))
        and not subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode
    )


def _start(out: Path, port: int) -> list[subprocess.Popen[bytes]]:
    """The containers, with the manifest's command, arguments and variables; the volume and the address are this machine's."""
    arguments = [str(out) if one == "/runs/a" else one for one in CONTAINER["args"]]
    program = [
        sys.executable,
        *CONTAINER["command"][1:],
        *arguments,
        "--steps",
        STEPS,
        "--step-seconds",
        "0.1",
    ]
    given = {one["name"]: one.get("value") for one in CONTAINER["env"]}
    pods = []
    for rank in range(int(given["WORLD_SIZE"])):
        env = worker_env() | {
            **given,
            "RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        env["PYTHONPATH"] = f"{ROOT / 'src'}:{env['PYTHONPATH']}"
        with (out.parent / f"{out.name}-{rank}.log").open("ab") as log:
            pods.append(subprocess.Popen([*UNSHARE, *program], cwd=ROOT, env=env, stdout=log, stderr=log))
    return pods


def _process_1(pod: subprocess.Popen[bytes]) -> int:
    """The number, outside of its namespace, of the process that is 1 within."""
    return int(Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()[0])


def _run(out: Path, *, stop_at: int | None) -> tuple[list[int], Curve]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pods = _start(out, port)
    try:
        if stop_at is not None:
            logs = [out.parent / f"{out.name}-{rank}.log" for rank in range(len(pods))]
            until_step(
                out / "losses.jsonl",
                stop_at,
                of_life=0,
                timeout_s=60,
                said=lambda: "\n".join(p.read_text() for p in logs),
            )
            for pod in pods:
                os.kill(_process_1(pod), signal.SIGTERM)
        statuses = [pod.wait(60) for pod in pods]
        return statuses, curve_of(out / "losses.jsonl")
    finally:
        for pod in pods:
            with contextlib.suppress(ProcessLookupError):
                pod.kill()
            pod.wait()


@pytest.mark.timeout(180)
@pytest.mark.skipif(not _has_namespaces(), reason="no user and PID namespaces here")
def test_process_1_saves_and_exits(tmp_path: Path) -> None:
    stopped, _ = _run(tmp_path / "a", stop_at=7)
    assert stopped == [75, 75]
    ended, found = _run(tmp_path / "a", stop_at=None)
    assert ended == [0, 0]
    assert len(found.lives) == 2
    assert found.lives[1][0] == found.lives[0][1], "no step is done twice"
    assert _run(tmp_path / "whole", stop_at=None)[1].losses == found.losses
