"""What a process does with an object store while requests fail, and what must be there afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shardwise as sw
from shardwise.errors import CheckpointError, LockedError, ShardwiseError
from shardwise.format.header import parse_head
from tests.faults.objects import (
    Place,
    Remembered,
    digest_of,
    fresh_place,
    line_problems,
    small_state,
    use_directly,
)
from tests.faults.tiny import Attempt
from tests.harness.object_store import S3Server

__all__ = ["OPERATIONS", "Before", "Begun", "Heard", "Operation", "remembered"]

#: Seeds: step N of a run that is there before has N, a save under faults 10 + N, the next one by the same process 20 + N, and that of
#: a fresh process 30.
_VICTIM, _AGAIN, _LOOKED = 10, 20, 30
_SEEDS = (1, 2, 3, 11, 12, 13, 14, 21, 22, 23, 24, 30)


@dataclass(frozen=True, slots=True)
class Before:
    """What the operations begin with."""

    digests: Mapping[int, str]
    runs: Mapping[tuple[int, ...], Mapping[str, bytes]]
    """Objects of runs, by the steps that they hold; -N for a step N that is damaged."""
    checkpoint: Mapping[str, bytes]
    """Of step 1, outside of a run."""

    def known(self, steps: tuple[int, ...]) -> Remembered:
        """What a run that began with these steps may hold."""
        by_name = {}
        if steps:
            head = parse_head(self.runs[steps]["head.json"], "head")
            by_name = {name: step for step, name in head.steps.items()}
        return Remembered(self.digests, by_name, {n: (_VICTIM + n, _AGAIN + n, _LOOKED) for n in range(1, 9)})


def remembered(server: S3Server) -> Before:
    """Make them. On one rank."""
    dist.destroy_process_group()
    use_directly(server)
    with tempfile.TemporaryDirectory() as folder:
        digests = {}
        for seed in _SEEDS:
            path = f"{folder}/{seed}"
            sw.save(small_state(seed), path)
            digests[seed] = sw.restore(small_state(99), path).digest
        runs = {steps: _run_of(server, steps) for steps in ((), (1,), (1, 2, 3), (1, 2, -3))}
        path = f"{folder}/step-00000001"
        sw.save(small_state(1), path, step=1)
        files = [p for p in Path(path).rglob("*") if p.is_file()]
        return Before(digests, runs, {p.relative_to(path).as_posix(): p.read_bytes() for p in files})


def _run_of(server: S3Server, steps: tuple[int, ...]) -> dict[str, bytes]:
    place = fresh_place(server)
    with sw.Checkpointer(place.url) as checkpoints:
        for step in steps:
            checkpoints.save(small_state(abs(step)), abs(step))
    objects = place.objects()
    for name in list(objects):
        if any(f"step-{-step:08d}" in name for step in steps if step < 0) and "/model/" in name:
            objects[name] = objects[name][:-1] + bytes([objects[name][-1] ^ 1])
    place.clear()
    return objects


# -------------------------------------------------------------------------------------------- operations


@dataclass(slots=True)
class Begun:
    """An operation that is about to begin."""

    act: Callable[[], object]
    """What faults are injected into."""
    go_on: Callable[[], list[str]] = list
    """Then, without a fault, in the same process: what is wrong."""
    said: Callable[[], list[str]] = list
    """What is wrong with what a call that did not raise returned."""


@dataclass(frozen=True, slots=True)
class Operation:
    steps: tuple[int, ...] | None
    """Of the run that is there before; None: not of a run."""
    begin: Callable[[Before, Place, Path], Begun]
    look: Callable[[Before, Place, Path, Heard], tuple[str, list[str]]]
    """Afterwards, by a process without faults: ``previous`` or ``new``, and what is wrong."""


@dataclass(frozen=True, slots=True)
class Heard:
    attempt: Attempt | None
    """None: it was killed."""
    spoiled: frozenset[str] = frozenset()
    went_on: bool = False

    @property
    def is_done(self) -> bool:
        return self.attempt is not None and self.attempt.is_done


def _a_save(
    step: int, *, mode: Any = "sync", keep_last: int | None = None
) -> Callable[[Before, Place, Path], Begun]:
    def begin(before: Before, place: Place, folder: Path) -> Begun:
        checkpoints = sw.Checkpointer(place.url, mode=mode, keep_last=keep_last)
        if step > 1:
            checkpoints.resume(small_state(99))
        state = small_state(_VICTIM + step)
        checkpoints.prepare(state)
        return Begun(
            lambda: (checkpoints.save(state, step), checkpoints.wait()),
            lambda: _go_on(checkpoints, step),
        )

    return begin


def _go_on(checkpoints: sw.Checkpointer, step: int) -> list[str]:
    """The same run saves again: the step that failed, and if that is there after all, the next one."""
    for tried in (step, step + 1):
        try:
            checkpoints.save(small_state(_AGAIN + tried), tried)
            checkpoints.wait()
            return []
        except LockedError as error:
            return [f"went on: {error}"]
        except CheckpointError as error:
            if "is not newer than the published step" not in str(error):
                return [f"went on: {error}"]
    return ["went on: no step could be saved"]


def _look_at_save(step: int, steps: tuple[int, ...]) -> Callable[..., tuple[str, list[str]]]:
    def look(before: Before, place: Place, folder: Path, heard: Heard) -> tuple[str, list[str]]:
        newest, wrong = line_problems(place, before.known(steps), _LOOKED, spoiled=heard.spoiled)
        allowed: set[int | None] = {step} if heard.is_done else {step, max(steps, default=None)}
        if heard.went_on:
            allowed = {step + 1} if heard.is_done else {step, step + 1}
        if heard.spoiled:  # the step before stays: retention counts no damaged one
            allowed |= {max(steps, default=None)}
        if newest not in allowed:
            wrong.append(f"newest is step {newest}, expected one of {allowed}")
        return "new" if newest is not None and newest >= step else "previous", wrong

    return look


def _a_resume(step: int | None) -> Callable[[Before, Place, Path], Begun]:
    """Of step 2: by itself where step 3 is damaged, or asked for."""

    def begin(before: Before, place: Place, folder: Path) -> Begun:
        checkpoints = sw.Checkpointer(place.url)
        reports: list[Any] = []

        def said() -> list[str]:
            (report,) = reports
            ok = report is not None and before.digests[report.step] == report.digest and report.step in (1, 2)
            return [] if ok else [f"resumed {report}"]

        def go_on() -> list[str]:
            """A resume that failed has no line: what it read is not saved on top of it."""
            if not reports:
                try:
                    checkpoints.save(small_state(_AGAIN + 4), 4)
                    return ["saved after a resume that failed"]
                except CheckpointError as error:
                    if not any(t in str(error) for t in ("did not resume from", "another run has taken")):
                        return [f"went on: {error}"]
                reports.append(checkpoints.resume(small_state(99), step))
            if problems := said():
                return problems
            checkpoints.save(small_state(_AGAIN + reports[0].step + 1), reports[0].step + 1)
            return []

        return Begun(lambda: reports.append(checkpoints.resume(small_state(99), step)), go_on, said)

    return begin


def _look_at_resume(steps: tuple[int, ...]) -> Callable[..., tuple[str, list[str]]]:
    def look(before: Before, place: Place, folder: Path, heard: Heard) -> tuple[str, list[str]]:
        known = before.known(steps)
        damaged = {name for name, step in known.by_name.items() if -step in steps} | heard.spoiled
        head = place.head()
        assert head is not None
        newest, wrong = line_problems(place, known, _LOOKED, spoiled=frozenset(damaged))
        least = 1 if heard.spoiled else 2
        if newest is None or newest < least:
            wrong.append(f"newest is step {newest}")
        lost = {1, 2} - set(head.steps) if not heard.spoiled else set()
        if lost:
            wrong.append(f"lost steps {sorted(lost)}: {head}")
        return "new" if heard.is_done or 3 not in head.steps else "previous", wrong

    return look


def _save_to_url(before: Before, place: Place, folder: Path) -> Begun:
    return Begun(lambda: sw.save(small_state(_VICTIM + 1), f"{place.url}/step-00000001", step=1))


def _look_at_url(before: Before, place: Place, folder: Path, heard: Heard) -> tuple[str, list[str]]:
    use_directly(place.server)
    url = f"{place.url}/step-00000001"
    wrong = []
    is_there = "step-00000001/manifest.json" in place.names()
    if heard.is_done != is_there and heard.is_done:
        wrong.append("the save was done, and there is no manifest")
    if is_there:
        found, text = digest_of(url)
        if found != before.digests[_VICTIM + 1]:
            wrong.append(f"it has a manifest, but {text or 'other values'}")
    try:
        sw.save(small_state(_LOOKED), url, step=1)
        if is_there:
            wrong.append("was saved a second time")
    except CheckpointError as error:
        if not any(text in str(error) for text in ("exists already", "claimed by another save")):
            wrong.append(f"the next save: {error}")
        if not is_there:  # what the error says
            place.clear()
            sw.save(small_state(_LOOKED), url, step=1)
    found, text = digest_of(url)
    if found != before.digests[_VICTIM + 1 if is_there else _LOOKED]:
        wrong.append(f"after the next save: {text or 'other values'}")
    return "new" if is_there else "previous", wrong


def _restore_of_url(before: Before, place: Place, folder: Path) -> Begun:
    place.put({f"step-00000001/{name}": content for name, content in before.checkpoint.items()})
    state, digests = small_state(99), []
    return Begun(
        lambda: digests.append(sw.restore(state, f"{place.url}/step-00000001").digest),
        said=lambda: [] if digests == [before.digests[1]] else [f"restored {digests}"],
    )


def _look_at_restored(before: Before, place: Place, folder: Path, heard: Heard) -> tuple[str, list[str]]:
    use_directly(place.server)
    found, text = digest_of(f"{place.url}/step-00000001")
    wrong = [] if heard.spoiled or found == before.digests[1] else [f"now: {text or 'other values'}"]
    return "new" if heard.is_done else "previous", wrong


def _copy_up(before: Before, place: Place, folder: Path) -> Begun:
    source, url = _written(before, folder), f"{place.url}/step-00000001"
    return Begun(lambda: sw.copy_checkpoint(source, url))


def _look_at_copy_up(before: Before, place: Place, folder: Path, heard: Heard) -> tuple[str, list[str]]:
    use_directly(place.server)
    source, url = _written(before, folder), f"{place.url}/step-00000001"
    is_there = "step-00000001/manifest.json" in place.names()
    found, text = digest_of(url) if is_there else ("", "")
    wrong = []
    if is_there and found != before.digests[1] and not (heard.spoiled and not heard.is_done):
        wrong.append(f"the copy has a manifest, but {text or 'other values'}")
    if heard.is_done and not is_there:
        wrong.append("the copy was done, and there is no manifest")
    try:
        sw.copy_checkpoint(source, url)
    except ShardwiseError as error:
        if not (heard.spoiled and "holds something else" in str(error)):
            wrong.append(f"the next copy: {error}")
        place.clear()
        sw.copy_checkpoint(source, url)
    if digest_of(url)[0] != before.digests[1]:
        wrong.append("after the next copy: other values")
    return "new" if is_there else "previous", wrong


def _copy_down(before: Before, place: Place, folder: Path) -> Begun:
    place.put({f"step-00000001/{name}": content for name, content in before.checkpoint.items()})
    url, out = f"{place.url}/step-00000001", folder / "out" / "step-00000001"
    return Begun(lambda: sw.copy_checkpoint(url, out))


def _look_at_copy_down(before: Before, place: Place, folder: Path, heard: Heard) -> tuple[str, list[str]]:
    use_directly(place.server)
    out = folder / "out" / "step-00000001"
    is_there = out.exists()
    wrong = [] if is_there or not heard.is_done else ["the copy was done, and is not there"]
    if not is_there and not heard.spoiled:
        try:
            sw.copy_checkpoint(f"{place.url}/step-00000001", out)
        except ShardwiseError as error:
            wrong.append(f"the next copy: {error}")
    if out.exists():
        found = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
        if found != before.checkpoint:
            wrong.append("the copy differs")
    return "new" if is_there else "previous", wrong


def _written(before: Before, folder: Path) -> Path:
    path = folder / "step-00000001"
    for name, content in before.checkpoint.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


OPERATIONS = {
    "first save": Operation((), _a_save(1), _look_at_save(1, ())),
    "save, keep_last=1": Operation((1,), _a_save(2, keep_last=1), _look_at_save(2, (1,))),
    "async save": Operation((1,), _a_save(2, mode="async"), _look_at_save(2, (1,))),
    "resume, newer superseded": Operation((1, 2, 3), _a_resume(2), _look_at_resume((1, 2, 3))),
    "resume, newest damaged": Operation((1, 2, -3), _a_resume(None), _look_at_resume((1, 2, -3))),
    "save to a URL": Operation(None, _save_to_url, _look_at_url),
    "restore of a URL": Operation(None, _restore_of_url, _look_at_restored),
    "copy up": Operation(None, _copy_up, _look_at_copy_up),
    "copy down": Operation(None, _copy_down, _look_at_copy_down),
}
