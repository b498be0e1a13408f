"""Work in forked processes, which may hang or crash."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["in_children"]


def in_children(count: int, work: Path, timeout_s: float, function: Callable[[int], Any]) -> list[Any]:
    """``function(rank)`` in forked processes. A result that is a str tells how the process failed."""
    work.mkdir(parents=True, exist_ok=True)
    children = {}
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            _child(work, rank, function)
        children[pid] = rank
    ended: dict[int, str] = {}
    deadline, late = time.monotonic() + timeout_s, f"no end after {timeout_s:g} s"
    while len(ended) < count:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            code = os.waitstatus_to_exitcode(status)
            ended[children[pid]] = f"ended with status {code}"
            if code and time.monotonic() + 15 < deadline:  # the others may wait for it for long
                deadline, late = time.monotonic() + 15, f"killed, 15 s after rank {children[pid]} had failed"
        elif time.monotonic() > deadline:
            for pid, rank in children.items():
                if rank not in ended:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    ended[rank] = late
        else:
            time.sleep(0.01)
    return [_result_of(work, rank, ended[rank]) for rank in range(count)]


def _result_of(work: Path, rank: int, otherwise: str) -> Any:
    try:
        return pickle.loads((work / f"result-{rank}").read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        log = (work / f"log-{rank}").read_text(errors="replace").strip().splitlines()
        errors = [line for line in log if "Error" in line and not line.startswith((" ", "frame"))]
        return f"{otherwise}; last output: {' | '.join(errors[-1:] + log[-2:])[-500:]}"


def _child(work: Path, rank: int, function: Callable[[int], Any]) -> None:
    """Runs the function, writes its result, and never returns."""
    code = 1
    try:
        log = os.open(work / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        result = pickle.dumps(function(rank))
        (work / f"result-{rank}").write_bytes(result)
        code = 0
    except BaseException:  # this process ends here, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
