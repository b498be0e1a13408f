"""What the pool and the launcher share: naming a function, a worker's environment, signals and files."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.harness.fork_server import FD, ForkClient, Forked, ForkServer

__all__ = [
    "ROOT",
    "Process",
    "dump_stacks",
    "exit_with_parent",
    "install_stack_dump",
    "kill_all",
    "resolve",
    "spawn",
    "start_fork_servers",
    "target_of",
    "use_fork_servers",
    "warnings_as_in_pytest",
    "worker_env",
]

#: The repository root: the working directory of every worker, so that ``tests`` can be imported.
ROOT = Path(__file__).resolve().parents[2]

_STACK_SIGNAL = signal.SIGUSR1
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "MASTER_", "PYTEST_")
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def target_of(fn: Callable[..., Any]) -> str:
    """``module:qualname`` of a function that a worker can import."""
    if fn.__module__ == "__main__" or "<" in fn.__qualname__:
        raise ValueError(f"{fn.__qualname__} must be a module-level function of an importable module")
    return f"{fn.__module__}:{fn.__qualname__}"


def resolve(target: str) -> Callable[..., Any]:
    """The function that :func:`target_of` named; of a test under ``@on_ranks``, its body."""
    module, _, qualname = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return getattr(found, "on_rank", found)


def worker_env(**extra: str) -> dict[str, str]:
    """This process's environment for a worker: one thread, no network, no launcher's variables."""
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in _LAUNCHER_NAMES and not key.startswith(_LAUNCHER_PREFIXES)
    }
    env |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH")))),
    }
    if sys.platform == "linux":
        # gloo otherwise looks up the host's own name, which sandboxes often can't resolve.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env | extra


Process = subprocess.Popen[bytes] | Forked

_clients: list[ForkClient] = []
_turn = itertools.count()


def start_fork_servers() -> list[str]:
    """Start the two fork servers, which end with this process, or ``FORK_SERVERS`` of them. Returns their directories."""
    seeds = ("1", "2")[: int(os.environ.get("FORK_SERVERS", 2))]
    servers = [ForkServer(worker_env(PYTHONHASHSEED=seed), ROOT) for seed in seeds]
    return [str(server.directory) for server in servers]


def use_fork_servers(directories: Iterable[str]) -> None:
    """Have this process's workers forked by these servers from now on."""
    _clients[:] = [ForkClient(Path(directory)) for directory in directories]


def spawn(
    module: str,
    *argv: str,
    log: Path,
    env: dict[str, str],
    fds: Iterable[int] = (),
    fresh: bool = False,
) -> Process:
    """Start a process that calls ``module.main(*argv)``, in a session of its own, its output appended to ``log``.

    It is a copy of one that has imported torch and transformers; with ``fresh``, a new interpreter. An argument
    :data:`FD` becomes the number that the next of ``fds`` has in the new process.
    """
    if fresh:
        numbers = iter(fds := tuple(fds))
        words = [str(next(numbers)) if word == FD else word for word in argv]
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,
            )
    if not _clients:
        use_fork_servers(start_fork_servers())
    return _clients[next(_turn) % len(_clients)].spawn(module, argv, log=log, env=env, fds=fds)


def install_stack_dump() -> None:
    """In a worker: write all threads' stacks to stderr on crash and when the parent asks for them."""
    faulthandler.enable()
    faulthandler.register(_STACK_SIGNAL, all_threads=True)


def exit_with_parent() -> None:
    """In a worker: end this process soon after its parent is gone, whatever it is busy with."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


@contextlib.contextmanager
def warnings_as_in_pytest() -> Iterator[None]:
    """In a worker: the project's ``filterwarnings``, which pytest applies in its own process only."""
    with warnings.catch_warnings():
        for parsed in _warning_filters():
            warnings.filterwarnings(*parsed)
        yield


@functools.cache
def _warning_filters() -> list[tuple[Any, ...]]:
    from _pytest.config import parse_warning_filter

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = project["tool"]["pytest"]["ini_options"]["filterwarnings"]
    return [parse_warning_filter(line, escape=False) for line in lines]


def dump_stacks(processes: Iterable[Process], settle_s: float = 0.5) -> None:
    """Have each living process write its stacks to its log. A stopped process is woken for it."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(_STACK_SIGNAL)
                process.send_signal(signal.SIGCONT)
    time.sleep(settle_s)


def kill_all(processes: Iterable[Process]) -> None:
    """Kill the processes, and whatever they started, and reap them."""
    processes = list(processes)
    for process in processes:
        if isinstance(process, Forked) and process.poll() is not None:
            continue  # its server ended its group; the number may be another process's by now
        # A worker leads its own process group, so this also reaches children that outlived it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
