"""A run that loses its directory in the middle of a save: another file gets the lock's name, or another run notes itself."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.faults.calls import Call, Hook, phase_of
from tests.faults.rows import Case, Context, Row, agreed, judge, rows_of
from tests.faults.tiny import Attempt, Found, attempt, find

__all__ = ["lost_lock_rows"]


@dataclass(frozen=True, slots=True)
class _Loss:
    root: Path
    how: str
    mode: str
    number: int
    label: str
    is_published: bool
    """Whether the step has its name before that call, or gets it with it: the lock is checked just before."""

    @property
    def place(self) -> str:
        return f"{self.how}, {self.mode}, {phase_of(self.label)}: before call {self.number}, {self.label}"


def lost_lock_rows(context: Context) -> Iterator[Row]:
    started = time.monotonic()
    losses = []
    for mode in ("sync", "async"):
        labels = context.count_calls(mode)[0]
        rename = next(n for n, label in enumerate(labels, 1) if "-> step-" in label)
        numbered = list(enumerate(labels, 1))
        if mode == "async":
            numbered = numbered[::3]
        for how in ("replaced", "deleted", "taken"):
            for number, label in context.sample(numbered, 2):
                losses.append(_Loss(context.fresh(1), how, mode, number, label, number >= rename))
    results = context.batches(losses, _lose)
    cases = []
    for loss, by_rank in zip(losses, results, strict=True):
        cases.append(_judge(loss, by_rank))
        shutil.rmtree(loss.root, ignore_errors=True)
    yield from rows_of("lock lost in a save", cases, time.monotonic() - started)


def _lose(loss: _Loss) -> tuple[Attempt, Found]:
    opened: list[int] = []
    told = attempt(loss.root, loss.mode, {0: _losing(loss, opened)})
    for fd in opened:
        os.close(fd)  # the other run ends
    dist.barrier()
    return told, find(loss.root)


def _losing(loss: _Loss, opened: list[int]) -> Hook:
    def hook(call: Call, do: Callable[[], Any]) -> Any:
        if call.number == loss.number:
            lock = loss.root / ".lock"
            if loss.how != "taken":
                lock.rename(loss.root.with_suffix(".lock"))
            if loss.how != "deleted":
                opened.append(os.open(lock, os.O_RDWR | os.O_CREAT))
                os.truncate(lock, 0)
                os.pwrite(opened[0], b'{"host": "elsewhere", "pid": 1}', 0)
            if loss.how == "replaced":
                fcntl.lockf(opened[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return do()

    return hook


def _judge(loss: _Loss, by_rank: Any) -> Case:
    """Nothing appears once the directory is another run's; a step that has its name is whole, and stays."""
    if isinstance(by_rank, str):
        return judge(loss.place, by_rank)
    heard: list[Attempt] = [told for told, _ in by_rank]
    expected = "done" if loss.is_published else "LockedError"
    problem = "".join(f" heard {told.outcome} {told.text};" for told in heard if told.outcome != expected)
    found = agreed([f for _, f in by_rank])
    # What retention would have deleted stays; the newest counts.
    return judge(loss.place, found, heard=heard, allowed=[2 if loss.is_published else 1], problem=problem)
