"""Races of two writers on one prefix of an object store: one line wins, whole."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

import shardwise as sw
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.format.header import Head
from shardwise.format.manifest import Manifest, parse_manifest
from tests.faults.objects import (
    Place,
    Remembered,
    digest_of,
    fresh_place,
    line_problems,
    proxy_of,
    small_state,
    use_directly,
    use_proxy,
)
from tests.faults.rows import Case, Context, Row, rows_of
from tests.faults.store_operations import Before, remembered
from tests.harness.object_store import BUCKET, Asked, Do, Proxy

__all__ = ["race_rows"]

#: Races of one process, one after the other.
_BATCH = 4
#: One request waits so long: the other writer passes meanwhile. Which one is drawn for each race.
_PAUSE_S, _AMONG = 0.25, 90
#: What the loser may be told.
_TEXTS = (
    "another run has taken over these steps",
    "that this run did not resume from",
    "claimed by another save",
    "exists already",
)


@dataclass(frozen=True, slots=True)
class _Won:
    """A save that returned."""

    step: int
    seed: int
    path: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(slots=True)
class _Writer:
    number: int
    root: str
    digests: frozenset[str]
    won: list[_Won] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def save(self, checkpoints: sw.Checkpointer, step: int) -> None:
        seed = 10 * self.number + step
        self.won.append(_Won(step, seed, checkpoints.save(small_state(seed), step).path))

    def resume(self, checkpoints: sw.Checkpointer) -> int:
        report = checkpoints.resume(small_state(0))
        assert report is not None
        if report.digest not in self.digests:
            self.wrong.append(f"writer {self.number} resumed other values: {report}")
        return report.step

    def run(self, act: Callable[[], None], start: threading.Barrier) -> None:
        start.wait()
        try:
            act()
        except ShardwiseError as error:
            text = f"{type(error).__name__}: {error}"
            self.refused.append(text)
            if not isinstance(error, CheckpointError) or not any(t in text for t in _TEXTS):
                self.wrong.append(f"writer {self.number} was told: {text}")
        except Exception as error:
            self.wrong.append(f"writer {self.number}, an error that is not ours: {error!r}")


#: Begins what a writer does in the race.
_Begin = Callable[[_Writer], Callable[[], None]]


def _first_save(writer: _Writer) -> Callable[[], None]:
    return lambda: writer.save(sw.Checkpointer(writer.root), 1)


def _resume_and_save(writer: _Writer) -> Callable[[], None]:
    def act() -> None:
        checkpoints = sw.Checkpointer(writer.root)
        writer.save(checkpoints, writer.resume(checkpoints) + 1)

    return act


def _go_on(keep_last: int | None) -> _Begin:
    """Two saves of a run that is under way."""

    def begin(writer: _Writer) -> Callable[[], None]:
        checkpoints = sw.Checkpointer(writer.root, keep_last=keep_last)
        step = writer.resume(checkpoints)
        return lambda: [writer.save(checkpoints, step + k) for k in (1, 2)] and None

    return begin


def _save_to_url(writer: _Writer) -> Callable[[], None]:
    seed, url = 10 * writer.number + 1, f"{writer.root}/step-00000001"
    return lambda: writer.won.append(_Won(1, seed, sw.save(small_state(seed), url, step=1).path))


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    races: int
    steps: tuple[int, ...]
    """Of the run that is there before."""
    writers: tuple[_Begin, _Begin]


_KINDS = (
    _Kind("two first saves", 300, (), (_first_save, _first_save)),
    _Kind("both resume and save", 250, (1,), (_resume_and_save, _resume_and_save)),
    _Kind("one saves, one resumes", 150, (1,), (_go_on(None), _resume_and_save)),
    _Kind("one prunes, one resumes", 200, (1,), (_go_on(1), _resume_and_save)),
    _Kind("two saves to one URL", 100, (), (_save_to_url, _save_to_url)),
)


@dataclass(frozen=True, slots=True)
class _Race:
    kind: _Kind
    number: int
    place: Place


def race_rows(context: Context) -> Iterator[Row]:
    servers = context.servers()
    before: Before = context.forks.run(1, lambda: remembered(servers[0]))[0]
    for kind in _KINDS:
        started = time.monotonic()
        numbers = context.sample(range(kind.races), 1)
        races = [_Race(kind, n, fresh_place(servers[n % len(servers)])) for n in numbers]
        found = context.batches(races, lambda race: _run(before, race), world_size=1, size=_BATCH)
        cases = [_case_of(race, by_rank) for race, by_rank in zip(races, found, strict=True)]
        yield from rows_of("store: race of two", cases, time.monotonic() - started)


def _case_of(race: _Race, found: list[list[str]] | str) -> Case:
    label = f"{race.kind.name}: race {race.number}"
    if isinstance(found, str):
        return Case(label, "wrong", "", found, hung="ranks hung" in found)
    return Case(label, "wrong" if found[0] else "new", "", "; ".join(found[0]))


def _run(before: Before, race: _Race) -> list[str]:
    """What is wrong after a race. On one rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
    race.place.clear()
    race.place.put(before.runs[race.kind.steps] if race.kind.steps else {})
    proxy = proxy_of(race.place.server)
    use_proxy(proxy)
    url, digests = race.place.url, frozenset(before.digests.values())
    writers = [_Writer(number, url, digests) for number in (1, 2)]
    acts = [begin(writer) for begin, writer in zip(race.kind.writers, writers, strict=True)]
    _shake(proxy, race.number)
    start = threading.Barrier(2)
    threads = [
        threading.Thread(target=writer.run, args=(act, start))
        for writer, act in zip(writers, acts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    proxy.reset()
    wrong = [text for writer in writers for text in writer.wrong]
    look = _look_at_url if race.kind.writers[0] is _save_to_url else _look_at_line
    wrong += look(before, race, writers)
    race.place.clear()
    return [*wrong, f"refused: {[w.refused for w in writers]}"] if wrong else []


def _shake(proxy: Proxy, seed: int) -> None:
    """Every request waits a little, and one of them long."""
    chance = random.Random(seed)
    long = chance.randrange(_AMONG)
    waits = [chance.random() * 0.01 for _ in range(_AMONG)]

    def decide(asked: Asked) -> Do:
        return Do(wait_s=_PAUSE_S if asked.number == long else waits[asked.number % _AMONG])

    proxy.reset(decide)


def _winners(writers: Sequence[_Writer]) -> list[_Won]:
    return sorted((won for writer in writers for won in writer.won), key=lambda won: won.step)


def _look_at_url(before: Before, race: _Race, writers: Sequence[_Writer]) -> list[str]:
    use_directly(race.place.server)
    won = _winners(writers)
    if len(won) != 1:
        return [f"{len(won)} writers won"]
    found, text = digest_of(won[0].path)
    return [] if found == before.digests[won[0].seed] else [f"the winner's is {text or 'other values'}"]


def _look_at_line(before: Before, race: _Race, writers: Sequence[_Writer]) -> list[str]:
    won = _winners(writers)
    head = race.place.head()
    if head is None or not won:
        return ["no writer won"]
    wrong = []
    if len({one.step for one in won}) < len(won):
        wrong.append(f"two winners of one step: {won}")
    if race.kind.writers[0] is _first_save and len(won) != 1:
        wrong.append(f"two first saves: {won}")
    if head.steps.get(won[-1].step) != won[-1].name or max(head.steps) != won[-1].step:
        wrong.append(f"the head's newest is {max(head.steps)}, and {won[-1]} was saved")
    wrong += _chain_problems(race.place, head)
    by_name = before.known(race.kind.steps).by_name | {one.name: one.seed for one in won}
    known = Remembered(before.digests, by_name, {})
    return [*wrong, *line_problems(race.place, known, 30)[1]]


def _chain_problems(place: Place, head: Head) -> list[str]:
    """Every step of a line goes on from the one before it, and all are of one run."""
    names = [head.steps[step] for step in sorted(head.steps)]
    manifests = [_manifest(place, name) for name in names]
    wrong = [] if len({m.run_id for m in manifests}) == 1 else [f"steps of several runs: {names}"]
    for older, newer in itertools.pairwise(manifests):
        if newer.parent_step != older.step:
            wrong.append(f"step {newer.step} goes on from {newer.parent_step}, not from {older.step}")
    return wrong


def _manifest(place: Place, name: str) -> Manifest:
    return parse_manifest(place.server.call("GET", f"/{BUCKET}/{place.key}/{name}/manifest.json"), name)
