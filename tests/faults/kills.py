"""SIGKILL before and after every file-system call of a save, in rank 0, in rank 1, and of all ranks at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.calls import Hook, kill_after, kill_before, phase_of
from tests.faults.forks import Launch, Scenario
from tests.faults.rows import Case, Context, Row, judge, rows_of
from tests.faults.tiny import Attempt, attempt

__all__ = ["kill_rows"]

#: How often an instant is tried again where a busy machine let the ranks give each other up before it came.
_TRIES = 3


@dataclass(frozen=True, slots=True)
class _Instant:
    mode: str
    victim: int
    with_peer: bool
    number: int
    is_after: bool
    label: str

    @property
    def place(self) -> str:
        who = "all ranks" if self.with_peer else f"rank {self.victim}"
        when = "after" if self.is_after else "before"
        return f"{who}, {self.mode}, {phase_of(self.label)}: {when} call {self.number}, {self.label}"

    @property
    def hook(self) -> Hook:
        return (kill_after if self.is_after else kill_before)(self.number)


def kill_rows(context: Context) -> Iterator[Row]:
    started = time.monotonic()
    chosen: list[_Instant] = []
    for mode in ("sync", "async"):
        labels = context.count_calls(mode)
        for victim, with_peer in ((0, False), (1, False), (0, True)):
            instants = [
                _Instant(mode, victim, with_peer, number, is_after, label)
                for number, label in enumerate(labels[victim], 1)
                for is_after in ((False,) if with_peer else (False, True))
            ]
            chosen += context.sample(instants, 3 if victim == 0 and not with_peer else 1)
    cases = _kill_all(context, chosen)
    yield from rows_of("SIGKILL at a call", cases, time.monotonic() - started)


def _kill_all(context: Context, instants: list[_Instant]) -> list[Case]:
    roots = [context.fresh(1) for _ in instants]

    def one(instant: _Instant, root: Path) -> Scenario[tuple[list[Attempt], str, bool]]:
        left = [] if instant.with_peer else [1 - instant.victim]
        for _ in range(_TRIES):
            launch = context.forks.start(2, attempt, root, instant.mode, {instant.victim: instant.hook})
            yield lambda launch=launch: launch.ended([instant.victim])
            if instant.with_peer:
                launch.kill_all()
            yield launch.ended
            if launch.statuses[instant.victim] == -signal.SIGKILL or launch.hung:
                break
            problem = f"never killed: {launch.output(instant.victim)}"
            return [], problem, False
        heard, problem = _heard(launch, left, instant.victim)
        if not problem:
            launch.forget()
        return heard, problem, bool(launch.hung)

    ended = context.all([lambda i=i, r=r: one(i, r) for i, r in zip(instants, roots, strict=True)])
    found = context.find_all(roots)
    cases = []
    for instant, (heard, problem, hung), what in zip(instants, ended, found, strict=True):
        case = judge(instant.place, what, heard=heard, problem=problem)
        cases.append(Case(case.place, "wrong", case.heard, case.problem, hung=True) if hung else case)
    return cases


def _heard(launch: Launch, left: list[int], victim: int) -> tuple[list[Attempt], str]:
    """What the ranks that were left heard, and what is wrong with it."""
    heard = []
    for rank in left:
        if not launch.has_result(rank):
            return heard, f"rank {rank} ended otherwise: {launch.statuses.get(rank)} {launch.output(rank)}"
        told: Attempt = launch.result(rank)
        heard.append(told)
        if not told.is_done and not (told.outcome == "RankError" and told.names(victim)):
            return heard, f"rank {rank} was not told that rank {victim} is gone: {told.outcome} {told.text}"
    return heard, ""
