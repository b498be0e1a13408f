"""Processes forked from one that has imported torch and transformers: a rank starts in milliseconds, not in seconds.

A rank of a pool or a launch is a copy of such a server, in a session of its own, with its own environment. Two servers
with different hash seeds take turns, so that neighboring ranks disagree about the order of sets, as ranks of a launcher
do. The lanes of a test run share them. A test needs new interpreters if it depends on an import, or on a variable that a
library reads when it is imported; ``spawn(…, fresh=True)`` of :mod:`tests.harness.process` starts one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy

__all__ = ["FD", "ForkClient", "ForkServer", "Forked"]

#: Before the first fork: what takes seconds. Nothing of shardwise's integrations: ranks import them, as scripts do.
_PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.trainer",
    "peft",
    # Modules of tests import them, and the pool's ranks read their filters of warnings with pytest.
    "hypothesis",
    "pytest",
    "shardwise.api",
    "tests.harness.worker",
    "tests.harness.worker_once",
)
_NUMBER = struct.Struct("<i")
_MOST_BYTES = 128 * 1024  # of a request: the environment is most of it
_SOCKET, _OUTPUT = "socket", "output"  # in the directory of a server
FD = "FD"  # in argv: the number that the descriptor has in the new process


class Forked:
    """One forked process, as far as :class:`subprocess.Popen` says it: pid, poll, wait, send_signal, returncode."""

    def __init__(self, status: int, client: ForkClient) -> None:
        self._status = status
        self._client = client
        self._pid: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Waits until the server has forked it."""
        if self._pid is None:
            self._pid = self._read()
            if self._pid is None:
                raise RuntimeError(
                    f"the fork server ended before it made the process:\n{self._client.output()}"
                )
        return self._pid

    def poll(self) -> int | None:
        """The return code if the process has ended (negative: the signal), else None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The return code, once the process has ended; raises :class:`subprocess.TimeoutExpired`."""
        if self.returncode is None:
            pid = self.pid
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(pid), timeout or 0.0)
            code = self._read()
            # Without a code the server died, and the process with it.
            self.returncode = -signal.SIGKILL if code is None else code
            os.close(self._status)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def _read(self) -> int | None:
        data = os.read(self._status, _NUMBER.size)
        return _NUMBER.unpack(data)[0] if len(data) == _NUMBER.size else None


class ForkServer:
    """One server process. It ends, and its children after it, when the process that made this does.

    Every process that knows :attr:`directory` may ask it for children, through a :class:`ForkClient`.
    """

    def __init__(self, env: Mapping[str, str], cwd: Path) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fork-server-"))
        alive, self._alive = os.pipe()
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
            (self.directory / _OUTPUT).open("wb") as output,
        ):
            listener.bind(str(self.directory / _SOCKET))
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.fork_server", str(listener.fileno()), str(alive)],
                cwd=cwd,
                # A thread of pyarrow's would be missing in the copies; datasets, of which the Trainer is one user, imports it.
                env=dict(env) | {"JE_ARROW_MALLOC_CONF": "background_thread:false"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(), alive),
                start_new_session=True,
            )
        os.close(alive)
        atexit.register(self.close)

    def close(self) -> None:
        """End the server; its children see that and end, too."""
        os.close(self._alive)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class ForkClient:
    """A connection to the :class:`ForkServer` of a directory. What it has forked ends when the connection does."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(str(directory / _SOCKET))
        atexit.register(self._socket.close)

    def spawn(
        self, module: str, argv: Iterable[str], *, log: Path, env: Mapping[str, str], fds: Iterable[int] = ()
    ) -> Forked:
        """Fork a process that calls ``module.main(*argv)``, its output appended to ``log``.

        An argument :data:`FD` becomes the number that the next of ``fds`` has there.
        """
        log.touch()
        request = {"module": module, "argv": list(argv), "log": str(log), "env": dict(env)}
        ours, theirs = os.pipe()
        socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs, *fds])
        os.close(theirs)
        return Forked(ours, self)

    def output(self) -> str:
        """The server's own output: warnings of imports, and why it ended."""
        return (self._directory / _OUTPUT).read_text(errors="replace")


@dataclass(frozen=True, slots=True)
class _Child:
    client: socket.socket
    status: int
    """The pipe that takes its number and its return code."""


def _serve(listener: socket.socket, alive: int) -> tuple[dict[str, object], list[int]] | None:
    """Fork a child for each request and report how it ended. Returns in the server (None) and in each child."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    clients: list[socket.socket] = []
    running: dict[int, _Child] = {}
    while True:
        ready, _, _ = select.select([alive, listener, woken, *clients], [], [])
        if alive in ready:
            return None
        if woken in ready:
            os.read(woken, 1024)
            _report_ends(running)
        if listener in ready:
            clients.append(listener.accept()[0])
        for client in [c for c in clients if c in ready]:
            data, fds, *_ = socket.recv_fds(client, _MOST_BYTES, 8)
            if not data:
                clients.remove(client)
                client.close()
                _kill(pid for pid, child in running.items() if child.client is client)
                continue
            status, *fds = fds
            if pid := os.fork():
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, _NUMBER.pack(pid))
                running[pid] = _Child(client, status)
                for fd in fds:
                    os.close(fd)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (status, woken, wake, alive, *(child.status for child in running.values())):
                os.close(fd)
            for each in (listener, *clients):
                each.close()
            return json.loads(data), fds


def _kill(leaders: Iterable[int]) -> None:
    """Kill these children, which are not reaped yet, and what they have started."""
    for pid in leaders:
        for kill in (os.kill, os.killpg):  # it may not lead a group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)


def _report_ends(running: dict[int, _Child]) -> None:
    """Report the children that have ended, and kill what they have started and left behind."""
    while running:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        pid = ended.si_pid
        _kill([pid])
        _, status = os.waitpid(pid, 0)
        pipe = running.pop(pid).status
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(pipe)


def _become(request: dict[str, object], fds: list[int]) -> None:
    """In the child: take the session, streams, environment and seeds of a new process, then call the module's ``main``."""
    os.setsid()
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, str(request["log"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(request["env"])  # type: ignore[call-overload]
    random.seed()
    numpy.random.seed()
    numbers = iter(fds)
    argv = [str(next(numbers)) if word == FD else word for word in request["argv"]]  # type: ignore[attr-defined]
    sys.argv = [str(request["module"]), *argv]
    importlib.import_module(str(request["module"])).main(*argv)


def main(listening: str, alive: str) -> None:
    listener = socket.socket(fileno=int(listening))
    listener.set_inheritable(False)
    os.set_inheritable(int(alive), False)
    gc.disable()
    for module in _PRELOADED:
        importlib.import_module(module)
    # transformers' table of all conversions is made at its first use.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    gc.collect()
    gc.freeze()  # ranks collect what they make, not what all of them share
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads after the imports: a fork would copy only one of them")
    made = _serve(listener, int(alive))
    if made is not None:
        _become(*made)


if __name__ == "__main__":
    main(*sys.argv[1:])
