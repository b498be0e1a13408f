"""The process on each host that forks ranks: it has imported torch, shardwise and its arguments, so a rank starts in milliseconds.

Reads lines of JSON from stdin, `{"folder", "rank", "env"}`, each a rank to start; and writes what the rank's exit status was
into `folder/status-RANK`, after `folder/pid-RANK`. Ends when stdin does.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
from pathlib import Path

import shardwise as sw
from tests.harness.worker_once import main as answer

_POLL_S = 0.02


def _fork(order: dict[str, object]) -> int:
    folder, rank = Path(str(order["folder"])), order["rank"]
    if pid := os.fork():
        _write(folder / f"pid-{rank}", pid)
        return pid
    os.setsid()
    with (folder / f"rank{rank}.log").open("ab", buffering=0) as log, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(order["env"])  # type: ignore[call-overload]
    answer(str(folder / "call"), str(folder / f"result-{rank}"))


def _write(path: Path, number: int) -> None:
    """Whole or not at all: the parent polls for it."""
    new = path.with_suffix(".new")
    new.write_text(str(number))
    new.rename(path)


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    _ = (sw.load, sw.Checkpointer, sw.restore, sw.export_hf, sw.verify)  # imported on their first use
    print("ready", flush=True)
    running: dict[int, tuple[Path, object]] = {}
    left = b""
    while True:
        if select.select([sys.stdin], [], [], _POLL_S)[0]:
            content = os.read(0, 65536)  # no buffered reads: select does not see what lies in a buffer
            if not content:
                return
            *lines, left = (left + content).split(b"\n")
            for line in lines:
                order = json.loads(line)
                running[_fork(order)] = (Path(order["folder"]), order["rank"])
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            folder, rank = running.pop(pid)
            _write(folder / f"status-{rank}", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
