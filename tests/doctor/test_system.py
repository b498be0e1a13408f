"""Pathologies in limits, variables, file systems and system calls, in processes of their own."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from shardwise.doctor.facts import Finding
from tests.doctor.real import WHERE, check, found
from tests.faults.mounts import NEW_NAMES, CanNotMount, mount, mount_tmpfs, unshare, with_own_mounts

#: Python 3.12 says so of every fork where a library has threads; these forks use none of them.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

# ----------------------------------------------------------------------------------------------------
# Limits, variables and file systems, in a process of their own


def forked(
    *paths: Path,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    limits: Mapping[int, int] | None = None,
    before: Callable[[], object] = lambda: None,
) -> list[Finding]:
    """What is found in a fork with these variables and limits, after ``before``."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.environ.update(env or {})
            os.closerange(
                3, write
            )  # of the other tests of this process, which may hold more than a limit allows
            os.closerange(write + 1, 4096)
            for limit, soft in (limits or {}).items():
                resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))
            before()
            said = json.dumps([asdict(f) for f in found(*paths, ranks=ranks)]).encode()
            os.write(write, said)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return [Finding(**one) for one in json.loads(said)]


LIMITS = {
    "machine.open-files": ({resource.RLIMIT_NOFILE: 200}, "it's only 200"),
    "machine.file-size": ({resource.RLIMIT_FSIZE: 1024**3}, "larger than 1.0 GiB"),
}


@pytest.mark.parametrize("rule", LIMITS)
def test_a_limit(rule: str, here: set[str]) -> None:
    limits, words = LIMITS[rule]
    check(forked(limits=limits), here, rule, words=words)


def test_a_file_limit_that_the_probe_meets(tmp_path: Path, here: set[str]) -> None:
    findings = forked(tmp_path, limits={resource.RLIMIT_FSIZE: 4096})
    check(findings, here, "machine.file-size", "storage.not-writable", words="File too large")
    assert list(tmp_path.iterdir()) == []


VARIABLES: dict[str, tuple[dict[str, str], str]] = {
    "launch.incomplete": ({"RANK": "0", "WORLD_SIZE": "8"}, "MASTER_ADDR, MASTER_PORT are not"),
    "launch.numbers": ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=4"),
    "launch.master-loopback": (
        {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        },
        "MASTER_ADDR=localhost",
    ),
    "launch.port": ({"MASTER_PORT": "port"}, "is not a port"),
    "launch.slurm-world": ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "WORLD_SIZE": "4"}, "srun started 8"),
    "launch.torchrun-per-task": (
        {"SLURM_NTASKS_PER_NODE": "4", "TORCHELASTIC_RUN_ID": "x"},
        "torchrun 4 times",
    ),
    "launch.mpi-world": ({"OMPI_COMM_WORLD_SIZE": "8", "WORLD_SIZE": "1"}, "mpirun started 8"),
    "launch.devices": ({"CUDA_VISIBLE_DEVICES": "0", "LOCAL_WORLD_SIZE": "2"}, "1 are visible for 2 ranks"),
    "launch.ram-efficient-off": ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "True"}, "Every rank loads the full"),
    "launch.fsdp1": ({"ACCELERATE_USE_FSDP": "true"}, "FSDP1"),
    "launch.no-watchdog": ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "wait forever"),
    "machine.threads": ({"OMP_NUM_THREADS": "4096"}, "4096 threads"),
    "network.interface": ({"GLOO_SOCKET_IFNAME": "eth99"}, "no interface eth99"),
    "network.gloo-pattern": ({"GLOO_SOCKET_IFNAME": "^lo"}, "called '^lo'"),
}


@pytest.mark.parametrize("rule", VARIABLES)
def test_variables(rule: str, here: set[str]) -> None:
    env, words = VARIABLES[rule]
    beside = {"launch.incomplete", "machine.cores", "network.loopback", "network.hostname"} | (
        {"machine.threads"} if "SLURM_PROCID" in env else set()
    )
    check(forked(env=env, ranks=2), (here | beside) - {rule}, rule, words=words)


def test_processes_that_do_not_fit(here: set[str]) -> None:
    findings = forked(ranks=16_384)
    assert {"machine.memory", "machine.cores"} <= {f.rule for f in findings}


def _in_tmpfs(folder: Path, options: str, fill: int = 0) -> list[dict[str, str]]:
    mount_tmpfs(folder, options)
    for k in range(fill):
        (folder / f"file-{k}").touch()
    return [asdict(f) for f in found(folder)]


FILE_SYSTEMS = {
    "size=16m": ({"storage.memory", "storage.space"}, "is free"),
    "size=2g,nr_inodes=60": ({"storage.memory", "storage.inodes"}, "inodes are left"),
    "size=2g,ro": ({"storage.memory", "storage.not-writable"}, "Read-only file system"),
}


@pytest.mark.parametrize("options", FILE_SYSTEMS)
def test_a_file_system(options: str, tmp_path: Path, here: set[str]) -> None:
    """Real ones, in a mount namespace."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    rules, words = FILE_SYSTEMS[options]
    try:
        said = with_own_mounts(lambda: _in_tmpfs(folder, options), tmp_path / "result")
    except CanNotMount as error:
        pytest.skip(str(error))
    check([Finding(**one) for one in said], here - WHERE, *rules, words=words)


def _small_shm(folder: Path) -> list[Finding]:
    mount_tmpfs(Path("/dev/shm"), "size=64m")
    return found()


def _container_layer(folder: Path) -> list[Finding]:
    parts = [folder / name for name in ("lower", "upper", "work", "merged")]
    for part in parts:
        part.mkdir()
    lower, upper, work, merged = parts
    mount("overlay", merged, f"lowerdir={lower},upperdir={upper},workdir={work}")
    return found(merged)


def _named(host: str) -> list[Finding]:
    """This host under another name, as one of two."""
    unshare(NEW_NAMES)
    socket.sethostname(host)
    os.environ.update(
        RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="node1", MASTER_PORT="29500"
    )
    return found()


NAMESPACES: dict[str, tuple[Callable[[Path], list[Finding]], str]] = {
    "machine.shm": (_small_shm, "/dev/shm has only 64.0 MiB"),
    "storage.overlay": (_container_layer, "lost with the container"),
    "network.loopback": (lambda folder: _named("localhost"), "its name resolves to 127.0.0.1"),
    "network.hostname": (lambda folder: _named("no-such-host.invalid"), "can't be resolved"),
}


@pytest.mark.parametrize("rule", NAMESPACES)
def test_a_namespace(rule: str, tmp_path: Path, here: set[str]) -> None:
    work, words = NAMESPACES[rule]
    try:
        said = with_own_mounts(lambda: [asdict(f) for f in work(tmp_path)], tmp_path / "result")
    except CanNotMount as error:
        pytest.skip(str(error))
    check([Finding(**one) for one in said], here - WHERE, rule, words=words)


INJECTED = {
    "storage.fsync": ("fsync:error=EIO", "Input/output error"),
    "storage.no-rename": ("rename,renameat,renameat2:error=EXDEV", "Invalid cross-device link"),
    "storage.unresponsive": ("statfs:delay_enter=18000000", "didn't respond within 10 s"),
    "storage.slow-fsync": ("fsync:delay_enter=1500000", "one fsync of 4 KiB took 1.5 s"),
    "storage.slow-write": ("pwrite64:delay_enter=400000", "one process wrote"),
    "storage.slow-read": ("pread64:delay_enter=400000", "one process read"),
}


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("rule", INJECTED)
def test_system_calls_that_fail_or_wait(rule: str, tmp_path: Path, here: set[str]) -> None:
    """strace injects below Python."""
    what, words = INJECTED[rule]
    calls = what.partition(":")[0]
    (tmp_path / "run").mkdir()
    one_path = ("-P", str(tmp_path / "run")) if rule == "storage.unresponsive" else ("--seccomp-bpf",)
    command = [
        *("strace", "-f", "-qq", *one_path, "-o", str(tmp_path / "trace"), "-e", f"trace={calls}"),
        *("-e", f"inject={what}", sys.executable, "-m", "shardwise", "doctor", str(tmp_path / "run")),
        *("--ranks", "1", "--json"),
    ]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1, done.stderr
    findings = [Finding(**one) for one in json.loads(done.stdout)["findings"]]
    check(findings, here, rule, words=words)
    assert list((tmp_path / "run").iterdir()) == []
    # strace ends only when the call that it holds has gone on
    assert time.monotonic() - began < (60 if rule == "storage.unresponsive" else 30)
