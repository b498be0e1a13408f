"""Hosts that are not alike: a clock that is minutes off, and a host that is 100 times slower."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.hosts import _fns as fns
from tests.hosts.hosts import SHARED, Hosts
from tests.hosts.job import Agents, Job
from tests.launchers.rows import Row

__all__ = ["SKEWED", "SLOW", "skew", "why_no_skew", "why_no_slow"]

_SKEW_S = -420
_CPU_SHARE, _MBIT = 0.01, 10.0


def why_no_skew() -> str | None:
    """Why no host can have another clock here; None if one can."""
    return None if shutil.which("cc") else "no C compiler (cc) for tests/hosts/clock.c"


def why_no_slow() -> str | None:
    """Why no host can have a share of a core here; None if one can."""
    fine = (
        os.geteuid() == 0
        and os.access("/sys/fs/cgroup/cpu", os.W_OK)
        and shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    )
    return None if fine else "a share of a core needs root, cgroup 1 and tc (Debian: iproute2)"


def skew(hosts: Hosts) -> dict[int, dict[str, str]]:
    """Variables that put host 1's wall clock off: what time(2), clock_gettime(2) and waits until a time of day are to its processes."""
    library = "clock.so"
    source = Path(__file__).with_name("clock.c")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(hosts.shared / library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return {1: {"LD_PRELOAD": str(SHARED / library), "SKEW_S": str(_SKEW_S)}}


def clock_skew(agents: Agents) -> Row:
    """Save, resume, export and verify with a clock that is 7 minutes behind on one of two hosts."""
    outcomes, off = [], 0.0
    for mode in ("sync", "async"):
        for places in ((0, 0), (0, 1)):
            folder = f"skew-{mode}-{places[1]}"
            (agents.hosts.shared / folder).mkdir()
            with Job(agents, places, fns.whole_way, str(SHARED / folder), mode) as job:
                found = job.results(90)
            off = found[1]["clock"] - found[0]["clock"]
            outcomes.append([(one["digest"], one["trained"], one["same"], one["problems"]) for one in found])
    same = all(one == outcomes[0] for one in outcomes) and outcomes[0][0][2:] == (True, [])
    figure = f"host1's clock was {off:+.0f} s off; sync and async: digests as on one host: {same}"
    return Row("clocks that differ by minutes", figure, same and abs(off - _SKEW_S) < 30)


def slow_host(agents: Agents) -> Row:
    """Host 1 gets a hundredth of a core and a slow link: slower than the limit, but never without progress."""
    (agents.hosts.shared / "even").mkdir()
    (agents.hosts.shared / "slow").mkdir()
    with Job(agents, (0, 1), fns.whole_way, str(SHARED / "even"), "sync", 10.0) as job:
        even = job.results(90)
    how = agents.hosts[1].slow_down(_CPU_SHARE, _MBIT)
    started = time.monotonic()
    with Job(agents, (0, 1), fns.whole_way, str(SHARED / "slow"), "sync", 10.0) as job:
        slow = job.results(400)
    seconds = time.monotonic() - started
    same = [(one["digest"], one["trained"]) for one in even] == [
        (one["digest"], one["trained"]) for one in slow
    ]
    figure = (
        f"host1: {how}; save, resume, export took {slow[1]['seconds']:.0f} s instead of {even[1]['seconds']:.1f} s with timeout_s=10 "
        f"({seconds:.0f} s with the start): no rank was given up, digests as before: {same}"
    )
    return Row("one host 100 times slower", figure, same and "cgroup" in how)


SKEWED: list[Callable[[Agents], Row]] = [clock_skew]
SLOW: list[Callable[[Agents], Row]] = [slow_host]
