"""Faults of an object store at every request of a save, a resume, retention and a copy; and SIGKILL there."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shardwise as sw
from shardwise.errors import CheckpointError, LockedError, ShardwiseError
from shardwise.format.head import parse_head
from tests.faults.forks import Scenario
from tests.faults.objects import (
    KINDS,
    Fault,
    Place,
    Remembered,
    digest_of,
    fresh_place,
    injected,
    line_problems,
    proxy_of,
    small_state,
    use_directly,
    use_proxy,
)
from tests.faults.rows import Case, Context, Row, rows_of
from tests.faults.tiny import Attempt, outcome_of
from tests.harness.object_store import S3Server

__all__ = ["Before", "remembered", "store_rows"]

#: Seeds: step N of the runs that are there before has N; the save under faults, the one after it by the same process, and that of a
#: fresh process have these and N.
_VICTIM, _AGAIN, _FRESH = 10, 20, 30
_SEEDS = range(40)
#: Faults tried by one process.
_BATCH = 8


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
        return Remembered(
            self.digests, by_name, {n: (_VICTIM + n, _AGAIN + n, _FRESH + n) for n in range(1, 9)}
        )


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
class _Begun:
    """An operation that is about to begin."""

    act: Callable[[], object]
    """What faults are injected into."""
    go_on: Callable[[], list[str]] = list
    """Then, without a fault, in the same process: what is wrong."""
    said: Callable[[], list[str]] = list
    """What is wrong with what a call that did not raise returned."""


@dataclass(frozen=True, slots=True)
class _Operation:
    steps: tuple[int, ...] | None
    """Of the run that is there before; None: not of a run."""
    begin: Callable[[Before, Place, Path], _Begun]
    look: Callable[[Before, Place, Path, _Heard], tuple[str, list[str]]]
    """Afterwards, by a process without faults: ``previous`` or ``new``, and what is wrong."""


@dataclass(frozen=True, slots=True)
class _Heard:
    attempt: Attempt | None
    """None: it was killed."""
    spoiled: frozenset[str] = frozenset()
    went_on: bool = False

    @property
    def is_done(self) -> bool:
        return self.attempt is not None and self.attempt.is_done


def _a_save(
    step: int, *, mode: Any = "sync", keep_last: int | None = None
) -> Callable[[Before, Place, Path], _Begun]:
    def begin(before: Before, place: Place, folder: Path) -> _Begun:
        checkpoints = sw.Checkpointer(place.url, mode=mode, keep_last=keep_last)
        if step > 1:
            checkpoints.resume(small_state(99))
        state = small_state(_VICTIM + step)
        checkpoints.prepare(state)
        return _Begun(
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
    def look(before: Before, place: Place, folder: Path, heard: _Heard) -> tuple[str, list[str]]:
        newest, wrong = line_problems(place, before.known(steps), _FRESH + 9, spoiled=heard.spoiled)
        allowed: set[int | None] = {step} if heard.is_done else {step, max(steps, default=None)}
        if heard.went_on:
            allowed = {step + 1} if heard.is_done else {step, step + 1}
        if newest not in allowed:
            wrong.append(f"newest is step {newest}, expected one of {allowed}")
        return "new" if newest is not None and newest >= step else "previous", wrong

    return look


def _a_resume(step: int | None) -> Callable[[Before, Place, Path], _Begun]:
    """Of step 2: by itself where step 3 is damaged, or asked for."""

    def begin(before: Before, place: Place, folder: Path) -> _Begun:
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

        return _Begun(lambda: reports.append(checkpoints.resume(small_state(99), step)), go_on, said)

    return begin


def _look_at_resume(steps: tuple[int, ...]) -> Callable[..., tuple[str, list[str]]]:
    def look(before: Before, place: Place, folder: Path, heard: _Heard) -> tuple[str, list[str]]:
        known = before.known(steps)
        damaged = {name for name, step in known.by_name.items() if -step in steps} | heard.spoiled
        head = place.head()
        assert head is not None
        newest, wrong = line_problems(place, known, _FRESH + 9, spoiled=frozenset(damaged))
        least = 1 if heard.spoiled else 2
        if newest is None or newest < least:
            wrong.append(f"newest is step {newest}")
        lost = {1, 2} - set(head.steps) if not heard.spoiled else set()
        if lost:
            wrong.append(f"lost steps {sorted(lost)}: {head}")
        return "new" if heard.is_done or 3 not in head.steps else "previous", wrong

    return look


def _save_to_url(before: Before, place: Place, folder: Path) -> _Begun:
    return _Begun(lambda: sw.save(small_state(_VICTIM + 1), f"{place.url}/step-00000001", step=1))


def _look_at_url(before: Before, place: Place, folder: Path, heard: _Heard) -> tuple[str, list[str]]:
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
        sw.save(small_state(_FRESH), url, step=1)
        if is_there:
            wrong.append("was saved a second time")
    except CheckpointError as error:
        if not any(text in str(error) for text in ("is there already", "another save has claimed it")):
            wrong.append(f"the next save: {error}")
        if not is_there:  # what the error says
            place.clear()
            sw.save(small_state(_FRESH), url, step=1)
    found, text = digest_of(url)
    if found != before.digests[_VICTIM + 1 if is_there else _FRESH]:
        wrong.append(f"after the next save: {text or 'other values'}")
    return "new" if is_there else "previous", wrong


def _restore_of_url(before: Before, place: Place, folder: Path) -> _Begun:
    place.put({f"step-00000001/{name}": content for name, content in before.checkpoint.items()})
    state, digests = small_state(99), []
    return _Begun(
        lambda: digests.append(sw.restore(state, f"{place.url}/step-00000001").digest),
        said=lambda: [] if digests == [before.digests[1]] else [f"restored {digests}"],
    )


def _look_at_restored(before: Before, place: Place, folder: Path, heard: _Heard) -> tuple[str, list[str]]:
    use_directly(place.server)
    found, text = digest_of(f"{place.url}/step-00000001")
    wrong = [] if heard.spoiled or found == before.digests[1] else [f"now: {text or 'other values'}"]
    return "new" if heard.is_done else "previous", wrong


def _copy_up(before: Before, place: Place, folder: Path) -> _Begun:
    source, url = _written(before, folder), f"{place.url}/step-00000001"
    return _Begun(lambda: sw.copy(source, url))


def _look_at_copy_up(before: Before, place: Place, folder: Path, heard: _Heard) -> tuple[str, list[str]]:
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
        sw.copy(source, url)
    except ShardwiseError as error:
        if not (heard.spoiled and "holds something else" in str(error)):
            wrong.append(f"the next copy: {error}")
        place.clear()
        sw.copy(source, url)
    if digest_of(url)[0] != before.digests[1]:
        wrong.append("after the next copy: other values")
    return "new" if is_there else "previous", wrong


def _copy_down(before: Before, place: Place, folder: Path) -> _Begun:
    place.put({f"step-00000001/{name}": content for name, content in before.checkpoint.items()})
    url, out = f"{place.url}/step-00000001", folder / "out" / "step-00000001"
    return _Begun(lambda: sw.copy(url, out))


def _look_at_copy_down(before: Before, place: Place, folder: Path, heard: _Heard) -> tuple[str, list[str]]:
    use_directly(place.server)
    out = folder / "out" / "step-00000001"
    is_there = out.exists()
    wrong = [] if is_there or not heard.is_done else ["the copy was done, and is not there"]
    if not is_there and not heard.spoiled:
        try:
            sw.copy(f"{place.url}/step-00000001", out)
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


_OPERATIONS = {
    "first save": _Operation((), _a_save(1), _look_at_save(1, ())),
    "save, keep_last=1": _Operation((1,), _a_save(2, keep_last=1), _look_at_save(2, (1,))),
    "async save": _Operation((1,), _a_save(2, mode="async"), _look_at_save(2, (1,))),
    "resume, newer superseded": _Operation((1, 2, 3), _a_resume(2), _look_at_resume((1, 2, 3))),
    "resume, newest damaged": _Operation((1, 2, -3), _a_resume(None), _look_at_resume((1, 2, -3))),
    "save to a URL": _Operation(None, _save_to_url, _look_at_url),
    "restore of a URL": _Operation(None, _restore_of_url, _look_at_restored),
    "copy up": _Operation(None, _copy_up, _look_at_copy_up),
    "copy down": _Operation(None, _copy_down, _look_at_copy_down),
}


# ------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True, slots=True)
class _Item:
    operation: str
    fault: Fault
    place: Place
    folder: Path

    def label(self, hit: str = "") -> str:
        return f"{self.fault.kind}: {self.operation}, request {self.fault.number}, {hit}"


def store_rows(context: Context) -> Iterator[Row]:
    before: Before = context.forks.run(1, lambda: remembered(context.servers()[0]))[0]
    for name in context.sample(list(_OPERATIONS), 3):
        started = time.monotonic()
        items = _items(context, name, before)
        killed = [item for item in items if item.fault.kind.startswith("SIGKILL")]
        others = [item for item in items if not item.fault.kind.startswith("SIGKILL")]
        found = context.batches(others, lambda item: _try(before, item), world_size=1, size=_BATCH)
        cases = [_case_of(item, by_rank) for item, by_rank in zip(others, found, strict=True)]
        cases += _kill_all(context, before, killed)
        yield from rows_of(f"store: {name}", cases, time.monotonic() - started)


def _items(context: Context, name: str, before: Before) -> list[_Item]:
    servers = context.servers()
    counted = _new_item(context, name, Fault("503 once", 0), servers[0])
    log = context.forks.run(1, lambda: _requests(before, counted))[0]
    assert log, name
    faults = [
        Fault(kind.name, number)
        for kind in KINDS.values()
        for number in range(sum(kind.takes(asked) for asked in log))
    ]
    return [
        _new_item(context, name, fault, servers[k % len(servers)])
        for k, fault in enumerate(context.sample(faults, 5))
    ]


def _new_item(context: Context, name: str, fault: Fault, server: S3Server) -> _Item:
    return _Item(name, fault, fresh_place(server), context.fresh())


def _requests(before: Before, item: _Item) -> list[Any]:
    """The requests of an operation without a fault. On one rank."""
    proxy, begun = _begin(before, item)
    with injected(proxy, None, item.place):
        begun.act()
        log = list(proxy.log)
    _forget(item)
    return log


def _begin(before: Before, item: _Item) -> tuple[Any, _Begun]:
    if dist.is_initialized():
        dist.destroy_process_group()
    operation = _OPERATIONS[item.operation]
    item.folder.mkdir(parents=True, exist_ok=True)
    if operation.steps is not None:
        item.place.put(before.runs[operation.steps])
    proxy = proxy_of(item.place.server)
    use_proxy(proxy)
    return proxy, operation.begin(before, item.place, item.folder)


def _try(before: Before, item: _Item) -> Case:
    """One fault that the process outlives. On one rank."""
    proxy, begun = _begin(before, item)
    with injected(proxy, item.fault, item.place) as hit:
        attempt = outcome_of(begun.act)
    wrong = [] if hit else ["the request never came"]
    if attempt.outcome.startswith("raw"):
        wrong.append(f"an error that is not ours: {attempt.text}")
    wrong += begun.said() if attempt.is_done else []
    spoiled = _spoiled(before, item)
    went_on = bool(item.fault.number % 2) and not spoiled
    if went_on:
        wrong += begun.go_on()
    heard = _Heard(attempt, spoiled, went_on)
    result, problems = _OPERATIONS[item.operation].look(before, item.place, item.folder, heard)
    _forget(item)
    wrong += problems
    told = "done" if attempt.is_done else "error"
    label = item.label("".join(hit))
    if wrong:
        return Case(label, "wrong", told, f"{'; '.join(wrong)} (it said: {attempt.outcome} {attempt.text})")
    return Case(label, "new" if result == "new" else "previous", told)


def _spoiled(before: Before, item: _Item) -> frozenset[str]:
    """The directories that a fault changed."""
    if item.fault.kind != "changed underneath":
        return frozenset()
    steps = _OPERATIONS[item.operation].steps
    known = before.runs[steps] if steps is not None else {}
    if steps is None:
        return frozenset({"step-00000001"})
    there = item.place.objects()
    changed = {name for name, content in there.items() if name in known and known[name] != content}
    new = {name.partition("/")[0] for name in there if name not in known}
    folders = {name.partition("/")[0] for name in changed if name != "head.json"}
    return frozenset(folders | ({n for n in new if n.startswith("step-")} if not folders else set()))


def _forget(item: _Item) -> None:
    item.place.clear()
    shutil.rmtree(item.folder, ignore_errors=True)


def _case_of(item: _Item, found: list[Case] | str) -> Case:
    if isinstance(found, str):
        return Case(item.label(), "wrong", "", found, hung="ranks hung" in found)
    return found[0]


def _kill_all(context: Context, before: Before, items: Sequence[_Item]) -> list[Case]:
    """SIGKILL of the process that asks, before or after the request is carried out."""

    def victim(item: _Item) -> None:
        proxy, begun = _begin(before, item)
        with injected(proxy, item.fault, item.place):
            begun.act()

    def one(item: _Item) -> Scenario[str]:
        launch = context.forks.start(1, victim, item)
        yield launch.ended
        if launch.statuses[0] == -signal.SIGKILL and not launch.hung:
            launch.forget()
            return ""
        return f"{'ranks hung' if launch.hung else 'never killed'}: {launch.output(0)}"

    def look(item: _Item) -> tuple[str, list[str]]:
        if dist.is_initialized():
            dist.destroy_process_group()
        found = _OPERATIONS[item.operation].look(before, item.place, item.folder, _Heard(None))
        _forget(item)
        return found

    ended = context.all([lambda item=item: one(item) for item in items])
    found = context.batches(items, look, world_size=1, size=_BATCH)
    cases = []
    for item, problem, by_rank in zip(items, ended, found, strict=True):
        if isinstance(by_rank, str):
            cases.append(Case(item.label(), "wrong", "", by_rank, hung="ranks hung" in by_rank))
            continue
        result, problems = by_rank[0]
        wrong = [*([problem] if problem else []), *problems]
        if wrong:
            cases.append(Case(item.label(), "wrong", "", "; ".join(wrong), hung="ranks hung" in problem))
        else:
            cases.append(Case(item.label(), "new" if result == "new" else "previous"))
    return cases
