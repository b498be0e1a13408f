"""Calls that fail: EIO at every call of a save and of a resume, short writes, full disks, file size limits."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shardwise as sw
from shardwise.publish.lock import mark
from tests.faults.calls import WRITES, Hook, fail_at, phase_of, short_write_at, through, watched
from tests.faults.mounts import CanNotMount, mount_tmpfs, with_own_mounts
from tests.faults.rows import Case, Context, Row, agreed, judge, rows_of
from tests.faults.tiny import IO, Attempt, Found, Tiny, attempt, find, outcome_of, step_path

__all__ = ["eio_rows", "full_disk_rows", "limit_rows", "short_write_rows"]


# ------------------------------------------------------------------------------------------------ injected


@dataclass(frozen=True, slots=True)
class _Trial:
    """One call that fails in one rank."""

    root: Path
    mode: str
    victim: int
    number: int
    label: str

    def place(self, who: str) -> str:
        return f"{who}, {self.mode}, {phase_of(self.label)}: call {self.number}, {self.label}"


def _save_under(trial: _Trial, hook_of: Callable[[int], Hook]) -> tuple[Attempt, Found]:
    told = attempt(trial.root, trial.mode, {trial.victim: hook_of(trial.number)})
    return told, find(trial.root)


def eio_rows(context: Context) -> Iterator[Row]:
    for world_size, mode in ((2, "sync"), (2, "async"), (1, "sync"), (1, "async")):
        labels = context.count_calls(mode, world_size)
        for victim in range(world_size):
            chosen = context.sample(list(enumerate(labels[victim], 1)), 3 if world_size == 2 else 2)
            trials = [
                _Trial(context.fresh(1, world_size=world_size), mode, victim, number, label)
                for number, label in chosen
            ]
            who = f"rank {victim}" if world_size == 2 else "one process"
            started = time.monotonic()
            results = context.batches(
                trials, lambda trial: _save_under(trial, fail_at), world_size=world_size
            )
            cases = [
                _judge_eio(trial.place(who), by_rank, victim)
                for trial, by_rank in zip(trials, results, strict=True)
            ]
            _delete(trials)
            yield from rows_of("EIO at a call of a save", cases, time.monotonic() - started)
    yield from _eio_resume_rows(context)


def _judge_eio(place: str, by_rank: Any, victim: int) -> Case:
    """The error of the failing rank reaches all, with its reason; or the call did not matter and is warned of."""
    if isinstance(by_rank, str):
        return judge(place, by_rank)
    heard: list[Attempt] = [told for told, _ in by_rank]
    problem = ""
    for rank, told in enumerate(heard):
        if not told.is_done and os.strerror(errno.EIO) not in told.text:
            problem += f" rank {rank} was not told why: {told.outcome} {told.text};"
        if told.outcome == "RankError" and victim not in told.causes:
            problem += f" rank {rank} was not told who: {told.outcome} {told.text};"
    return judge(place, agreed([found for _, found in by_rank]), heard=heard, problem=problem)


def _eio_resume_rows(context: Context) -> Iterator[Row]:
    """Of a resume that sweeps leftovers, skips and sets aside a damaged step, and goes back one."""
    for world_size in (2, 1):
        for reading in (True, False):
            root = _untidy(context, world_size)
            labels = [
                calls for _, calls in context.forks.run(world_size, partial(_counted_resume, root, reading))
            ]
            for victim in range(world_size):
                chosen = context.sample(list(enumerate(labels[victim], 1)), 3)
                roots = [_untidy(context, world_size) for _ in chosen]
                pairs = list(zip(roots, chosen, strict=True))
                started = time.monotonic()
                results = context.batches(
                    pairs, partial(_resume_under, victim=victim, reading=reading), world_size=world_size
                )
                who = f"rank {victim}" if world_size == 2 else "one process"
                what = "reading" if reading else "changing"
                cases = [
                    _judge_eio_resume(f"{who}, {what}: call {number}, {label}", by_rank, victim)
                    for (_, (number, label)), by_rank in zip(pairs, results, strict=True)
                ]
                for used in roots:
                    shutil.rmtree(used)
                yield from rows_of("EIO at a call of a resume", cases, time.monotonic() - started)


def _untidy(context: Context, world_size: int) -> Path:
    """Steps 1 to 4, the newest of them damaged, and what a killed save left."""
    root = context.fresh(1, 2, 3, 4, world_size=world_size)
    os.truncate(step_path(root, 4) / "state.json", 10)
    left = root / f".tmp-step-00000005-{'ab' * 8}"
    (left / "model").mkdir(parents=True)
    mark(str(left))
    (left / "model" / "half").write_bytes(b"half")
    (root / f".tmp-latest-{'ab' * 8}").write_bytes(b"st")
    return root


def _resume_to_2(root: Path, hook: Hook | None, reading: bool) -> Attempt:
    run = Tiny()

    def resume() -> None:
        with sw.Checkpointer(root, io=IO) as checkpoints:
            if reading:  # the newest that is valid: 3
                assert checkpoints.resume(run.state) is not None
            else:
                assert checkpoints.resume(run.state, 2) is not None

    dist.barrier()
    with watched(root, hook, reading=reading) if hook is not None else nullcontext():
        return outcome_of(resume)


def _counted_resume(root: Path, reading: bool) -> tuple[Attempt, list[str]]:
    calls: list[str] = []
    return _resume_to_2(root, through(calls), reading), calls


def _resume_under(
    pair: tuple[Path, tuple[int, str]], victim: int, reading: bool
) -> tuple[Attempt, Found, list[str]]:
    root, (number, _) = pair
    told = _resume_to_2(root, fail_at(number) if dist.get_rank() == victim else None, reading)
    dist.barrier()
    names = sorted(p.name.split("-")[1] for p in root.iterdir() if p.name.startswith("step-"))
    dist.barrier()
    return told, find(root), names


def _judge_eio_resume(place: str, by_rank: Any, victim: int) -> Case:
    """Refused with the reason, or done; and never is a step that is valid set aside as damaged."""
    if isinstance(by_rank, str):
        return judge(place, by_rank)
    heard: list[Attempt] = [told for told, _, _ in by_rank]
    problem = ""
    for told in heard:
        if not told.is_done and os.strerror(errno.EIO) not in told.text:
            problem += f" not told why: {told.outcome} {told.text};"
    for name in by_rank[0][2]:
        if ".damaged" in name and not name.startswith("00000004"):
            problem += f" {name}: a valid step was set aside as damaged;"
    case = judge(place, agreed([found for _, found, _ in by_rank]), previous=2, new=3, problem=problem)
    said = "done" if all(told.is_done for told in heard) else "error"
    raw = [told.text for told in heard if told.outcome.startswith("raw")]
    if raw or case.problem:
        return Case(place, "wrong", said, f"{case.problem} {' '.join(raw)}")
    return Case(place, case.result, said)


def short_write_rows(context: Context) -> Iterator[Row]:
    """write(2) may take less than it was given."""
    labels = context.count_calls("sync")
    for victim in (0, 1):
        numbered = [(n, label) for n, label in enumerate(labels[victim], 1) if label.split()[0] in WRITES]
        chosen = context.sample(numbered, 4)
        trials = [_Trial(context.fresh(1), "sync", victim, n, label) for n, label in chosen]
        started = time.monotonic()
        results = context.batches(trials, lambda trial: _save_under(trial, short_write_at))
        cases = []
        for trial, by_rank in zip(trials, results, strict=True):
            place = f"rank {victim}: {trial.label}"
            if isinstance(by_rank, str):
                cases.append(judge(place, by_rank))
                continue
            found = agreed([found for _, found in by_rank])
            cases.append(judge(place, found, heard=[told for told, _ in by_rank], allowed=[2]))
        _delete(trials)
        yield from rows_of("write takes one byte", cases, time.monotonic() - started)


def _delete(trials: list[_Trial]) -> None:
    for trial in trials:
        shutil.rmtree(trial.root, ignore_errors=True)


# --------------------------------------------------------------------------------------------------- limits


def limit_rows(context: Context) -> Iterator[Row]:
    """RLIMIT_FSIZE just below the size of each of a rank's files, so that each in turn is the first not to fit."""
    files = [p for p in step_path(context.pristine(1), 1).rglob("*") if p.is_file()]
    limits = context.sample(sorted({p.stat().st_size - 1 for p in files}), 4)
    for victim in (0, 1):
        trials = [(context.fresh(1), limit) for limit in limits]
        started = time.monotonic()
        results = context.batches(trials, partial(_save_limited, victim=victim))
        cases = []
        for (root, limit), by_rank in zip(trials, results, strict=True):
            cases.append(_judge_refused(f"rank {victim}: {limit} bytes", by_rank, errno.EFBIG, victim))
            shutil.rmtree(root, ignore_errors=True)
        yield from rows_of("EFBIG by RLIMIT_FSIZE", cases, time.monotonic() - started)


def _save_limited(trial: tuple[Path, int], victim: int) -> tuple[Attempt, Found]:
    root, limit = trial
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited() -> None:
        if dist.get_rank() == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))

    try:
        told = attempt(root, "sync", {}, before=limited)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return told, find(root)


def _judge_refused(place: str, by_rank: Any, code: int, victim: int | None) -> Case:
    """All ranks hear the reason; only what nothing depends on may fail unheard, with a warning."""
    if isinstance(by_rank, str):
        return judge(place, by_rank)
    heard: list[Attempt] = [told for told, *_ in by_rank]
    problem = ""
    for told in heard:
        if not told.is_done and os.strerror(code) not in told.text:
            problem += f" not told why: {told.outcome} {told.text};"
        if told.outcome == "RankError" and victim is not None and victim not in told.causes:
            problem += f" not told who: {told.outcome} {told.text};"
    return judge(place, agreed([found for _, found, *_ in by_rank]), heard=heard, problem=problem)


# ------------------------------------------------------------------------------------------------ full disks


def full_disk_rows(context: Context) -> Iterator[Row]:
    """A save that finds 0, 1, 2, … pages or inodes left, up to the number with which it succeeds."""
    disk = context.base / "disk"
    disk.mkdir(exist_ok=True)
    for resource_name in ("pages", "inodes"):
        started = time.monotonic()
        work = partial(_fill_disk, context, disk, resource_name)
        try:
            cases = with_own_mounts(work, context.base / f"full-{resource_name}")
        except CanNotMount as error:
            yield Row("ENOSPC on a small tmpfs", resource_name, not_run=f"can't mount ({error})")
            continue
        yield from rows_of("ENOSPC on a small tmpfs", cases, time.monotonic() - started)


def _fill_disk(context: Context, disk: Path, what: str) -> list[Case]:
    """In a process with mounts of its own: all cases, from no room to enough of it."""
    context.forks.disown()
    mount_tmpfs(disk, "size=1m,nr_inodes=300")
    most = 30 if what == "pages" else 20
    rooms = context.sample(range(most + 1), 4)
    pristine = context.pristine(1)
    try:
        save = partial(_save_with_room, disk, pristine, what)
        results = context.forks.run(2, lambda: [save(room) for room in rooms])
    finally:
        context.forks.end_own()
    cases = []
    for room, by_rank in zip(rooms, zip(*results, strict=True), strict=True):
        where = _failing_file(by_rank[0][0])
        case = _judge_refused(f"{what} run out, {where}: {room} free", list(by_rank), errno.ENOSPC, None)
        full = agreed([found for *_, found in by_rank])
        if isinstance(full, str) or full.error or full.step not in (1, 2):
            case = Case(case.place, "wrong", case.heard, f"on the full disk: {full}")
        cases.append(case)
    outcomes = {case.heard for case in cases}
    assert outcomes == {"error", "done"}, f"{what}: {most} must be enough, 0 must not: {outcomes}"
    return cases


def _failing_file(told: Attempt) -> str:
    """What did not fit, as the error names it."""
    for name, words in (
        ("manifest.json", "at the manifest"),
        ("shard-", "at a slice file"),
        ("state.json", "at a document"),
        ("/rank/", "at a document"),
    ):
        if name in told.text:
            return words
    return "at the hint, or enough" if told.is_done else "at a directory"


def _save_with_room(disk: Path, pristine: Path, what: str, room: int) -> tuple[Attempt, Found, Found]:
    """Save with so much room; resume on the full disk; then, with the ballast gone, resume and save."""
    root = disk / "run"
    first = dist.get_rank() == 0
    if first:
        for old in disk.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        shutil.copytree(pristine, root)
    dist.barrier()

    def fill() -> None:
        dist.barrier()
        if first:
            _leave_room(disk, what, room)

    told = attempt(root, "sync", {}, before=fill)
    full = find(root, saves_next=False)
    dist.barrier()
    if first:
        shutil.rmtree(disk / "ballast")
    dist.barrier()
    return told, find(root), full


def _leave_room(disk: Path, what: str, room: int) -> None:
    ballast = disk / "ballast"
    ballast.mkdir()
    state = os.statvfs(disk)
    if what == "pages":
        with (ballast / "bytes").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (state.f_bavail - room) * state.f_frsize)
    else:
        for k in range(state.f_favail - room):
            (ballast / str(k)).touch()
