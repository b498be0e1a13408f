"""A process with a ledger, started by test_ledger.py: ``python -m tests.operations._child PLACE [CGROUP]``.

Takes 256 MiB, forks a child that has a ledger of its own, and with ``--killed`` ends by SIGKILL in a phase.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path

import shardwise as sw
from shardwise.operations.operation import phase

TAKEN_BYTES = 256 * 1024**2


def fill(nbytes: int) -> mmap.mmap:
    """Anonymous memory that goes back to the kernel as soon as it is closed."""
    taken = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, nbytes, mmap.PAGESIZE):
        taken[at] = 1
    return taken


def main(place: Path, cgroup: Path | None, *, is_killed: bool) -> None:
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    with sw.reports.memory_ledger(place) as ledger:
        with phase("small"):
            fill(1024**2).close()
        with ledger.phase("large", step=7):
            taken = fill(TAKEN_BYTES)
            time.sleep(0.5)  # the kernel's peak lasts: every look sees it
            taken.close()
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
        child = os.fork()
        if child == 0:
            with ledger.phase("of the child"), phase("of the child"):
                pass
            with sw.reports.memory_ledger(place), phase("the child's own"):
                pass
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps({"file": str(ledger.file), "high_water_bytes": int(status["VmHWM"].split()[0]) * 1024}))


if __name__ == "__main__":
    given = [Path(one) for one in sys.argv[1:] if one != "--killed"]
    main(given[0], given[1] if given[1:] else None, is_killed="--killed" in sys.argv)
