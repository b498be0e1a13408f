"""What must hold on several hosts: each case gets hosts with agents, and returns a row of the table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from tests.hosts import _fns as fns
from tests.hosts.hosts import DISK, SHARED
from tests.hosts.job import Agents, Job
from tests.launchers.rows import Row

__all__ = ["CASES", "LONG_CASES"]


def bitwise_as_on_one_host(agents: Agents) -> Row:
    """Save (sync, async), resume, export and verify over a shared directory; losses and digests as on one host."""
    wrong, runs = [], 0
    for mode in ("sync", "async"):
        outcomes = []
        for places in ((0, 0), (0, 1)):
            (agents.hosts.shared / f"{mode}-{places[1]}").mkdir()
            with Job(agents, places, fns.whole_way, str(SHARED / f"{mode}-{places[1]}"), mode) as job:
                found = job.results(90)
            runs += 1
            wrong += [one for one in found if not one["same"] or not one["exact"] or one["problems"]]
            outcomes.append([(one["digest"], one["trained"]) for one in found])
        if outcomes[0] != outcomes[1]:
            wrong.append({"mode": mode})
    figure = f"{runs} runs of save, resume, 3 more steps, export, verify (sync, async): {len(wrong)} unlike one host"
    return Row("two hosts, shared file system", figure, not wrong)


def bytes_per_host(agents: Agents) -> Row:
    """Loads of one model by each strategy, two ranks on each of two hosts."""
    path = SHARED / "source"
    fns.write_source(str(agents.hosts.shared / "source"))
    parts, digests = [], set()
    for strategy in ("own", "node", "once"):
        with Job(agents, (0, 0, 1, 1), fns.load, str(path), strategy) as job:
            found = job.results(90)
        by_host = Counter[str]()
        for one in found:
            by_host[one["host"]] += one["read"]
        digests |= {one["digest"] for one in found}
        parts.append(f"{strategy} {' + '.join(f'{n / 1e6:.2f}' for _, n in sorted(by_host.items()))} MB")
    return Row("load, two hosts of two ranks: bytes read on each host", "; ".join(parts), len(digests) == 1)


def files_on_one_host(agents: Agents) -> Row:
    """A source that lies on the disk of host 1 alone."""
    agents.hosts[1].run("mkdir", "-p", str(DISK))
    fns.write_source(str(agents.hosts.shared / "of-one"))
    agents.hosts[1].run("cp", "-r", str(SHARED / "of-one"), str(DISK / "of-one"))
    with Job(agents, (0, 1), fns.load, str(DISK / "of-one"), "auto") as job:
        found = job.results(60)
    with Job(agents, (0, 1), fns.error_of, "load", str(DISK / "of-one"), "own") as job:
        errors = job.results(60)
    same = errors[0]["text"] == errors[1]["text"] and "rank 0" in errors[0]["text"]
    figure = f"auto: {found[0]['strategy']}; own: {errors[0]['type']} naming rank 0, alike: {same}"
    return Row("a source on one of two hosts", figure, same and found[0]["digest"] == found[1]["digest"])


def no_shared_file_system(agents: Agents) -> Row:
    """Each host has its own disk under the same path: an error at once, before any training."""
    with Job(agents, (0, 1), fns.error_of, "open_run", str(DISK / "run")) as job:
        found = job.results(60)
    text = found[0]["text"]
    named = "rank 1 on host host1" in text and "host0" in text and found[1]["text"] == text
    seconds = max(one["seconds"] for one in found)
    figure = f"{found[0]['type']} at Checkpointer(…) after {seconds:.1f} s, alike on both ranks, names ranks and hosts: {named}"
    return Row("no shared file system", figure, named and seconds < 10)


def a_host_vanishes(agents: Agents) -> Row:
    """The host of rank 1 loses power in a save; the host that is left says so, and resumes what was promised."""
    return _lost(agents, "vanish", "a host vanishes in a save (all processes killed, link gone)")


def a_host_freezes(agents: Agents) -> Row:
    """The host of rank 1 stops and its link is down, as under a partition: no connection is closed."""
    return _lost(agents, "freeze", "a host freezes in a save (all processes stopped, link down)")


def _lost(agents: Agents, how: str, case: str) -> Row:
    folder = f"{how}-run"
    with Job(agents, (0, 1), fns.save_until_lost, str(SHARED / folder)) as job:
        job.wait_for_output(0, "saving 4")
        getattr(agents.hosts[1], how)()
        lost = time.monotonic()
        statuses = job.wait(60, ranks=[0])
        seconds = time.monotonic() - lost
        found = job.result(0)
    with Job(agents, (0, 0), fns.resume_run, str(SHARED / folder)) as job:
        step, _ = job.results(60)[0]
    whole = step in (found["promised"], found["promised"] + 1)
    named = "rank 1" in found["text"]
    figure = (
        f"rank 0 raised after {seconds:.1f} s (timeout_s=5), names rank 1: {named}; promised step {found['promised']}, resumed "
        f"step {step} on the other host"
    )
    return Row(case, figure, statuses == [0] and named and whole and seconds < 20)


CASES: list[Callable[[Agents], Row]] = [
    bitwise_as_on_one_host,
    bytes_per_host,
    files_on_one_host,
    no_shared_file_system,
]
#: Each leaves its hosts unfit for the next.
LONG_CASES: list[Callable[[Agents], Row]] = [a_host_vanishes, a_host_freezes]
