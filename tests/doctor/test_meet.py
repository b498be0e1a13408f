"""Ranks of a launch, in processes of their own: what they tell each other, who is odd, and who is missing. Bounded in time."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.test_conditions import other_clock
from tests.faults.mounts import CanNotMount, _leave_mounts, mount_tmpfs

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded:DeprecationWarning"
    ),  # Python 3.12, of a fork that starts another program
]
ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "shardwise", "doctor", "--json", "--ranks", "1")
LIMIT_S = 120
#: The rules that the tests below show.
NAMED = (
    "ranks.missing",
    "ranks.no-store",
    "ranks.versions",
    "ranks.limits",
    "ranks.clocks",
    "ranks.files",
    "ranks.not-shared",
)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def start(rank: int, world_size: int, port: int, *paths: Path, **options: Any) -> subprocess.Popen[str]:
    """A rank as if it were alone on its host."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world_size)}
    env |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    env["PYTHONPATH"] = os.pathsep.join(
        [*options.pop("before", ()), *env.get("PYTHONPATH", "").split(os.pathsep)]
    )
    env |= options.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*COMMAND, *map(str, paths)], env=env, **pipes, **options)


def finish(process: subprocess.Popen[str]) -> tuple[int, Any]:
    """Exit status and document, if it printed one."""
    out, err = process.communicate(timeout=LIMIT_S)
    assert "Traceback" not in err, err
    return process.returncode, json.loads(out) if out.strip() else None


def of_ranks(document: Any) -> dict[str, str]:
    return {f["rule"]: f["bites"] for f in document["findings"] if f["rule"].startswith("ranks.")}


def check_missing(document: Any, rank: int) -> None:
    """That rank is named, in time: counted from the end of the imports, which other work on the machine delays."""
    meeting = document["facts"]["meeting"]
    assert meeting["missing"] == [rank]
    assert meeting["waited_s"] < 27
    assert f"rank {rank} of {meeting['world_size']} didn't show up" in of_ranks(document)["ranks.missing"]


def other_accelerate(folder: Path) -> Path:
    """A place that comes first in the path, and says that another version is installed there."""
    info = folder / "accelerate-1.9.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.9.0\n")
    return folder


def hide(*folders: Path, file: str) -> Callable[[], None]:
    """Before the program starts: other file systems in place of these folders, with another file in the first."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
        with contextlib.suppress(CanNotMount):
            _leave_mounts()
            for folder in folders:
                mount_tmpfs(folder, "size=2g")
            (folders[0] / file).write_text("{}")

    return work


def can_mount() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            _leave_mounts()
        except CanNotMount:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_odd_one_out_and_the_missing_one_are_named(tmp_path: Path) -> None:
    """Rank 2 has another version, a lower limit, other files, and a directory of its own in place of the shared one; rank 3
    does not come."""
    model, run, port = tmp_path / "model", tmp_path / "run", free_port()
    for folder in (model, run):
        folder.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    odd = {
        "before": [str(other_accelerate(tmp_path / "site"))],
        "preexec_fn": hide(model, run, file="config.json"),
    }
    ranks = [start(r, 4, port, model, run, **(odd if r == 2 else {})) for r in range(3)]
    (status, document), *rest = [finish(one) for one in ranks]
    assert status == 1
    check_missing(document, 3)
    assert rest == [(0, None), (0, None)], "rank 0 alone speaks"
    said = of_ranks(document)
    host = socket.gethostname()
    assert f"accelerate is 1.9.0 on rank 2 ({host})" in said["ranks.versions"]
    assert f"RLIMIT_NOFILE is 512 on rank 2 ({host})" in said["ranks.limits"]
    if can_mount():
        assert said.keys() == {
            "ranks.missing",
            "ranks.versions",
            "ranks.limits",
            "ranks.files",
            "ranks.not-shared",
        }
        assert f"config.json has 2 bytes on rank 2 ({host})" in said["ranks.files"]
        assert "didn't see the file that rank" in said["ranks.not-shared"]
        places = [f["where"] for f in document["findings"] if f["rule"] == "storage.memory"]
        assert any(where.startswith(f"rank 2 ({host}): ") for where in places), "what only rank 2 has found"
    assert list(run.iterdir()) == []


#: Two hosts: namespaces of network, names and mounts, and a cable between them. Host 2 has a run directory of its own, another
#: limit, and another version.
_TWO_HOSTS = """
mount --make-rprivate / && mount -t tmpfs t /run && ip netns add two
ip link set lo up && ip link add eth0 type veth peer name eth0 netns two
ip addr add 10.1.0.1/24 dev eth0 && ip link set eth0 up
ip -n two link set lo up && ip -n two addr add 10.1.0.2/24 dev eth0 && ip -n two link set eth0 up
mount --bind "$1/hosts" /etc/hosts
echo made
launch="$2 -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-addr 10.1.0.1 --master-port 29500"
doctor="-m shardwise doctor --json $1/run"
ip netns exec two unshare -u -m sh -c "hostname node2 && ulimit -n 512 && mount -t tmpfs -o size=2g t $1/run &&
  PYTHONPATH=$1/site:$PYTHONPATH exec $launch --node-rank 1 $doctor" > "$1/two" 2>&1 &
unshare -u -m sh -c "hostname node1 && exec $launch --node-rank 0 $doctor" > "$1/one" 2> "$1/one.err"
wait
"""


@pytest.mark.nightly
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("ip") is None, reason="needs root, for namespaces, and ip"
)
def test_torchrun_on_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.1.0.1 node1\n10.1.0.2 node2\n")
    other_accelerate(tmp_path / "site")
    inside = ["unshare", "-n", "-m", "sh", "-ec", _TWO_HOSTS, "sh", str(tmp_path), sys.executable]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(inside, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if "made" not in done.stdout:
        pytest.skip(f"no namespaces with a pair of interfaces: {done.stderr}")
    document = json.loads((tmp_path / "one").read_text())
    hosts = [(one["rank"], one["host"]) for one in document["facts"]["meeting"]["ranks"]]
    assert hosts == [(0, "node1"), (1, "node2")]
    said = of_ranks(document)
    assert said.keys() == {"ranks.versions", "ranks.limits", "ranks.not-shared"}
    assert "accelerate is 1.9.0 on rank 1 (node2)" in said["ranks.versions"]
    assert "RLIMIT_NOFILE is 512 on rank 1 (node2)" in said["ranks.limits"]
    assert document["facts"]["machine"]["network"]["interface"] == "eth0"
    places = [f["where"] for f in document["findings"] if f["rule"] == "storage.memory"]
    assert any(where.startswith("rank 1 (node2): ") for where in places), "what only host 2 has found"


@pytest.mark.nightly
def test_a_clock_of_one_rank(tmp_path: Path) -> None:
    port = free_port()
    late = start(1, 2, port, env=other_clock(tmp_path, -60))
    _, document = finish(start(0, 2, port))
    finish(late)
    assert "is 60 s" in of_ranks(document)["ranks.clocks"]


@pytest.mark.nightly
def test_torchrun_with_healthy_ranks(tmp_path: Path) -> None:
    """The launcher hosts the store; two ranks of one host share a directory."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    done = subprocess.run(
        [*command, "-m", "shardwise", "doctor", "--json", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    document = json.loads(done.stdout)
    assert [one["rank"] for one in document["facts"]["meeting"]["ranks"]] == [0, 1], done.stderr
    assert of_ranks(document) == {}
    assert done.returncode == int(bool(document["findings"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_rank_0_is_missing() -> None:
    status, document = finish(start(1, 2, free_port()))
    assert status == 1
    check_missing(document, 0)


@pytest.mark.nightly
def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, document = finish(start(0, 2, taken.getsockname()[1]))
    assert status == 1
    assert "rank 0 can't listen for the other ranks" in of_ranks(document)["ranks.no-store"]


@pytest.mark.nightly
def test_a_rank_that_dies_meanwhile_is_named(tmp_path: Path) -> None:
    """It said that it is there, and was killed while it looked."""
    port = free_port()
    first = start(0, 2, port)
    late = [sys.executable, "-c", _DIES]
    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert subprocess.run(late, env=env, timeout=LIMIT_S, check=False).returncode == 9
    status, document = finish(first)
    assert status == 1
    check_missing(document, 1)


_DIES = """
import os
from shardwise.doctor.examine import assembly_of
assert assembly_of(os.environ).store is not None
os._exit(9)
"""
