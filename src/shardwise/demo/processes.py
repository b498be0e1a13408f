"""Child processes of the demo: torchrun with its ranks, and the reader."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import ShardwiseError
from . import embed

__all__ = ["read_model", "torchrun"]

_SILENCE_S = 600.0
_STOP_S = 15.0
_TAIL_CHARS = 1_500


def torchrun(world_size: int, arguments: Sequence[str], *, log: Path, console: Console) -> int:
    """Run ``world_size`` training workers to their end and show their output. Returns torchrun's exit status.

    Appends standard error to ``log``. Raises :class:`ShardwiseError` after ten minutes without output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(world_size), "-m", "shardwise.demo.train", *arguments]
    with log.open("ab") as errors, _started(command, _environment(world_size), errors) as process:
        for line in _lines(process, log):
            console.print(f"    {line}", markup=False, highlight=False)
        return process.wait()


def read_model(directory: Path, pairs: Path) -> dict[str, Any]:
    """The measurements of a process with plain transformers on a model directory. Raises :class:`ShardwiseError`."""
    # By path and with -P: run as a module, or with its folder on sys.path, it would see shardwise.
    command = [sys.executable, "-P", embed.__file__, str(directory), str(pairs)]
    done = subprocess.run(command, env=_environment(1), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ShardwiseError(f"plain transformers can't read {directory}:\n{done.stderr[-_TAIL_CHARS:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextlib.contextmanager
def _started(command: Sequence[str], env: dict[str, str], errors: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with its output in a pipe. Leaving the block early ends it and its children."""
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches only this process, which then ends torchrun's ranks in order
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _lines(process: subprocess.Popen[str], log: Path) -> Iterator[str]:
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def pump() -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # the pipe was closed when the block was left
            for line in process.stdout:
                found.put(line.rstrip())
        found.put(None)

    threading.Thread(target=pump, name="demo-output", daemon=True).start()
    while True:
        try:
            line = found.get(timeout=_SILENCE_S)
        except queue.Empty:
            raise ShardwiseError(f"the ranks have printed nothing for {_SILENCE_S:g} s; see {log}") from None
        if line is None:
            return
        yield line


def _environment(world_size: int) -> dict[str, str]:
    """This process's environment for a child: a fair share of the cores, local files only."""
    launcher = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    env = {k: v for k, v in os.environ.items() if k not in launcher and not k.startswith("TORCHELASTIC_")}
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # some hosts can't resolve their own name
    return env | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
