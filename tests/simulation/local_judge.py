"""Whether hosts with directories of their own keep what they published: more than :mod:`.run_judge` asks of one directory."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation.files import Files
from tests.simulation.run_judge import Run, forget_damaged, judge_lock
from tests.simulation.world import Process

__all__ = ["Parts", "judge_away", "judge_hosts", "judge_leftovers", "judge_part"]


@dataclass(slots=True)
class Parts:
    """The parts that got their names, over all launches of a run."""

    published: dict[tuple[int, int], int] = field(default_factory=dict)
    """By host and step, the launch that gave the part its name last."""
    hosts: dict[int, list[int]] = field(default_factory=dict)
    """By launch, the hosts that took part."""

    def is_said(self, run: Run, host: int, step: int) -> bool:
        """Whether this host's part is of a step that ranks believe in."""
        return step in run.said and self.published.get((host, step)) == run.said[step]


def judge_part(run: Run, parts: Parts, host: int, launch: int, old: str, new: str) -> None:
    """A part gets its name, or is set aside."""
    name = new.rpartition("/")[2]
    if name.startswith("step-") and "." not in name:
        step = int(name[5:])
        if all(parts.published.get((h, step)) != launch for h in range(len(run.disks))):
            forget_damaged(run, step)  # this launch has not damaged it yet
        if host == run.lock_lost_on:
            judge_lock(run, name)
        parts.published[host, step] = launch
        return
    before = old.rpartition("/")[2]
    if before.startswith("step-") and "." not in before and name.startswith("step-"):
        step = int(before[5:])
        if step not in run.damaged and parts.is_said(run, host, step):
            run.world.problems.append(f"lost: host {host}, launch {launch} renames {before} to {name}")
        parts.published.pop((host, step), None)


def judge_away(run: Run, parts: Parts, launch: int, processes: list[Process], away: list[int]) -> bool:
    """Whether a resume refused, alike on all ranks, because it lacks the part of a host that is away; and then all else must be there."""
    lines = {
        r: [t for t in told if t.startswith("resume: ")] for r, told in run.ended.get(launch, {}).items()
    }
    texts = {t for told in lines.values() for t in told}
    is_named = texts and all(any(f"host host{h} (place" in text for h in away) for text in texts)
    if not is_named:
        return False
    if len(texts) > 1:
        run.world.problems.append(f"disagree: launch {launch} resumes as {texts}")
    if not any("CheckpointError" in text for text in texts):
        run.world.problems.append(f"nameless: launch {launch} resumes as {texts}")
    return True


def judge_leftovers(run: Run, launch: int, hosts: list[int]) -> None:
    """After a launch that has saved a step, and in which nothing failed: no part of an older one is left that may still get its name."""
    lines = [line for told in run.ended.get(launch, {}).values() for line in told]
    if run.has_guest or not any(
        line.startswith(("save", "wait")) and line.endswith(": ok") for line in lines
    ):
        return
    for host in hosts:
        names = run.disks[host].node(run.home).entries
        if parts := [n for n in names if n.startswith(".tmp-step-")]:
            run.world.problems.append(f"rubbish: {parts} are left on host {host} after launch {launch}")


def judge_hosts(run: Run, parts: Parts, launch: int, *, is_whole: bool) -> None:
    """After a last launch without a fault, with all hosts. ``is_whole``: no launch was without one."""
    problems = run.world.problems
    newest = max(run.said, default=0)
    for host, files in enumerate(run.disks):
        names = list(files.node(run.home).entries) if files.has(run.home) else []
        rubbish = [n for n in names if n.startswith((".tmp", ".trash"))]
        if rubbish and not run.has_guest:
            problems.append(f"rubbish: {rubbish} is left on host {host} after launch {launch}")
        steps = [n for n in names if n.startswith("step-") and "." not in n]
        if f"step-{newest:08d}" not in steps:
            problems.append(f"lost: step {newest} is not among {steps} of host {host}")
        if is_whole and run.keep_last is not None and len(steps) > run.keep_last:
            problems.append(f"kept: {steps} on host {host}, but keep_last is {run.keep_last}")
        hint = _hint(run, files)
        if hint != f"step-{newest:08d}":
            problems.append(f"hint: latest says {hint} on host {host}, the newest is {newest}")
        if files.locks:
            problems.append(f"lock: is held on host {host} after close()")


def _hint(run: Run, files: Files) -> str:
    if not files.has(f"{run.home}/latest"):
        return "nothing"
    return bytes(files.node(f"{run.home}/latest").content).decode().strip()
