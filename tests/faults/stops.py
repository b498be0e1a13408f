"""A rank that is stopped in the middle of a save or a resume, given up by the others, and continued after that."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

import shardwise as sw
from tests.faults.calls import phase_of, stop_at, stop_inside, through, watched
from tests.faults.forks import Launch, Scenario
from tests.faults.rows import Case, Context, Row, agreed, judge, rows_of
from tests.faults.tiny import IO, Attempt, Found, Tiny, attempt, find, outcome_of

__all__ = ["stop_rows"]

#: The line of the run that goes on while a rank of the one before is stopped.
_NEXT_LINE = 7


@dataclass(frozen=True, slots=True)
class _Stop:
    what: str
    """``sync`` or ``async`` save, or ``resume``."""
    victim: int
    number: int
    label: str
    inside: bool = False
    """While the call goes on, not before it: what ticks for a slow call is stopped, too."""

    @property
    def holds_lock(self) -> bool:
        """Rank 0 does as long as it lives, stopped or not; but for the first calls of a resume, which take the lock."""
        return self.victim == 0 and self.label != "stat ."

    @property
    def place(self) -> str:
        phase = "" if self.what == "resume" else f", {phase_of(self.label)}"
        save = self.what if self.what == "resume" else f"{self.what} save"
        if self.inside:
            return f"rank {self.victim}, {save}, in a slow call: call {self.number}, {self.label}"
        return f"rank {self.victim}, {save}{phase}: before call {self.number}, {self.label}"


def stop_rows(context: Context) -> Iterator[Row]:
    started = time.monotonic()
    stops: list[_Stop] = []
    for what in ("sync", "async", "resume"):
        labels = _count_resume(context) if what == "resume" else context.count_calls(what)
        for victim in (0, 1):
            numbered = list(enumerate(labels[victim], 1))
            if what == "async":
                numbered = numbered[::3]  # the thread behind makes the same calls
            stops += [_Stop(what, victim, n, label) for n, label in context.sample(numbered, 1)]
            if what == "sync":
                syncs = [(n, label) for n, label in numbered if label.startswith("fsync ")]
                stops += [_Stop(what, victim, n, label, inside=True) for n, label in context.sample(syncs, 1)]
    cases = context.all([lambda s=s: _stop(context, s) for s in stops])
    yield from rows_of("SIGSTOP past the timeout", cases, time.monotonic() - started)


def _count_resume(context: Context) -> list[list[str]]:
    root = context.fresh(1)

    def counted() -> list[str]:
        calls: list[str] = []
        hook = through(calls)
        run = Tiny()
        dist.barrier()
        with watched(root, hook, reading=True), sw.Checkpointer(root, io=IO) as checkpoints:
            assert checkpoints.resume(run.state) is not None
        return calls

    return context.forks.run(2, counted)


def _stop(context: Context, stop: _Stop) -> Scenario[Case]:
    """Stop it; the others give up; a new run tries to go on; continue it; look what is there."""
    root = context.fresh(1)
    other = 1 - stop.victim
    if stop.what == "resume":
        launch = context.forks.start(2, _resume_stopped, root, stop)
    else:
        hook = (stop_inside if stop.inside else stop_at)(stop.number)
        launch = context.forks.start(2, attempt, root, stop.what, {stop.victim: hook})
    yield lambda: launch.has_stopped(stop.victim)
    yield lambda: launch.ended([other])
    if launch.hung or stop.victim not in launch.stopped:
        problem = f"never stopped, or the other hung: {launch.output(stop.victim)} {launch.output(other)}"
        launch.kill_all()
        return Case(stop.place, "wrong", problem=problem, hung=bool(launch.hung))
    heard: list[Attempt] = [launch.result(other)] if launch.has_result(other) else []
    problem = _told(heard, stop.victim)
    # A run may go on beside a stopped rank that does not hold the lock.
    goes_on = context.forks.start(2, lambda: find(root, line=_NEXT_LINE))
    yield goes_on.ended
    between = _results(goes_on)
    if stop.holds_lock and (isinstance(between, str) or not between.error.startswith("LockedError")):
        problem += f" a second run was let in: {between};"
    if not stop.holds_lock and (isinstance(between, str) or between.error or between.wrong):
        problem += f" the next run could not go on: {between};"
    launch.send(stop.victim, signal.SIGCONT)
    yield launch.ended
    problem += _told_late(launch, stop.victim)
    afterwards = context.forks.start(2, lambda: find(root))
    yield afterwards.ended
    found = _results(afterwards)
    shutil.rmtree(root, ignore_errors=True)
    said: list[Attempt] = [] if stop.what == "resume" else heard
    if launch.hung:
        problem = f"hung after SIGCONT: {launch.output(stop.victim)}"
        return Case(stop.place, "wrong", problem=problem, hung=True)
    if stop.holds_lock or isinstance(found, str) or isinstance(between, str):
        return judge(stop.place, found, heard=said, problem=problem)
    if found.line != _NEXT_LINE:
        problem += f" the run in between saved line {_NEXT_LINE}, then line {found.line} was found;"
    expected = (between.step or 0) + 1
    case = judge(stop.place, found, allowed=[expected], new=expected, heard=(), problem=problem)
    result = {1: "previous", 2: "new"}.get(between.step or 0, "wrong") if case.result == "new" else "wrong"
    return Case(case.place, result, "error" if said else "", case.problem)  # type: ignore[arg-type]


def _resume_stopped(root: Path, stop: _Stop) -> Attempt:
    run = Tiny()
    dist.barrier()
    hook = stop_at(stop.number) if dist.get_rank() == stop.victim else through([])

    def resume() -> None:
        with sw.Checkpointer(root, io=IO) as checkpoints:
            checkpoints.resume(run.state)

    with watched(root, hook, reading=True):
        return outcome_of(resume)


def _results(launch: Launch) -> Found | str:
    if launch.hung or not all(launch.has_result(rank) for rank in (0, 1)):
        return f"ranks {'hung' if launch.hung else 'ended'}: {launch.output(0)} {launch.output(1)}"
    return agreed([launch.result(rank) for rank in (0, 1)])


def _told(heard: list[Attempt], victim: int) -> str:
    if not heard:
        return " the other rank gave no result;"
    told = heard[0]
    if told.outcome == "RankError" and told.names(victim):
        return ""
    return f" the other rank was not told who is missing: {told.outcome} {told.text};"


def _told_late(launch: Launch, victim: int) -> str:
    """The stopped rank learns that it was given up: a named error, not a result."""
    if launch.hung:
        return ""
    if not launch.has_result(victim):
        return f" after SIGCONT it ended otherwise: {launch.output(victim)};"
    told: Attempt = launch.result(victim)
    if told.is_done or told.outcome.startswith("raw"):
        return f" after SIGCONT it was told: {told.outcome} {told.text};"
    return ""
