"""A SLURM of its own on this machine: munged, a controller, two nodes. Nothing outside of its folder is touched.

``sh tests/harness/slurm.sh`` installs Debian's packages into ``build/slurm``. The daemons run as this user, who is
the cluster's administrator, too.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.harness.process import ROOT, worker_env

__all__ = ["Cluster", "NotInstalled", "cluster", "slurm_version"]

_INSTALLED = ROOT / "build" / "slurm"
_START_S = 30.0
_DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd")
#: cred_expire: a requeued job waits so long, two minutes otherwise; nodes refuse one that starts earlier. KillWait: from SIGTERM to SIGKILL where there is no GraceTime.
_CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
SlurmUser={user}
SlurmdUser={user}
{plugins}
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=15
PropagateResourceLimits=NONE
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=1 RealMemory=1000
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=grace Nodes=n[1-2] PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF
"""


class NotInstalled(Exception):
    """SLURM is not on this machine; the text says how to install it."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running one, by its command line."""

    folder: Path
    env: dict[str, str]

    def run(self, *command: str, timeout_s: float = 60.0) -> str:
        """What one of SLURM's commands prints. Raises :class:`RuntimeError` with all it said if it fails."""
        program = shutil.which(command[0], path=self.env["PATH"])
        assert program is not None, command
        done = subprocess.run(
            [program, *command[1:]],
            env=self.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command}: status {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, *arguments: str) -> str:
        """The number of a new job."""
        return self.run("sbatch", "--parsable", *arguments).strip()

    def fields(self, job: str) -> dict[str, str]:
        """What the controller knows of a job: ``JobState``, ``Restarts``, ``ExitCode``… A job that requeues itself is FAILED for a
        moment, which does not count."""
        for last in (False, True):
            found = dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))
            if found["JobState"] != "FAILED" or last:
                break
            time.sleep(3)
        return found

    def wait(self, job: str, *states: str, timeout_s: float = 120.0) -> dict[str, str]:
        """The job's fields when it has come to one of these states. Raises :class:`TimeoutError` with what the daemons said."""
        end = time.monotonic() + timeout_s
        while (found := self.fields(job))["JobState"] not in states:
            if time.monotonic() > end:
                raise TimeoutError(f"job {job} is {found}; expected {states}\n{self.said()}")
            time.sleep(0.1)
        return found

    def until_requeued(self, job: str, timeout_s: float = 120.0) -> None:
        """Wait until a job is requeued for the first time. Raises :class:`RuntimeError` if it ends instead."""
        end = time.monotonic() + timeout_s
        while (found := self.fields(job))["Restarts"] == "0":
            if found["JobState"] in ("FAILED", "COMPLETED", "CANCELLED") or time.monotonic() > end:
                raise RuntimeError(f"job {job} is not requeued: {found}\n{self.said()}")
            time.sleep(0.1)

    def said(self) -> str:
        """The last lines of each daemon."""
        return "\n".join(f"{log.name}:\n{log.read_text()[-1500:]}" for log in self.folder.glob("*.log"))


def _installed() -> tuple[dict[str, str], str]:
    """The environment of SLURM's programs, and the line of slurm.conf that says where the plugins are."""
    prefix = _INSTALLED / "usr"
    if (prefix / "sbin").exists():
        libraries = next((prefix / "lib").glob("*-linux-gnu"))
        plugins = libraries / "slurm-wlm"
        path = f"{prefix}/bin:{prefix}/sbin:{os.environ['PATH']}"
        return {"PATH": path, "LD_LIBRARY_PATH": f"{libraries}:{plugins}"}, f"PluginDir={plugins}"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if all(shutil.which(name, path=path) for name in (*_DAEMONS, "sbatch")):
        return {"PATH": path}, ""
    raise NotInstalled("SLURM is not installed: sh tests/harness/slurm.sh")


def _program(name: str, env: dict[str, str]) -> str:
    """A daemon's path; Debian's have a suffix before its alternatives are set."""
    found = shutil.which(name, path=env["PATH"]) or shutil.which(f"{name}-wlm", path=env["PATH"])
    if found is None:
        raise NotInstalled(f"SLURM's {name} is missing: remove build/slurm, then sh tests/harness/slurm.sh")
    return found


def slurm_version() -> str:
    """Raises :class:`NotInstalled`."""
    env, _ = _installed()
    command = [_program("slurmctld", env), "-V"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()[-1]


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster whose logs and spool lie in ``folder``. All jobs and daemons have ended after the block."""
    programs, plugins = _installed()
    daemons = {name: _program(name, programs) for name in _DAEMONS}
    controller, first, second = _free_ports(3)
    conf = folder / "slurm.conf"
    user = pwd.getpwuid(os.getuid()).pw_name
    conf.write_text(
        _CONF.format(
            folder=folder, plugins=plugins, user=user, controller=controller, first=first, second=second
        )
    )
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    env = worker_env(**programs, SLURM_CONF=str(conf))
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["PYTHONPATH"] = f"{ROOT / 'src'}:{env['PYTHONPATH']}"
    with ExitStack() as running:
        _start(running, "munged", [daemons["munged"], *_munge(folder)], folder, env)
        _until((folder / "munge.socket").exists, folder)
        _start(running, "slurmctld", [daemons["slurmctld"], "-D"], folder, env)
        for node in ("n1", "n2"):
            command = [daemons["slurmd"], "-D", "-N", node, "-d", daemons["slurmstepd"]]
            _start(running, f"slurmd-{node}", command, folder, env)
        found = Cluster(folder, env)
        running.callback(_end_jobs, found)
        _until(lambda: found.run("sinfo", "-h", "-o", "%T %D", "-p", "low").strip() == "idle 2", folder)
        yield found


def _munge(folder: Path) -> list[str]:
    files = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "seed-file": "munge.seed",
    }
    return ["--foreground", "--force", *(f"--{name}={folder / file}" for name, file in files.items())]


def _end_jobs(found: Cluster) -> None:
    """Cancel every job and wait for its processes, before the daemons end."""
    with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
        for job in found.run("squeue", "-h", "-o", "%i").split():
            found.run("scancel", "--full", "--signal=KILL", job)
            found.run("scancel", job)
        end = time.monotonic() + _START_S
        while found.run("squeue", "-h").strip() and time.monotonic() < end:
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _start(running: ExitStack, name: str, command: list[str], folder: Path, env: dict[str, str]) -> None:
    """A daemon that ends with the block; what it says goes to a file of the folder."""
    log = running.enter_context((folder / f"{name}.log").open("wb"))
    process = subprocess.Popen(
        command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    running.callback(end)


def _until(ready: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(RuntimeError):
            if ready():
                return
        if time.monotonic() > end:
            said = "\n".join(f"{log.name}:\n{log.read_text()[-1500:]}" for log in folder.glob("*.log"))
            raise RuntimeError(f"SLURM did not start:\n{said}")
        time.sleep(0.1)
