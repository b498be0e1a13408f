"""The program of a rank, in schedules of whole runs: it opens the directory, resumes, saves, and closes.

Only what tensors do is left out: :func:`_collect` hands over one small document of each rank, :func:`_restore` reads it back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import shardwise.checkpoint.checkpointer as checkpointer_module
import shardwise.checkpoint.restore as restore_module
import shardwise.checkpoint.save as save_module
from shardwise.catalog.checkpoint import check_size
from shardwise.checkpoint.snapshot import ModelPart, Snapshot, own_parts
from shardwise.checkpoint.stored import read_documents
from shardwise.checkpoint.take import Collected, Lineage
from shardwise.errors import CheckpointError, LockedError, RankError, ShardwiseError
from shardwise.format.manifest import CONVERTED, Manifest
from shardwise.planning.plan import IOOptions
from shardwise.publish.lock import manifest_seen_by_first
from shardwise.state.typed_json import decode, encode
from tests.simulation.agreements import TIMEOUT_S
from tests.simulation.files import ROOT
from tests.simulation.run_judge import Run, judge_holders, judge_locked, judge_wait
from tests.simulation.world import Killed, Process

__all__ = ["launch", "without_tensors"]

_IO = IOOptions(timeout_s=TIMEOUT_S)


class _State:
    """Stands for a ``TrainState``: who writes, and what this rank found."""

    models: Mapping[str, Any] = {}
    optimizers: Mapping[str, Any] = {}

    def __init__(self, launch: int, rank: int, *, is_local: bool) -> None:
        self.launch, self.rank, self.is_local = launch, rank, is_local
        self.found: Any = None

    def has_own(self, manifest: Manifest, ranks: Any) -> bool:
        """Whether a resume reads the document of this rank. At another number of ranks no host fetches them."""
        if self.is_local:
            return bool(manifest.world_size == ranks.world_size)
        return bool(ranks.rank < manifest.world_size)


@dataclass(frozen=True, slots=True)
class _Resumed:
    """Stands for a ``ResumeReport``."""

    step: int
    run_id: str
    path: str
    requests: int = 0
    superseded: tuple[int, ...] = ()

    def with_history(self, damaged: Any, superseded: tuple[int, ...]) -> _Resumed:
        return replace(self, superseded=superseded)


def _collect(state: _State, step: int, lineage: Lineage, ranks: Any) -> Collected:
    ranks.combine("collect state", lambda: [state.launch], lambda found: None)
    return Collected(
        snapshot=_SNAPSHOT,
        assets={},
        step=step,
        lineage=lineage,
        seed=0,
        software={
            CONVERTED: "a simulation"
        },  # such a checkpoint need not hold random states, which are large
        hub_tensors={},
        own=own_parts(_SNAPSHOT, state.rank),
        shared={"step": encode(step), "extra.who": encode({"launch": state.launch, "step": step})},
        local={"extra.own": encode([state.launch, step, state.rank])},
    )


_SNAPSHOT = Snapshot((ModelPart("model", (), (), {}),), (), {}, frozenset(), frozenset(), ())


def _restore(state: _State, path: str, ranks: Any, io: IOOptions) -> _Resumed:
    read = manifest_seen_by_first(path, ranks)
    with ranks.agree("read manifest"):
        manifest = read()
        for name, entry in manifest.files.items() if state.is_local else ():
            check_size(f"{path}/{name}", entry.nbytes)  # as a restore of tensors does
        shared = _decoded(read_documents(path, manifest, "state")["extra.who"])
        own = None
        if state.has_own(manifest, ranks):
            own = _decoded(read_documents(path, manifest, f"rank/{ranks.rank:05d}")["extra.own"])
    state.found = (manifest.step, shared, own)
    return _Resumed(manifest.step, manifest.run_id, path)


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


def launch(run: Run, processes: list[Process], steps: int) -> None:
    """Start the program on each rank."""
    run.expected[processes[0].launch] = max((s for s in run.said if s not in run.damaged), default=0)
    for process in processes:
        process.main = run.world.start(process, functools.partial(_main, run, process, steps))


def _main(run: Run, process: Process, steps: int) -> None:
    """What the program of a rank does."""
    world, state = run.world, _State(process.launch, process.rank, is_local=run.is_local)
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
        if process.leads_host:
            judge_holders(run, process)
        if process.launch == run.forgets:
            _forget(run, checkpoints, state, process, call)
            return
        report = call("resume", lambda: checkpoints.resume(state))
        begin = 0 if report is None else report.step
        run.resumed.setdefault(process.launch, {})[process.rank] = (begin, state.found)
        for step in range(begin + 1, begin + 1 + steps):
            run.tried.add((process.launch, step))
            run.began.setdefault((process.launch, step), world.now)
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
                    f"{ROOT}/{run.home}",
                    keep_last=run.keep_last,
                    mode=run.mode,  # type: ignore[arg-type]
                    local=run.is_local,
                    io=_IO,
                ),
            )
        except LockedError as error:
            judge_locked(run, process, str(error))
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
