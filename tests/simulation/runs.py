"""Schedules of whole runs: a ``Checkpointer`` that saves, dies, loses power, is launched again, and must lose no published step.

Only what tensors do is left out: :func:`_collect` hands over one small document of each rank, :func:`_restore` reads it back.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import shardwise.checkpoint.checkpointer as checkpointer_module
import shardwise.checkpoint.restore as restore_module
import shardwise.checkpoint.save as save_module
from shardwise.checkpoint.collect import Collected, Lineage
from shardwise.checkpoint.own_files import own_parts
from shardwise.checkpoint.shared_fs import manifest_seen_by_first
from shardwise.checkpoint.snapshot import ModelPart, Snapshot
from shardwise.checkpoint.stored_documents import read_documents
from shardwise.errors import CheckpointError, LockedError, RankError, ShardwiseError
from shardwise.format.manifest import CONVERTED
from shardwise.planning import IOOptions
from shardwise.state.typed_json import decode, encode
from tests.simulation.agreements import TIMEOUT_S, born, limit_s
from tests.simulation.files import ROOT, Files
from tests.simulation.run_judge import (
    Run,
    judge_end,
    judge_holders,
    judge_launch,
    judge_rename,
    judge_wait,
)
from tests.simulation.store import Server
from tests.simulation.world import Killed, Process, World

__all__ = ["run_problems", "without_tensors"]

_RUN = f"{ROOT}/home/run"
_IO = IOOptions(timeout_s=TIMEOUT_S)
FAULTS = (
    *("a rank dies", "all lose power", "a rank stops", "a rank stops for long"),
    *(
        "is cut off",
        "the store dies",
        "a call fails",
        "a step is damaged",
        "the lock is lost",
        "a file is lost",
    ),
    *("a rank survives",),
)


class _State:
    """Stands for a ``TrainState``: who writes, and what this rank found."""

    def __init__(self, launch: int, rank: int) -> None:
        self.launch, self.rank = launch, rank
        self.found: Any = None


@dataclass(frozen=True, slots=True)
class _Resumed:
    """Stands for a ``ResumeReport``."""

    step: int
    run_id: str
    requests: int = 0
    superseded: tuple[int, ...] = ()

    def with_history(self, damaged: Any, superseded: tuple[int, ...]) -> _Resumed:
        return replace(self, superseded=superseded)


def _collect(state: _State, step: int, lineage: Lineage, ranks: Any) -> Collected:
    ranks.combine("collect state", lambda: [state.launch], lambda found: None)
    return Collected(
        _SNAPSHOT,
        {"step": encode(step), "extra.who": encode({"launch": state.launch, "step": step})},
        {"extra.own": encode([state.launch, step, state.rank])},
        {},
        step,
        lineage,
        0,
        {CONVERTED: "a simulation"},  # such a checkpoint need not hold random states, which are large
        {},
        own_parts(_SNAPSHOT, state.rank),
    )


_SNAPSHOT = Snapshot((ModelPart("model", (), (), {}),), (), {}, frozenset(), frozenset(), ())


def _restore(state: _State, path: str, ranks: Any, io: IOOptions) -> _Resumed:
    seen = manifest_seen_by_first(path, ranks)
    with ranks.agree("read manifest"):
        manifest = seen.manifest()
        shared = _decoded(read_documents(path, manifest, "state")["extra.who"])
        own = None
        if ranks.rank < manifest.world_size:
            own = _decoded(read_documents(path, manifest, f"rank/{ranks.rank:05d}")["extra.own"])
    state.found = (manifest.step, shared, own)
    return _Resumed(manifest.step, manifest.run_id)


def _decoded(encoded: Any) -> Any:
    return decode(encoded.document, encoded.tensors)


@contextmanager
def without_tensors() -> Iterator[None]:
    """Saves collect, and resumes fill, one small document of each rank."""
    places: list[tuple[Any, str, Any]] = [
        *((module, "collect", _collect) for module in (checkpointer_module, save_module)),
        (restore_module, "restore_into", _restore),
    ]
    before = [(where, name, getattr(where, name)) for where, name, _ in places]
    level = logging.getLogger("shardwise").level
    logging.getLogger("shardwise").setLevel(logging.CRITICAL)
    for where, name, value in places:
        setattr(where, name, value)
    try:
        yield
    finally:
        logging.getLogger("shardwise").setLevel(level)
        for where, name, value in before:
            setattr(where, name, value)


# ------------------------------------------------------------------------------------------------ the story


def run_problems(world: World, server: Server, files: Files) -> list[str]:
    """Run one schedule of a run; what was wrong with it."""
    checkpointer_module._NUMBERS = itertools.count()  # each process counts from 0
    draw = world.draw
    run = Run(world, files, draw.choice(("sync", "sync", "async")), draw.choice((1, 1, 2, None)))
    size, launches = draw.choice((1, 2, 2, 3)), draw.choice((2, 2, 3))
    for launch in range(launches):
        is_last = launch == launches - 1
        if launch and draw.random() < 0.3:  # elastic: the launcher goes on with as many as there are
            size = draw.choice((1, 2, 3))
        if is_last or launch:
            kept = draw.random() < 0.5 and not server.is_dead
            server = server if kept else Server(world, server.dropped)
            server.labels = files.labels
        processes = [born(world, server, rank, size, launch) for rank in range(size)]
        run.lock_lost_at = None
        files.on_rename = functools.partial(judge_rename, run)
        if launch and not is_last and draw.random() < 0.15:
            run.forgets = launch
        steps = 1 if is_last else draw.randrange(1, 3)
        _launch(run, processes, steps)
        fault = None if is_last else draw.choice((None, *FAULTS, *FAULTS))
        if fault is not None:
            _plan_fault(run, fault, processes, server)
        survivor = fault == "a rank survives"
        world.run(limit_s=world.now + (60.0 if survivor else 30 * limit_s(world)))
        for process in processes:
            assert process.main is not None
            is_stopped = process.paused_until > world.now
            if not process.is_dead and not process.main.has_ended and not is_stopped:
                world.problems.append(
                    f"hang: launch {launch}, rank {process.rank} still waits at {world.now:.1f} s"
                )
        judge_launch(run, launch, processes, fault)
        files.failing, files.on_rename, files.on_scan = None, None, None
        for process in processes:
            if process.paused_until > world.now and not process.is_dead and survivor:
                world.note(
                    "survives", process
                )  # its host is cut off: the launcher can't kill it, but its end comes
                world.at(process.paused_until + draw.random() * 10.0, process.kill)
                continue
            process.kill()  # as a launcher does before it starts its ranks again
        world.run(limit_s=world.now + 1.0)
        if fault == "all lose power" or (fault is None and not is_last and draw.random() < 0.5):
            world.note(f"power is lost: {files.lose_power()}")
        if world.problems:
            break
        if is_last:
            judge_end(run, launch, files)
    return list(world.problems)


def _launch(run: Run, processes: list[Process], steps: int) -> None:
    run.expected[processes[0].launch] = max((s for s in run.said if s not in run.damaged), default=0)
    for process in processes:
        process.main = run.world.start(process, functools.partial(_main, run, process, steps))


def _main(run: Run, process: Process, steps: int) -> None:
    """What the program of a rank does."""
    world, state = run.world, _State(process.launch, process.rank)
    told = run.ended.setdefault(process.launch, {}).setdefault(process.rank, [])

    def call(name: str, make: Callable[[], Any]) -> Any:
        world.progressed()
        try:
            result = make()
            told.append(f"{name}: ok")
            return result
        except Killed:
            raise
        except RankError as error:
            if not error.causes and not error.missing:
                world.problems.append(f"nameless: {error}")
            told.append(f"{name}: {_plain(error)}")
            raise
        except ShardwiseError as error:
            told.append(f"{name}: {type(error).__name__}: {error}")
            raise
        finally:
            if not process.is_dead:
                judge_wait(run, process, name)
                world.note(told[-1] if told else name)

    checkpoints: Any = None
    try:
        checkpoints = _open(run, call, process)
        if run.holders.get(process.launch) is None and process.rank == 0:
            judge_holders(run, process)
        if process.launch == run.forgets:
            _forget(run, checkpoints, state, process, call)
            return
        report = call("resume", lambda: checkpoints.resume(state))
        begin = 0 if report is None else report.step
        run.resumed.setdefault(process.launch, {})[process.rank] = (begin, state.found)
        for step in range(begin + 1, begin + 1 + steps):
            run.tried.add((process.launch, step))
            call(f"save {step}", lambda s=step: checkpoints.save(state, s))
            if run.mode == "async":
                call(f"wait {step}", checkpoints.wait)
            run.said[step] = process.launch
            world.progressed()
            world.operation(world.draw.random())
    except ShardwiseError:
        pass
    if checkpoints is not None:
        with contextlib.suppress(ShardwiseError):
            call("close", checkpoints.close)


def _open(run: Run, call: Callable[..., Any], process: Process) -> Any:
    """Open the directory; while a process of the launch before still holds it, try again, as a launcher does.

    All ranks try as often: whether the directory may be held is decided when the first of them begins an attempt.
    """
    for attempt in range(100):
        others = [p for p in run.world.processes if p.launch != process.launch]
        was_free = run.was_free.setdefault((process.launch, attempt), all(p.is_dead for p in others))
        try:
            return call(
                "open",
                lambda: checkpointer_module.Checkpointer(
                    _RUN, keep_last=run.keep_last, mode=run.mode, io=_IO
                ),  # type: ignore[arg-type]
            )
        except LockedError:
            if was_free:
                raise
            run.ended[process.launch][process.rank].pop()
            run.world.progressed(run.world.now + 2.0)
            run.world.operation(2.0)
    raise LockedError("a process of the launch before holds the directory for ever")


def _forget(run: Run, checkpoints: Any, state: _State, process: Process, call: Callable[..., Any]) -> None:
    """Save without resuming: refused where there are steps."""
    there = max(run.said, default=0)
    run.tried.add((process.launch, there + 1))
    try:
        checkpoints.save(state, there + 1)
        checkpoints.wait()
    except CheckpointError:
        if there and process.rank == 0:
            run.world.note("the save was refused, as it should be")
    else:
        if there:
            run.world.problems.append(
                f"mixed: step {there + 1} was saved by a run that did not resume step {there}"
            )
        else:
            run.said[there + 1] = process.launch
    checkpoints.close()


def _plain(error: RankError) -> str:
    return f"RankError: {error}"


def _plan_fault(run: Run, fault: str, processes: list[Process], server: Server) -> None:
    world, draw = run.world, run.world.draw
    victim = draw.choice(processes)
    at = draw.randrange(1, 200 if run.mode == "sync" else 260)
    world.note(f"planned: {fault}, rank {victim.rank}")
    if fault == "a rank dies":
        victim.dies_at = at
    elif fault == "all lose power":
        victim.dies_at = at
        world.on_death.append(lambda process: _die_with(process, processes) if process is victim else None)
    elif fault in ("a rank stops", "a rank stops for long"):
        victim.pauses_at = at
        victim.pause_s = TIMEOUT_S * (
            draw.uniform(1.1, 2.5) if fault.endswith("long") else draw.uniform(0.05, 0.8)
        )
    elif fault == "a rank survives":
        victim.pauses_at, victim.pause_s = at, 70.0 + 30.0 * draw.random()
    elif fault == "a step is damaged":
        _damage_next(run)
    elif fault == "the lock is lost":
        processes[0].calls_at = (at, functools.partial(_lose_lock, run, processes[0]))
    elif fault == "a file is lost":
        run.files.on_scan = functools.partial(_lose_file, run)
    elif fault == "is cut off":

        def cut() -> None:
            victim.cut_until = world.now + TIMEOUT_S * draw.uniform(0.1, 2.5)
            world.note("is cut off", victim)
            world.progressed(victim.cut_until)

        world.at(world.now + draw.random() * 5.0, cut)
    elif fault == "the store dies":
        world.at(world.now + draw.random() * 5.0, server.die)
    elif fault == "a call fails":
        run.files.failing = (draw.randrange(0, 60), draw.choice((5, 28)))  # EIO, ENOSPC


def _damage_next(run: Run) -> None:
    """The next step that appears has an empty file: a bad disk."""
    judge = run.files.on_rename

    is_done = False

    def is_step(name: str) -> bool:
        return name.startswith("step-") and "." not in name

    def renamed(old: str, new: str) -> None:
        nonlocal is_done
        home = run.files.node("home/run").entries
        if judge is not None:
            judge(old, new)
        name = new.rpartition("/")[2]
        if name.startswith("step-") and "." not in name and not is_done and any(map(is_step, home)):
            is_done = True
            inner = run.files.node(old).entries["rank"].entries
            inner[max(inner)].content.clear()
            inner[max(inner)].fsync()
            run.damaged.add(int(name[5:]))
            run.was_damaged = True
            run.world.note(f"{name} is damaged")

    run.files.on_rename = renamed


def _lose_lock(run: Run, holder: Process) -> None:
    if run.holders.get(holder.launch) is not holder:
        return
    home = run.files.node("home/run").entries if run.files.has("home/run") else {}
    if home.pop(".lock", None) is not None:
        run.lock_lost_at = run.world.now
        run.world.note("the lock's file is deleted")


def _lose_file(run: Run, path: str) -> None:
    """Another program deletes a file of a save, right before its files are counted."""
    node = run.files.node(path).entries
    if (
        path.rpartition("/")[2].startswith(".tmp-step")
        and node.get("rank") is not None
        and node["rank"].entries
    ):
        node["rank"].entries.pop(min(node["rank"].entries))
        run.files.on_scan = None
        run.world.note(f"a file of {path} is deleted")


def _die_with(_: Process, processes: list[Process]) -> None:
    for process in processes:
        process.kill()
