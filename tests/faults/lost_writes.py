"""Power loss at every call of a save: every crash that POSIX allows is built, and fresh ranks resume from it.

SIGKILL never loses what is in the page cache. So the calls of both ranks are recorded in the order in which they
happened, and replayed on a model of a disk (``disk.py``) that knows what was fsynced.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shardwise as sw
from tests.faults.calls import note, record_into, recorded, watched
from tests.faults.disk import CRASHES, Disk, Tree, read_tree, write_tree
from tests.faults.rows import Case, Context, Row, judge, rows_of
from tests.faults.tiny import IO, Found, Tiny

__all__ = ["lost_write_rows"]

#: A step and the line that it is of; None where nothing was published.
Finding = tuple[int | None, int]


@dataclass(frozen=True, slots=True)
class _Story:
    """What ranks do while they are recorded, and what may be found after it was marked how far they are."""

    name: str
    steps: tuple[int, ...]
    """Published before."""
    tell: Callable[[Path, Callable[[str], None]], None]
    """Gets the directory, and what marks how far it is."""
    allowed: tuple[tuple[str, tuple[Finding, ...]], ...]
    """By mark, from the start ("") on."""
    new: Finding


def _save_next(mode: str) -> Callable[[Path, Callable[[str], None]], None]:
    def tell(home: Path, mark: Callable[[str], None]) -> None:
        run = Tiny()
        with sw.Checkpointer(home / "run", keep_last=1, mode=mode, io=IO) as checkpoints:  # type: ignore[arg-type]
            assert checkpoints.resume(run.state) is not None
            run.set_values(2)
            checkpoints.save(run.state, 2)
            checkpoints.wait()
            mark("saved")

    return tell


def _save_first(home: Path, mark: Callable[[str], None]) -> None:
    run = Tiny()
    run.set_values(1)
    with sw.Checkpointer(home / "run" / "of" / "mine", io=IO) as checkpoints:
        checkpoints.save(run.state, 1)
        mark("saved")


def _save_alone(home: Path, mark: Callable[[str], None]) -> None:
    run = Tiny()
    run.set_values(1)
    sw.save(run.state, home / "run" / "of" / "mine" / "step-00000001", step=1, io=IO)
    mark("saved")


def _go_back(home: Path, mark: Callable[[str], None]) -> None:
    run = Tiny()
    with sw.Checkpointer(home / "run", keep_last=9, io=IO) as checkpoints:
        report = checkpoints.resume(run.state, 1)
        assert report is not None
        assert report.superseded == (3, 2)
        mark("resumed")
        run.line = 5
        run.set_values(2)
        checkpoints.save(run.state, 2)
        mark("saved")


_NOTHING: Finding = (None, 0)
STORIES = (
    *(
        _Story(
            *(f"{mode} save", (1,), _save_next(mode)),
            *((("", ((1, 0), (2, 0))), ("saved", ((2, 0),))), (2, 0)),
        )
        for mode in ("sync", "async")
    ),
    _Story("first save", (), _save_first, (("", (_NOTHING, (1, 0))), ("saved", ((1, 0),))), (1, 0)),
    _Story("sw.save", (), _save_alone, (("", (_NOTHING, (1, 0))), ("saved", ((1, 0),))), (1, 0)),
    _Story(
        "back to step 1, save",
        (1, 2, 3),
        _go_back,
        (
            ("", ((3, 0), (2, 0), (1, 0))),
            ("resumed", ((1, 0), (2, 5))),
            ("saved", ((2, 5),)),
        ),
        (2, 5),
    ),
)


@dataclass(frozen=True, slots=True)
class _Image:
    tree: Tree
    kind: str
    operations: int
    allowed: tuple[Finding, ...]


def lost_write_rows(context: Context) -> Iterator[Row]:
    for story in STORIES:
        started = time.monotonic()
        home, before, log = _record(context, story)
        images = list(_images(context, story, home, before, log))
        roots = []
        for k, image in enumerate(images):
            write_tree(context.base / f"{home.name}-image-{k}", image.tree)
            roots.append(_root_in(context.base / f"{home.name}-image-{k}"))
        found = context.find_all(roots, saves_next=False)
        cases = [_judge(story, *pair) for pair in zip(images, found, strict=True)]
        yield from rows_of("power loss", cases, time.monotonic() - started)


def _root_in(home: Path) -> Path:
    """Where a run of a story would look for its steps, also if nothing of it is left."""
    inner = home / "run" / "of" / "mine"
    return inner if not (home / "run").is_dir() or (home / "run" / "of").is_dir() else home / "run"


def _record(context: Context, story: _Story) -> tuple[Path, Tree, list[tuple[Any, ...]]]:
    """The directory after the story, its content before, and all calls in between."""
    home = context.base / f"story-{story.name.replace(' ', '-').replace(',', '')}"
    home.mkdir()
    if story.steps:
        context.fresh(*story.steps, under=home).rename(home / "run")
    before, log = read_tree(home), home.with_suffix(".log")

    def tell() -> None:
        with watched(home, record_into(log, dist.get_rank())):
            story.tell(home, lambda what: note(log, what))

    context.forks.run(2, tell)
    return home, before, recorded(log)


def _images(
    context: Context, story: _Story, home: Path, before: Tree, log: list[tuple[Any, ...]]
) -> Iterator[_Image]:
    """Every distinct tree that a crash can leave: after each call, each of the crashes."""
    whole = Disk(before)
    for entry in log:
        if len(entry) > 1:
            whole.replay(entry)
    changed = {p for p, content in read_tree(home).items() if whole.now().get(p, b"?") != content}
    changed ^= whole.now().keys() ^ read_tree(home).keys()
    assert not changed, f"calls of {story.name} were missed: replayed, they do not give {sorted(changed)}"

    draw, seen = random.Random(story.name), set()
    chosen = set(context.sample(range(len(log) + 1), 4))
    disk, marks = Disk(before), {""}
    for count in range(len(log) + 1):
        allowed = [findings for mark, findings in story.allowed if mark in marks][-1]
        for kind in CRASHES if count in chosen else ():
            draws = 1 if kind != "any part of the rest" else 1 if context.short else 8
            for _ in range(draws):
                tree = disk.crash(kind, draw)
                key = (hash(frozenset(tree.items())), allowed)
                if key not in seen:
                    seen.add(key)
                    yield _Image(tree, kind, count, allowed)
        if count < len(log):
            entry = log[count]
            if len(entry) == 1:
                marks.add(entry[0])
            else:
                disk.replay(entry)


def _judge(story: _Story, image: _Image, found: Found | str) -> Case:
    place = f"{story.name}: {image.kind}, after {image.operations} calls"
    case = judge(place, found, allowed=[step for step, _ in image.allowed], new=story.new[0] or 0)
    if case.result == "wrong" or isinstance(found, str):
        return case
    finding: Finding = (found.step, found.line if found.step is not None else 0)
    if finding not in image.allowed:
        return Case(place, "wrong", problem=f"found {finding}, expected one of {image.allowed}")
    return Case(place, "new" if finding == story.new else "previous")
