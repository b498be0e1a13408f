"""Hosts as namespaces: each has its own network, process ids, host name, /tmp, /dev/shm and disk; one bridge joins them.

Linux. Root makes an ext4 image per host for its own disk (a file system, and so a page cache, of its own); without root
the hosts lie in a user namespace, and their disks are tmpfs. All hosts see `/srv/shared`, the one shared file system.
Nothing outside changes: bridge and mounts lie in namespaces that end with the processes in them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.harness.process import ROOT, worker_env

__all__ = ["DISK", "SHARED", "Host", "Hosts", "why_not"]

#: As every host sees them: the shared file system, and its own disk.
SHARED, DISK = Path("/srv/shared"), Path("/srv/disk")
_TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")
_DISK_MB = 256


def why_not() -> str | None:
    """Why this machine can't have hosts; None if it can."""
    if sys.platform != "linux":
        return "namespaces need Linux"
    if lost := [tool for tool in _TOOLS if shutil.which(tool, path=_path()) is None]:
        return f"not installed: {', '.join(lost)} (Debian: util-linux, iproute2, mount, hostname)"
    probe = [
        *_unshare(),
        "-nmup",
        "--fork",
        "sh",
        "-c",
        "ip link add name br9 type bridge && ip link add name veth9 type veth peer name peer9",
    ]
    done = subprocess.run(probe, env=_env(), capture_output=True, text=True, timeout=30, check=False)
    return None if done.returncode == 0 else f"no namespaces with a bridge here: {done.stderr.strip()[-200:]}"


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def _env(**extra: str) -> dict[str, str]:
    return worker_env(PATH=_path(), PYTHONPATH=os.pathsep.join((str(ROOT / "src"), str(ROOT)))) | extra


def _unshare() -> list[str]:
    return ["unshare"] if os.geteuid() == 0 else ["unshare", "--map-root-user"]


class Host:
    """One host of :class:`Hosts`. Its first process is a sleep: when that is killed, the kernel kills all others there."""

    def __init__(self, number: int, init: subprocess.Popen[bytes], env: Mapping[str, str]) -> None:
        self.number, self.name = number, f"host{number}"
        self.address = f"10.77.0.{number + 1}"
        self._init, self.env, self.python = init, dict(env), sys.executable

    @property
    def pid(self) -> int:
        """Of its first process, outside."""
        return int(Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()[0])

    @property
    def is_up(self) -> bool:
        """Whether it has not vanished."""
        return self._init.poll() is None

    def command(self, *words: str) -> list[str]:
        """The words as a command on this host."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        inside = [*user, "--net", "--mount", "--uts", "--ipc", "--pid"]
        return ["nsenter", "--target", str(self.pid), *inside, f"--wd={ROOT}", "--", *words]

    def start(self, *words: str, log: Path, **env: str) -> subprocess.Popen[bytes]:
        """Start a program on this host; its output is added to ``log``."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(*words),
                env=self.env | env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(self, *words: str, timeout_s: float = 60.0) -> str:
        """What a program on this host prints; AssertionError if it fails."""
        done = subprocess.run(
            self.command(*words), env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{self.name}: {words}: {done.stdout}{done.stderr}"
        return done.stdout

    def processes(self) -> list[int]:
        """All processes on this host, by their numbers outside; the first one first."""
        found = [self.pid]
        for pid in found:  # grows
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        namespace = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        for entry in Path("/proc").glob("[0-9]*"):  # entered from outside, or orphaned
            with contextlib.suppress(OSError):
                if (entry / "ns/pid").stat().st_ino == namespace and int(entry.name) not in found:
                    found.append(int(entry.name))
        return found

    def vanish(self) -> None:
        """The power fails: no process there runs on, and no packet goes out any more. Its disk stays as it is."""
        os.kill(self.pid, signal.SIGKILL)
        self._init.wait()

    def cut(self) -> None:
        """The network cable is pulled out; the processes go on."""
        self.run("ip", "link", "set", "eth0", "down")

    def freeze(self) -> None:
        """The processes stop, and no packet is answered."""
        self.cut()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def slow_down(self, cpu_share: float, mbit: float) -> str:
        """So much of a core for all processes there, and a link so slow. Returns what was done; needs root and cgroup 1."""
        self.run(
            "tc",
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            f"{mbit}mbit",
            "burst",
            "32kb",
            "latency",
            "400ms",
        )
        group = Path(f"/sys/fs/cgroup/cpu/shardwise-{os.getpid()}-{self.name}")
        done = [f"link {mbit:g} Mbit/s (tc tbf)"]
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text(str(max(1000, int(100_000 * cpu_share))))
            for pid in self.processes():
                with contextlib.suppress(OSError):
                    (group / "cgroup.procs").write_text(str(pid))
            self._group = group
            done.append(f"{cpu_share:.0%} of a core (cgroup cpu)")
        return ", ".join(done)

    def close(self) -> None:
        """End all its processes."""
        if self._init.poll() is None:
            with contextlib.suppress(OSError, IndexError):
                for pid in self.processes()[1:]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self.vanish()
        if group := getattr(self, "_group", None):
            with contextlib.suppress(OSError):
                group.rmdir()


class Hosts:
    """``count`` hosts over one folder. A context manager: they end with the block.

    ``folder / "shared"`` is what all see as :data:`SHARED`. ``folder / "disk-N.ext4"`` is the disk of host N; a host that
    has vanished can be started again (:meth:`restart`), with the disk that it had.
    """

    def __init__(self, count: int, folder: Path, *, env: Mapping[str, str] | None = None) -> None:
        self._count, self.folder = count, folder
        self.shared = folder / "shared"
        self._env = _env(GLOO_SOCKET_IFNAME="eth0", TP_SOCKET_IFNAME="eth0", **dict(env or {}))
        self._env["HOME"] = "/tmp"  # caches are a host's own, too
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        self.shared.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._world = self._start_world()
            stack.callback(self._end, self._world)
            self.hosts = [self._start(number) for number in range(self._count)]
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def close(self) -> None:
        """End all hosts."""
        for host in self.hosts:
            host.close()

    def restart(self, number: int) -> Host:
        """A host that has vanished, back with its disk and an empty /tmp."""
        self.hosts[number].close()
        self._world_run("sh", "-c", f"ip link del veth{number} 2>/dev/null; true")
        self.hosts[number] = self._start(number)
        return self.hosts[number]

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()

    def _start_world(self) -> subprocess.Popen[bytes]:
        """The namespaces of bridge and mounts, in which all hosts lie."""
        names = self.folder / "hosts"
        lines = [f"10.77.0.{number + 1} host{number}" for number in range(self._count)]
        names.write_text("\n".join(("127.0.0.1 localhost", *lines, "")))
        script = (
            "mount --make-rprivate / && mount -t tmpfs none /srv && mkdir /srv/shared /srv/disk"
            f' && mount --bind "{self.shared}" /srv/shared && ip link set lo up'
            f' && mount --bind "{names}" /etc/hosts'
            " && ip link add br0 type bridge && ip addr add 10.77.0.254/24 dev br0 && ip link set br0 up"
            " && echo ready && exec sleep infinity"
        )
        return _await_ready([*_unshare(), "--net", "--mount", "sh", "-c", script], self._env)

    def _world_run(self, *words: str) -> None:
        subprocess.run(self._in_world(*words), env=self._env, check=True, timeout=30)

    def _in_world(self, *words: str) -> list[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._world.pid), *user, "--net", "--mount", "--", *words]

    def _start(self, number: int) -> Host:
        image = self.folder / f"disk-{number}.ext4"
        disk = "mount -t tmpfs none /srv/disk"
        if os.geteuid() == 0 and shutil.which("mkfs.ext4", path=_path()):
            if not image.exists():
                with image.open("wb") as file:
                    file.truncate(_DISK_MB * 1024**2)
                subprocess.run(["mkfs.ext4", "-q", str(image)], env=self._env, check=True, timeout=60)
            disk = f'mount -o loop "{image}" /srv/disk'
        script = (
            f"mount --make-rprivate / && hostname host{number} && {disk} && mount -t proc proc /proc"
            " && mount -t tmpfs none /dev/shm"
            f' && cd "{ROOT}" && mount -t tmpfs none /tmp {_here_again(ROOT)}'
            " && ip link set lo up && until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done"
            f" && ip addr add 10.77.0.{number + 1}/24 dev eth0 && ip link set eth0 up"
            " && echo ready && exec sleep infinity"
        )
        # The pair is made outside; the host's end is handed to the process that made the host's network.
        inside = [
            "unshare",
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            script,
        ]
        process = subprocess.Popen(
            self._in_world(*inside), env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        host = Host(number, process, self._env)
        end = time.monotonic() + 10
        while not _has_child(process) and time.monotonic() < end:
            time.sleep(0.01)
        self._world_run(
            "sh",
            "-c",
            f"ip link add veth{number} type veth peer name peer{number}"
            f" && ip link set peer{number} netns {host.pid} name eth0"
            f" && ip link set veth{number} master br0 up",
        )
        _read_ready(process)
        return host


def _here_again(root: Path) -> str:
    """Shell: the directory that is current, at its own path again, if that was under the /tmp which a new one covers."""
    if not root.is_relative_to("/tmp"):
        return ""
    return f'&& mkdir -p "{root}" && mount --no-canonicalize --bind . "{root}"'


def _has_child(process: subprocess.Popen[bytes]) -> bool:
    return bool(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())


def _await_ready(command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    _read_ready(process)
    return process


def _read_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    if line.strip() != b"ready":
        process.kill()
        raise AssertionError(f"a host did not start: {line!r}, return code {process.wait()}")
    process.stdout.close()


def main() -> None:
    """Start two hosts and say what each sees; by hand."""
    with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder)) as hosts:
        for host in hosts.hosts:
            print(
                host.run(
                    "sh",
                    "-c",
                    "hostname; ip -br addr; ls /tmp /dev/shm; df /srv/disk /srv/shared; ps ax | wc -l",
                )
            )


if __name__ == "__main__":
    main()
