"""What must hold where each host has a disk of its own, and on three hosts."""

from __future__ import annotations

from collections.abc import Callable

from tests.hosts import _fns as fns
from tests.hosts.hosts import DISK, SHARED, Host
from tests.hosts.job import Agents, Job
from tests.launchers.rows import Row

__all__ = ["LOCAL_CASES", "THREE_HOSTS"]

_FLIP = (
    "import glob; f = open(sorted(glob.glob(r'{0}/model/shard-*'))[0], 'r+b'); f.seek(-9, 2); b = f.read(1);"
    " f.seek(-9, 2); f.write(bytes([b[0] ^ 4])); f.close()"
)


def local_disks(agents: Agents) -> Row:
    """12 steps on two own disks with a save at each third one; all processes are killed after step 8, and the run goes on."""
    with Job(agents, (0, 1), fns.train_local, str(DISK / "whole"), 12) as job:
        whole = job.results(60)
    with Job(agents, (0, 1), fns.train_local, str(DISK / "run"), 12, 8) as job:
        statuses = job.wait(60)
    with Job(agents, (0, 1), fns.train_local, str(DISK / "run"), 12) as job:
        again = job.results(60)
    expected = {step: loss for step, loss in whole[0]["losses"].items() if step > 6}
    same = all(one["losses"] == expected and one["exact"] for one in again)
    apart = not any(name in again[1]["files"] for name in again[0]["files"])
    figure = (
        f"killed {statuses}; resumed step {again[0]['from']}, 6 more losses bitwise those of a run without a stop: {same}; no file of "
        f"a rank on both disks: {apart}"
    )
    return Row("local=True, two own disks", figure, same and apart and again[0]["from"] == 6)


def local_damage(agents: Agents) -> Row:
    """A flipped bit on one disk, then a step that one disk lost: all hosts take the step before. Begins where :func:`local_disks` ended."""
    first, second = agents.hosts.hosts[:2]
    second.run("python3", "-c", _FLIP.format(DISK / "run/step-00000012"))
    with Job(agents, (0, 1), fns.train_local, str(DISK / "run"), 12) as job:
        flipped = job.results(60)
    first.run("rm", "-rf", str(DISK / "run/step-00000012"))
    with Job(agents, (0, 1), fns.train_local, str(DISK / "run"), 12) as job:
        lost = job.results(60)
    ok = all(one["from"] == 9 and list(one["damaged"]) == [12] for one in (*flipped, *lost))
    figure = f"resumed step {flipped[0]['from']} and {lost[0]['from']} on both hosts; said why: {lost[1]['damaged'][12][-70:]}"
    return Row("local=True, damage on one disk; a step that one disk lost", figure, ok)


def local_merged(agents: Agents) -> Row:
    """One host is away: an error that names it. Then the parts are copied into one directory. Begins where :func:`local_damage` ended."""
    with Job(agents, (0, 0), fns.error_of, "train_local", str(DISK / "run"), 15) as job:
        away = job.results(60)
    named = all("host1" in one["text"] and "rsync -a host1:" in one["text"] for one in away)
    for host in agents.hosts.hosts[:2]:
        _copy(host, "step-00000012", "merged")
    with Job(agents, (0, 0), fns.resume_shared, str(SHARED / "merged")) as job:
        merged = job.results(60)
    with Job(agents, (0, 1), fns.train_local, str(DISK / "run"), 15) as job:
        own = job.results(60)
    same = merged[0]["losses"] == [own[0]["losses"][step] for step in (13, 14, 15)]
    figure = (
        f"without host1: {away[0]['type']} naming it and the rsync line: {named}; merged by cp: verify {merged[0]['problems'] or 'ok'}, "
        f"resumed on one host, losses as on two: {same}"
    )
    return Row(
        "local=True, one host away; parts merged", figure, named and same and not merged[0]["problems"]
    )


def _copy(host: Host, step: str, out: str) -> None:
    host.run("sh", "-c", f"mkdir -p {SHARED / out} && cp -r {DISK / 'run' / step} {SHARED / out}/")


def three_hosts(agents: Agents) -> Row:
    """Three hosts: a shared directory as on one host; own disks, then a fourth rank beside another."""
    outcomes = []
    for places in ((0, 0, 0), (0, 1, 2)):
        folder = f"three-{places[-1]}"
        (agents.hosts.shared / folder).mkdir()
        with Job(agents, places, fns.whole_way, str(SHARED / folder), "sync") as job:
            found = job.results(90)
        outcomes.append([(one["digest"], one["trained"], one["same"]) for one in found])
    with Job(agents, (0, 1, 2), fns.train_local, str(DISK / "run"), 6) as job:
        job.results(60)
    with Job(agents, (2, 0, 1, 1), fns.train_local, str(DISK / "run"), 9) as job:
        more = job.results(60)
    same = outcomes[0] == outcomes[1]
    figure = f"shared: digests as on one host: {same}; local=True: 3 ranks saved, 4 ranks in another order resumed step {more[0]['from']}"
    return Row("three hosts", figure, same and all(one["from"] == 6 for one in more))


LOCAL_CASES: list[Callable[[Agents], Row]] = [local_disks, local_damage, local_merged]
THREE_HOSTS: list[Callable[[Agents], Row]] = [three_hosts]
