"""One directory and several views of it: two runs, ranks that see it late, and retention that must not delete the last."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import shardwise as sw
from tests.faults.calls import Call, fail_while, watched
from tests.faults.forks import Scenario
from tests.faults.rows import Case, Context, Row, agreed, judge, rows_of
from tests.faults.tiny import IO, TIMEOUT_S, Attempt, Found, Tiny, attempt, find, outcome_of, step_path

__all__ = ["late_rows", "lock_rows", "retention_rows"]


# ------------------------------------------------------------------------------------------------- two runs


class _Slow(Dataset[int]):
    """Keeps the workers of a loader busy for longer than anything here lasts."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index:
            time.sleep(600)
        return index


def lock_rows(context: Context) -> Iterator[Row]:
    started = time.monotonic()
    kinds = ("alone", "workers", "reads")
    pairs = context.all([lambda kind=kind: _two_runs(context, kind) for kind in kinds])
    cases = [case for pair in pairs for case in pair]
    (by_rank,) = context.batches([context.fresh(1)], _open_twice)
    cases.append(_judge_opened_twice(by_rank))
    yield from rows_of("two runs on one directory", cases, time.monotonic() - started)


def _two_runs(context: Context, kind: str) -> Scenario[list[Case]]:
    root, ready = context.fresh(1), context.base / f"ready-{kind}"
    with_workers = kind == "workers"

    def hold() -> None:
        """Hold the directory, with workers of a loader that inherited everything, until killed."""
        checkpoints = sw.Checkpointer(root, io=IO)
        assert checkpoints.resume(Tiny().state) is not None
        pids = []
        if with_workers:
            batches = iter(DataLoader(_Slow(), num_workers=2, batch_size=1, multiprocessing_context="fork"))
            next(batches)
            pids = [worker.pid for worker in batches._workers]  # type: ignore[attr-defined]
        if kind == "reads":  # as a backup does
            (root / ".lock").read_bytes()
            shutil.copytree(root, context.base / f"backup-{dist.get_rank()}")
        if dist.get_rank() == 0:
            ready.with_suffix(".part").write_text(f"{os.getpid()} " + " ".join(map(str, pids)))
            ready.with_suffix(".part").rename(ready)
        time.sleep(600)

    holder = context.forks.start(2, hold)
    yield lambda: ready.exists() or holder.ended()
    assert ready.exists(), holder.output(0) + holder.output(1)
    pid, *workers = map(int, ready.read_text().split())
    second = context.forks.start(2, lambda: find(root))
    yield second.ended
    refused = agreed([second.result(rank) for rank in (0, 1)])
    place = "while the first lives" + (", which has read its lock file" if kind == "reads" else "")
    if not isinstance(refused, str) and refused.error.startswith("LockedError") and str(pid) in refused.error:
        cases = [Case(place, "error")]
    else:
        cases = [Case(place, "wrong", problem=f"the second run got {refused}")]
    for rank in (0, 1):
        holder.send(rank, signal.SIGKILL)
    yield lambda: len(holder.statuses) == 2 or holder.ended()
    third = context.forks.start(2, lambda: find(root))
    yield third.ended
    place = "killed, its loader's workers still alive" if with_workers else "killed"
    found = agreed([third.result(rank) for rank in (0, 1)])
    problem = "".join(f" worker {w} is gone: this shows nothing;" for w in workers if not _lives(w))
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(holder.pids[1], signal.SIGKILL)  # its workers
    return [*cases, judge(f"the first {place}", found, problem=problem, allowed=[1])]


def _open_twice(root: Path) -> tuple[Attempt, Found]:
    """Rank 1 comes too late to open the directory with rank 0; then both try again."""

    def open_it() -> None:
        sw.Checkpointer(root, io=sw.IOOptions(timeout_s=1.0)).close()

    if dist.get_rank() == 1:
        time.sleep(2.5)
    return outcome_of(open_it), find(root)


def _judge_opened_twice(by_rank: Any) -> Case:
    place = "opened again, after a rank came too late"
    if isinstance(by_rank, str):
        return judge(place, by_rank)
    late = [told.missing for told, _ in by_rank]
    problem = (
        "" if late == [(1,), (1,)] else f" the first time ranks heard {[told.text for told, _ in by_rank]};"
    )
    return judge(place, agreed([found for _, found in by_rank]), problem=problem, allowed=[1])


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


# ------------------------------------------------------------------------------------------------ late views


def late_rows(context: Context) -> Iterator[Row]:
    """Rank 1 sees the directory, or one name in it, a second later than rank 0, or never."""
    step = step_path(context.pristine(1, 2), 2)
    names = [".", "step-00000002"] + sorted(
        f"step-00000002/{p.relative_to(step)}" for p in step.rglob("*") if p.is_file()
    )
    pairs = [(name, never) for name in names for never in (False, True)]
    if context.short:
        pairs = [(".", False), (".", True), (names[2], False), (names[-1], False)]
    started = time.monotonic()
    trials = [(context.fresh(1, 2), context.fresh(), name, never) for name, never in pairs]
    results = context.batches(trials, _resume_late, size=4)
    cases = []
    for (name, never), by_rank in zip(pairs, results, strict=True):
        cases.append(_judge_late(name, never, by_rank))
    yield from rows_of("peers see it late", cases, time.monotonic() - started)
    yield from _late_save_rows(context)


def _resume_late(trial: tuple[Path, Path, str, bool]) -> tuple[Found, list[str]]:
    """Rank 1 has a tree of links of its own, in which one name appears later."""
    root, view, name, never = trial
    own = None
    appear: Callable[[], None] = lambda: None  # noqa: E731
    if dist.get_rank() == 1:
        appear = _link_all_but(root, view, name)
        own = view
    dist.barrier()
    timer = threading.Timer(1.0, appear)
    if not never:
        timer.start()
    found = find(root, own_root=own, saves_next=False)
    timer.cancel()
    dist.barrier()
    return found, sorted(p.name for p in root.iterdir() if p.name.startswith("step-"))


def _link_all_but(root: Path, view: Path, late: str) -> Callable[[], None]:
    """A tree of links to all files but those of one name; what makes that appear."""

    def link(directory: Path, *, all_but: str | None) -> None:
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            if all_but is not None and (all_but == "." or name == all_but or name.startswith(f"{all_but}/")):
                continue
            target = directory / name
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            elif not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path)

    link(view, all_but=late)
    return lambda: link(view, all_but=None)


def _judge_late(name: str, never: bool, by_rank: Any) -> Case:
    where = "the directory" if name == "." else "the step" if name.count("/") == 0 else "a file"
    place = f"rank 1, {where} {'never' if never else 'a second later'}: {name}"
    if isinstance(by_rank, str):
        return judge(place, by_rank)
    found, names = agreed([f for f, _ in by_rank]), by_rank[0][1]
    problem = "" if names == ["step-00000001", "step-00000002"] else f" something was set aside: {names};"
    if isinstance(found, str) or not never:
        return judge(place, found, allowed=[2], problem=problem)
    kind, seen = ("CheckpointError", "rank 0 has locked") if name == "." else ("SourceError", "rank 0 sees")
    if f"rank 1: {kind}" not in found.error or seen not in found.error:
        problem += f" expected an error that names rank 1 and why, got {found};"
    return Case(place, "wrong" if problem else "error", problem=problem)


def _late_save_rows(context: Context) -> Iterator[Row]:
    """Rank 1 does not see the temporary directory that rank 0 has made."""
    started = time.monotonic()
    trials = [(context.fresh(1), never) for never in (False, True)]
    results = context.batches(trials, _save_late, size=1)
    cases = []
    for (_, never), by_rank in zip(trials, results, strict=True):
        place = f"rank 1, a save's directory {'never' if never else 'a second later'}: save"
        if isinstance(by_rank, str):
            cases.append(judge(place, by_rank))
            continue
        heard: list[Attempt] = [told for told, _ in by_rank]
        found = agreed([f for _, f in by_rank])
        expected = ("RankError", 1) if never else ("done", 2)
        problem = "".join(
            f" heard {told.outcome} {told.text};"
            for told in heard
            if told.outcome != expected[0] or (never and "rank 1: CheckpointError" not in told.text)
        )
        cases.append(judge(place, found, heard=heard, allowed=[expected[1]], problem=problem))
    yield from rows_of("peers see it late", cases, time.monotonic() - started)


def _save_late(trial: tuple[Path, bool]) -> tuple[Attempt, Found]:
    root, never = trial
    end: list[float] = []
    own = {name: getattr(os, name) for name in ("stat", "open")}

    def is_late(path: Any) -> bool:
        if not isinstance(path, str) or ".tmp-step" not in path:
            return False
        end.append(time.monotonic() + (10 * TIMEOUT_S if never else 1.0))
        return time.monotonic() < end[0]

    def hiding(name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if is_late(path):
                raise FileNotFoundError(2, "No such file or directory", path)
            return own[name](path, *args, **kwargs)

        return call

    def hide() -> None:
        if dist.get_rank() == 1:
            for name in own:
                setattr(os, name, hiding(name))

    def show() -> None:
        for name, function in own.items():
            setattr(os, name, function)

    try:
        told = attempt(root, "sync", {}, before=hide)
    finally:
        show()
    return told, find(root)


# ------------------------------------------------------------------------------------------------- retention


def retention_rows(context: Context) -> Iterator[Row]:
    """Newest steps that were damaged on disk since they were published: what pruning leaves is still resumed from."""
    damages: dict[str, Callable[[Path], Any]] = {
        "a file truncated": lambda step: os.truncate(next(step.glob("model/shard*")), 9),
        "a file lost": lambda step: (step / "state.json").unlink(),
        "manifest damaged": lambda step: os.truncate(step / "manifest.json", 99),
        "emptied": lambda step: (shutil.rmtree(step), step.mkdir()),
    }
    trials = []
    for what, damage in damages.items():
        # Without an intact manifest nothing proves that the directory is ours: it neither counts nor goes.
        is_ours = what.startswith("a file")
        # Published before, damaged of those, whether the step being saved is damaged before retention looks.
        for before, damaged, own, keep, left in (
            ((1, 2), (2,), False, 2, (1, 2, 3)),
            ((1, 2), (1,), False, 2, (2, 3) if is_ours else (1, 2, 3)),
            ((1, 2, 3, 4), (3, 4), False, 2, (2, 3, 4, 5)),
            ((1, 2), (), True, 1, (2, 3)),
            ((1, 2, 3), (2, 3), True, 1, (1, 2, 3, 4)),
            ((1, 2, 3), (3,), True, 2, (1, 2, 3, 4)),
        ):
            trials.append((context.fresh(*before), what, damage, damaged, own, keep, left))
    started = time.monotonic()
    results = context.batches(trials, _prune_beside)
    cases = []
    for trial, by_rank in zip(trials, results, strict=True):
        cases.append(_judge_retention(trial, by_rank))
    yield from rows_of("retention beside damaged steps", cases, time.monotonic() - started)


def _prune_beside(trial: tuple[Any, ...]) -> tuple[Attempt, list[int], Found]:
    root, _, damage, damaged, own, keep, _ = trial
    run = Tiny()
    newest = max(int(p.name[5:]) for p in root.glob("step-*"))
    with sw.Checkpointer(root, keep_last=keep, io=IO) as checkpoints:
        assert checkpoints.resume(run.state) is not None
        dist.barrier()
        if dist.get_rank() == 0:
            for step in damaged:
                damage(step_path(root, step))
        dist.barrier()
        run.set_values(newest + 1)
        hook = _damage_after_publish(root, newest + 1, damage) if own else None
        with watched(root, hook) if hook is not None and dist.get_rank() == 0 else contextlib.nullcontext():
            told = outcome_of(lambda: checkpoints.save(run.state, newest + 1))
    dist.barrier()
    left = sorted(int(p.name[5:]) for p in root.glob("step-*"))
    dist.barrier()
    return told, left, find(root)


def _damage_after_publish(root: Path, step: int, damage: Callable[[Path], Any]) -> Any:
    """The step is damaged between its publishing and retention: when the hint is written."""
    is_done: list[bool] = []

    def is_hint(call: Call) -> bool:
        if call.name == "replace" and not is_done:
            is_done.append(True)
            damage(step_path(root, step))
        return False

    return fail_while(is_hint)


def _judge_retention(trial: tuple[Any, ...], by_rank: Any) -> Case:
    _, what, _, damaged, own, keep, expected = trial
    saved = "the new one, too" if own else "not the new one"
    place = f"keep_last={keep}: {what}, steps {list(damaged)}, {saved}"
    if isinstance(by_rank, str):
        return judge(place, by_rank)
    _, left, _ = by_rank[0]
    problem = "" if left == list(expected) else f" left are {left}, expected {list(expected)};"
    newest = max(expected)
    valid = [s for s in expected if s not in damaged and not (own and s == newest)]
    case = judge(place, agreed([f for _, _, f in by_rank]), allowed=[max(valid)], new=newest, problem=problem)
    said = "done" if all(told.is_done for told, _, _ in by_rank) else "error"
    if said == "error":
        return Case(place, "wrong", said, f"{case.problem} the save failed: {by_rank[0][0]}")
    return Case(place, case.result, said, case.problem)
