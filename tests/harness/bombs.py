"""Small inputs that ask for much: work that must be refused in little time and memory, each in a fork of its own."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.errors import ShardwiseError

__all__ = ["Outcome", "refused_within", "run_apart"]

#: When a fork that computes, or sleeps, is killed; processors are shared with other tests.
_WALL_FACTOR, _WALL_MORE_S = 10, 20
_MIB = 1024**2
#: Work that is slow is slow each time; a processor that is shared with other machines makes some runs slower.
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """How work in a fork ended: ``kind`` is "done", the class of what it raised, or "killed"."""

    kind: str
    text: str
    is_ours: bool
    """Whether what it raised is a ShardwiseError."""
    seconds: float
    """Of processor time."""
    mbytes: float
    """By which its resident memory grew at most."""


def run_apart(work: Callable[[], object], seconds: float = 1, mbytes: float = 200) -> Outcome:
    """Run ``work`` in a fork, which is ended when it takes far more than the limits. What it changes is lost.

    The outcome of the quickest of three runs, where the first takes longer than ``seconds``. The fork shares what this process imported, so that a run costs milliseconds. Memory is counted from the fork on.
    """
    best = _run_once(work, seconds, mbytes)
    for _ in range(_ATTEMPTS - 1):
        if best.kind != "killed" and best.seconds <= seconds:
            break
        again = _run_once(work, seconds, mbytes)
        best = min(best, again, key=lambda outcome: (outcome.kind == "killed", outcome.seconds))
    return best


def _run_once(work: Callable[[], object], seconds: float, mbytes: float) -> Outcome:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            _report(work, writer, seconds, mbytes)
        finally:
            os._exit(0)
    os.close(writer)
    try:
        text = _read_all(reader, time.monotonic() + seconds * _WALL_FACTOR + _WALL_MORE_S)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, _, used = os.wait4(child, 0)
    if not text:
        return Outcome("killed", "", False, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
    return Outcome(**json.loads(text))


def refused_within(work: Callable[[], object], seconds: float = 1, mbytes: float = 200) -> str:
    """The text with which ``work`` was refused. Fails unless it raised a :class:`ShardwiseError` within the limits.

    ``seconds`` are of processor time, ``mbytes`` of resident memory beyond what the process has now.
    """
    outcome = run_apart(work, seconds, mbytes)
    assert outcome.is_ours, f"not refused, but {outcome}"
    assert outcome.seconds <= seconds, outcome
    assert outcome.mbytes <= mbytes, outcome
    return outcome.text


def _report(work: Callable[[], object], writer: int, seconds: float, mbytes: float) -> None:
    signal.alarm(0)
    gc.freeze()  # else collections go through all that the parent holds, which takes time and copies its pages
    limit = _status("VmSize") + int(4 * mbytes + 1024) * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before, started = _status("VmRSS"), time.process_time()
    kind, text, is_ours = "done", "", False
    try:
        work()
    except BaseException as error:  # the outcome is the subject
        kind, text, is_ours = type(error).__name__, str(error)[:20_000], isinstance(error, ShardwiseError)
    outcome = {
        "kind": kind,
        "text": text,
        "is_ours": is_ours,
        "seconds": time.process_time() - started,
        "mbytes": max(0, _status("VmHWM") - before) / _MIB,
    }
    os.write(writer, json.dumps(outcome).encode())


def _status(name: str) -> int:
    with open("/proc/self/status") as stream:
        line = next(line for line in stream if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _read_all(reader: int, deadline: float) -> str:
    found = b""
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(reader, 65536) if ready else b""
        if not piece:
            return found.decode()
        found += piece
