"""Calls that take longer than a rank may be without progress: every one of a save, and those that a resume changes with."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

import shardwise as sw
from shardwise.publish.lock import mark
from tests.faults.calls import phase_of, slow_at, through, watched
from tests.faults.rows import Context, Row, agreed, judge, rows_of
from tests.faults.tiny import IO, TIMEOUT_S, Attempt, Found, Tiny, attempt, find, outcome_of

__all__ = ["slow_rows"]

_SECONDS = 1.5 * TIMEOUT_S


@dataclass(frozen=True, slots=True)
class _Slow:
    root: Path
    what: str
    """``sync`` or ``async`` save, or ``resume``."""
    victim: int
    number: int
    label: str

    @property
    def place(self) -> str:
        phase = self.what if self.what == "resume" else f"{self.what} save, {phase_of(self.label)}"
        return f"rank {self.victim}, {phase}: call {self.number}, {self.label}"


def slow_rows(context: Context) -> Iterator[Row]:
    started = time.monotonic()
    trials: list[_Slow] = []
    for what in ("sync", "async", "resume"):
        labels = _count_resume(context) if what == "resume" else context.count_calls(what)
        for victim in (0, 1):
            numbered = list(enumerate(labels[victim], 1))
            if what == "async":
                numbered = numbered[::3]  # the thread behind makes the same calls
            for number, label in context.sample(numbered, 2 if what == "sync" else 1) if numbered else ():
                root = context.fresh(1, 2) if what == "resume" else context.fresh(1)
                trials.append(_Slow(root, what, victim, number, label))
    results = context.batches(trials, _try, size=1 if context.short else 4)
    cases = []
    for trial, by_rank in zip(trials, results, strict=True):
        if isinstance(by_rank, str):
            cases.append(judge(trial.place, by_rank))
            continue
        heard: list[Attempt] = [told for told, _ in by_rank]
        problem = "".join(f" {told.outcome}: {told.text};" for told in heard if not told.is_done)
        found = agreed([found for _, found in by_rank])
        resumes = trial.what == "resume"
        cases.append(
            judge(
                trial.place,
                found,
                heard=() if resumes else heard,
                allowed=[1 if resumes else 2],
                problem=problem,
            )
        )
        shutil.rmtree(trial.root, ignore_errors=True)
    yield from rows_of("a call that takes longer than the timeout", cases, time.monotonic() - started)


def _try(trial: _Slow) -> tuple[Attempt, Found]:
    hook = slow_at(trial.number, _SECONDS)
    if trial.what != "resume":
        return attempt(trial.root, trial.what, {trial.victim: hook}), find(trial.root)
    with watched(trial.root, hook if dist.get_rank() == trial.victim else through([])):
        told = _go_back(trial.root)
    return told, find(trial.root)


def _go_back(root: Path) -> Attempt:
    """Resume step 1 beside step 2, which is set aside, and what a killed save left, which is deleted."""
    if dist.get_rank() == 0:
        left = root / f".tmp-step-00000003-{'ab' * 8}"
        (left / "model").mkdir(parents=True)
        mark(str(left))
        (left / "model" / "half").write_bytes(b"half")
    dist.barrier()
    run = Tiny()

    def resume() -> None:
        with sw.Checkpointer(root, io=IO) as checkpoints:
            assert checkpoints.resume(run.state, 1) is not None

    return outcome_of(resume)


def _count_resume(context: Context) -> list[list[str]]:
    root = context.fresh(1, 2)

    def counted() -> list[str]:
        calls: list[str] = []
        with watched(root, through(calls)):
            assert _go_back(root).is_done
        return calls

    return context.forks.run(2, counted)
