"""What launches of one run said, and whether it was true."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.agreements import limit_s
from tests.simulation.files import Files
from tests.simulation.world import Process, World

__all__ = [
    "Run",
    "forget_damaged",
    "judge_end",
    "judge_holders",
    "judge_launch",
    "judge_lock",
    "judge_locked",
    "judge_lost",
    "judge_rename",
    "judge_wait",
    "watch_launch",
]


@dataclass(slots=True)
class Run:
    """What the launches of one run said, for the judge."""

    world: World
    disks: list[Files]
    """One that all ranks see, or one of each host."""
    mode: str
    keep_last: int | None
    home: str = "home/run"
    """The run's directory on each disk."""
    said: dict[int, int] = field(default_factory=dict)
    """By step, the launch whose ranks said that it is published."""
    tried: set[tuple[int, int]] = field(default_factory=set)
    """Launch and step of every save that began."""
    resumed: dict[int, dict[int, Any]] = field(default_factory=dict)
    """By launch and rank."""
    ended: dict[int, dict[int, list[str]]] = field(default_factory=dict)
    """By launch and rank, how each call ended."""
    damaged: set[int] = field(default_factory=set)
    """Steps that a bad disk changed after they were published."""
    was_damaged: bool = False
    expected: dict[int, int] = field(default_factory=dict)
    """By launch, the step that was said to be published when it began."""
    forgets: int = -1
    """The launch whose program does not resume."""
    holders: dict[tuple[int, int], Process] = field(default_factory=dict)
    """By launch and host, the process that holds the directory."""
    lock_lost_at: float | None = None
    lock_lost_on: int = 0
    """The host whose lock was lost."""
    was_free: dict[tuple[int, int], bool] = field(default_factory=dict)
    """By launch and attempt to open the directory, whether no process of another launch lived when its first rank began."""
    refused: dict[int, dict[int, str]] = field(default_factory=dict)
    """By launch and rank, the error of a resume that did not take an older step, because a host is away."""

    began: dict[tuple[int, int], float] = field(default_factory=dict)
    """By launch and step, when the first rank began to save it."""
    is_lost: bool = False
    """Whether all steps were damaged when the present launch began: it must not begin anew."""
    had_failing_call: bool = False
    has_guest: bool = False
    """Whether a process of an earlier launch lived when the present one began. It may go on, and leave something, after the last one."""

    @property
    def is_local(self) -> bool:
        """Whether each host has a directory of its own."""
        return len(self.disks) > 1


def judge_wait(run: Run, process: Process, name: str) -> None:
    waited_s = run.world.now - run.world.last_progress
    # A save is several agreements: each may be waited for once, and files are written between them.
    most_s = limit_s(run.world) + 400 * run.world.latency_s * (11 if run.world.slow_share else 1)
    if run.is_local:  # which takes more agreements
        most_s += 8 * run.world.least_sleep_s + 400 * run.world.latency_s
    if waited_s > most_s:
        run.world.problems.append(
            f"late: launch {process.launch}, rank {process.rank} waited {waited_s:.2f} s in {name}, at most {most_s:.2f} "
            f"were allowed"
        )


def watch_launch(run: Run, launch: int) -> None:
    """A launch begins: look at what the one before has left, and from now on at what is made."""
    run.is_lost = run.is_lost or _has_only_damaged(run)
    run.has_guest = any(not p.is_dead for p in run.world.processes if p.launch < launch)
    for files in run.disks:
        files.on_mkdir = functools.partial(_judge_mkdir, run, launch)
        if files.has(f"{run.home}/latest"):
            hint = bytes(files.node(f"{run.home}/latest").content).decode(errors="replace")
            if not re.fullmatch(r"step-[0-9]{8}\n", hint):
                run.world.problems.append(f"hint: launch {launch} finds {hint!r} in latest")


def _has_only_damaged(run: Run) -> bool:
    if run.said.keys() - run.damaged:
        return False  # this step must still be there
    names = [n for files in run.disks if files.has(run.home) for n in files.node(run.home).entries]
    steps = {int(n[5:]) for n in names if n.startswith("step-") and "." not in n}
    return bool(steps) and run.damaged.issuperset(steps)


def judge_lost(run: Run, launch: int) -> None:
    """All steps of a run are damaged: a launch says so on every rank that comes so far, and makes no new one."""
    for rank, lines in run.ended.get(launch, {}).items():
        for line in lines:
            if line == "resume: ok" or (line.startswith("save") and line.endswith(": ok")):
                run.world.problems.append(
                    f"lost: all steps are damaged, launch {launch}, rank {rank}: {line}"
                )


def _judge_mkdir(run: Run, launch: int, path: str) -> None:
    """A save begins to write: not if the lock was lost before it was called."""
    name = path.rpartition("/")[2]
    if run.lock_lost_at is None or not name.startswith(".tmp-step-"):
        return
    if run.lock_lost_at < run.began.get((launch, int(name.split("-")[2])), 0.0):
        run.world.problems.append(
            f"lock: launch {launch} makes {name}, though the lock was lost before the save"
        )


def judge_locked(run: Run, process: Process, text: str) -> None:
    """The error of a launch that another one keeps out says who that is."""
    of_others = [p for (launch, _), p in run.holders.items() if launch != process.launch and not p.is_dead]
    note = re.search(r"is writing checkpoints here \((.*)\); stop it", text)
    if note is None or run.had_failing_call or not of_others:
        return
    try:
        json.loads(note[1])
    except ValueError:
        run.world.problems.append(f"nameless: launch {process.launch} is kept out by {note[1]}")


def judge_holders(run: Run, process: Process) -> None:
    """No other launch has the directory that this process has just opened."""
    others = [
        p
        for (launch, host), p in run.holders.items()
        if launch != process.launch and host == process.host and not p.is_dead
    ]
    if any(not p.main.has_ended for p in others if p.main is not None):
        run.world.problems.append(f"two runs: launch {process.launch} opened what another one holds")
    run.holders[process.launch, process.host] = process


def judge_rename(run: Run, old: str, new: str) -> None:
    """A step appears, if that is what is renamed."""
    name = new.rpartition("/")[2]
    if name.startswith("step-") and "." not in name:
        forget_damaged(run, int(name[5:]))
        judge_lock(run, name)


def forget_damaged(run: Run, step: int) -> None:
    """A step that was damaged is made anew: ranks have yet to hear that the new one is published."""
    if step in run.damaged:
        run.damaged.discard(step)
        run.said.pop(step, None)


def judge_lock(run: Run, name: str) -> None:
    """A step appears: the lock must be held."""
    lost = run.lock_lost_at
    # The lock is looked at right before the rename: a few operations, each of which may be slow.
    patience_s = 0.05 + 8 * run.world.latency_s * (20 if run.world.slow_share else 1)
    if lost is not None and run.world.now - lost > patience_s:
        run.world.problems.append(
            f"lock: {name} appears {run.world.now - lost:.2f} s after the lock was lost"
        )


def judge_launch(run: Run, launch: int, processes: list[Process], fault: str | None) -> None:
    problems, ended = run.world.problems, run.ended.get(launch, {})
    resumed = run.resumed.get(launch, {})
    begins = {begin for begin, _ in resumed.values()}
    if len(begins) > 1:
        problems.append(f"disagree: launch {launch} resumed from {begins}")
    newest = run.expected[launch]
    for rank, (begin, found) in resumed.items():
        if begin < newest:
            problems.append(f"lost: step {newest} was published, launch {launch} resumed from {begin}")
        if begin in run.damaged and run.said.get(begin, launch) < launch:
            problems.append(
                f"damaged: launch {launch}, rank {rank} resumed from step {begin}, which is damaged"
            )
        if begin:
            step, shared, own = found
            right = step == begin == shared["step"] and (shared["launch"], step) in run.tried
            if not right or own not in (None, [shared["launch"], step, rank]):
                problems.append(f"mixed: launch {launch}, rank {rank} resumed {begin} and found {found}")
    for name in sorted({line.partition(":")[0] for lines in ended.values() for line in lines}):
        results = {
            r: line.partition(": ")[2]
            for r, lines in ended.items()
            for line in lines
            if line.startswith(f"{name}: ")
        }
        told = {
            r: t
            for r, t in results.items()
            if "unreachable" not in t and "process group was destroyed" not in t
        }
        if name != "close" and len(set(told.values())) > 1:
            problems.append(f"disagree: launch {launch}, {name}: {told}")
    if fault is None and launch != run.forgets:
        bad = {r: lines for r, lines in ended.items() if not all(line.endswith(": ok") for line in lines)}
        if bad or len(ended) < len(processes):
            problems.append(f"false alarm: launch {launch} without a fault ended as {bad or ended}")


def judge_end(run: Run, launch: int, files: Files) -> None:
    """After a launch without a fault: nothing of those before is left, and retention did its work."""
    problems = run.world.problems
    names = list(files.node(run.home).entries) if files.has(run.home) else []
    rubbish = [n for n in names if n.startswith((".tmp", ".trash"))]
    if rubbish and not run.has_guest:
        problems.append(f"rubbish: {rubbish} is left after launch {launch}")
    steps = [n for n in names if n.startswith("step-") and "." not in n]
    newest = max(run.said, default=0)
    if f"step-{newest:08d}" not in steps and newest:
        problems.append(f"lost: step {newest} is not among {steps}")
    # A guest that took the free directory after this launch, and died once its step had its name: it has not applied retention.
    of_guests = {f"step-{s:08d}" for of, s in run.tried if run.has_guest and of < launch and s > newest}
    unsaid = of_guests.intersection(steps)
    if run.keep_last is not None and len(steps) > run.keep_last + len(unsaid):
        problems.append(f"kept: {steps}, but keep_last is {run.keep_last}")
    if not run.was_damaged and any("damaged" in n or "superseded" in n for n in names):
        problems.append(f"damage: {names}")
    if files.has(f"{run.home}/latest"):
        hint = bytes(files.node(f"{run.home}/latest").content).decode().strip()
        if hint not in {f"step-{newest:08d}", *unsaid} and newest:
            problems.append(f"hint: latest says {hint}, the newest is {newest}")
    else:
        problems.append("hint: there is none")
    if files.locks:
        problems.append("lock: is held after close()")
