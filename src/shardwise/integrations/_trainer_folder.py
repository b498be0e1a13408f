"""The checkpoints of a Trainer run, and the files of its exports."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..checkpoint.check import quick_check
from ..checkpoint.hosts import Hosts
from ..checkpoint.stored_documents import read_checked
from ..errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    NoCheckpointError,
    ShardwiseError,
    SourceError,
    is_damage,
)
from ..format.documents import parse_documents
from ..format.head import Fate
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..format.steps import TRAINER_FILE
from ..limits import MAX_JSON_BYTES
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks
from ..storage import absolute, is_url, join
from ..store.line import Line
from ..store.write import fsync_directory
from ._trainer_place import trainer_extra
from ._trainer_stand_in import StandIns

__all__ = [
    "Run",
    "contents",
    "held",
    "is_ours",
    "keep_only",
    "move_into",
    "newest",
    "path_in",
    "rotate",
    "set_newer_aside",
]

_log = logging.getLogger(__name__)
#: A shardwise checkpoint, even a damaged one, has at least one of these.
_OURS = ("state.json", "rank/[0-9]*.json", "model/shard-*-model-*.safetensors")


@dataclass(slots=True)
class Run:
    """The state of one call of ``train``."""

    falls_back: bool = False
    """Whether damage leads to the checkpoint before. Not if the caller named one."""
    damaged: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Checkpoints that were skipped, by path: their steps, and what is damaged."""
    resumed_step: int = -1
    published: dict[int, str] = field(default_factory=dict)
    """Paths of the checkpoints that this run has published or resumed from, by step: none is saved again."""
    lines: dict[str, Line] = field(default_factory=dict)
    """Where its checkpoints lie, by directory or URL."""
    stand_ins: StandIns = field(default_factory=StandIns)
    rng: Any = None
    """Random states in the checkpoint."""
    loader: Any = None
    """Trainer's data loader."""
    batches_in_epoch: int = 0
    place: tuple[int, int] = (0, 0)
    """Epoch in which a resume goes on, and the number of its batches before that place."""
    end_is_due: bool = False
    """Whether the checkpoint was saved after the last step of an epoch, and before what comes at the epoch's end."""
    seeds: dict[str, int] = field(default_factory=dict)
    """Seeds in the checkpoint of samplers that seed themselves for each epoch."""


@contextlib.contextmanager
def held(line: Line, hosts: Hosts) -> Iterator[None]:
    """Hold a run's checkpoints: of a directory its lock, on each host that has its own; of a store the right to write to it. Collective."""

    def take() -> None:
        line.open()
        line.held_steps()  # what a save could not do shows now, before anything is trained

    try:
        hosts.on_each(line.root, "lock the place of the checkpoints", take)
        hosts.settle(line.root, is_held=True)
        yield
    finally:
        with Ranks.current().patience():
            line.close()


def is_ours(path: str) -> bool:
    """Whether a directory holds a shardwise checkpoint; otherwise plain Trainer wrote it. True for every URL.

    Raises :class:`IntegrityError` for a shardwise checkpoint that lost its manifest: nothing proves its content.
    """
    if is_url(path) or os.path.isfile(os.path.join(path, MANIFEST_NAME)):
        return True
    if any(glob.glob(pattern, root_dir=path) for pattern in _OURS):
        raise IntegrityError(f"lost: no {MANIFEST_NAME}", path=path)
    return False


def contents(path: str) -> dict[str, Any]:
    """The contents of a Trainer's shardwise checkpoint: ``world_size``, its ``documents``, the ``trainer``'s extras.

    Raises :class:`FormatError` if the place in the data has a wrong form.
    """
    manifest = read_manifest(path)
    documents = parse_documents(read_checked(path, manifest, "state.json", MAX_JSON_BYTES), manifest, path)
    names = sorted({*documents, *manifest.local_documents})
    return {
        "world_size": manifest.world_size,
        "documents": names,
        "trainer": trainer_extra(path, manifest),
    }


def newest(lines: Sequence[Line], damaged: dict[str, tuple[int, str]], hosts: Hosts) -> str:
    """The newest checkpoint of all lines that is intact, as far as a check without payload can tell; empty if there are none.

    Of two of one step that of the first line. Skips those in ``damaged``, and adds newly found damage to it. Collective. Raises
    :class:`NoCheckpointError` if all are damaged. Raises the error of a checkpoint that can't be read for another
    reason, which is not damage.
    """
    if hosts.is_local:
        return _newest_of_hosts(lines[0], damaged, hosts)

    def search() -> list[Any]:
        found = [(step, join(line.root, name)) for line in lines for step, name in line.steps().items()]
        for step, path in sorted(found, key=lambda one: -one[0]):
            if path in damaged:
                continue
            try:
                if is_ours(path):
                    patiently(quick_check, path, step)
                    contents(path)
                elif not os.path.isfile(os.path.join(path, TRAINER_FILE)):
                    raise IntegrityError(f"holds neither {MANIFEST_NAME} nor {TRAINER_FILE}", path=path)
            except (FormatError, IntegrityError) as error:
                _log.warning("skipping damaged %s: %s", path, error)
                damaged[path] = (step, str(error))
                continue
            return [path, {where: list(one) for where, one in damaged.items()}]
        if damaged:
            raise NoCheckpointError(_none_valid(lines[0], damaged))
        return ["", {}]

    path, known = Ranks.current().on_first("find newest checkpoint", search)
    damaged |= {where: (step, why) for where, (step, why) in known.items()}
    return str(path)


def _newest_of_hosts(line: Line, damaged: dict[str, tuple[int, str]], hosts: Hosts) -> str:
    """As :func:`newest`: the newest of which all hosts together hold all parts."""
    ranks = Ranks.current()

    def look() -> list[Any]:
        return [[step, name] for step, name in line.steps().items()]

    of_hosts = hosts.on_each(line.root, "scan checkpoints", look)
    names = {int(step): str(name) for of_host in of_hosts for step, name in of_host}
    for step in sorted(names, reverse=True):
        path = join(line.root, names[step])
        if path in damaged:
            continue
        try:
            with hosts.opened(path, step) as opened:
                ranks.on_first("look at checkpoint", partial(contents, opened.path))
            return path
        except ShardwiseError as error:
            if not is_damage(error):
                raise
            if ranks.rank == 0:
                _log.warning("skipping damaged %s: %s", path, error)
            damaged[path] = (step, str(error))
    if damaged:
        raise NoCheckpointError(_none_valid(line, damaged))
    return ""


def _none_valid(line: Line, damaged: Mapping[str, tuple[int, str]]) -> str:
    why = "; ".join(why for _, why in damaged.values())
    return f"{line.root}: no checkpoint is valid ({why}). Move them away to start again"


def path_in(line: Line, step: int) -> str | None:
    """The path of a step's checkpoint, if the line has it; None also if the place can't be read now. For rank 0."""
    try:
        name = line.steps().get(step)
    except (OSError, CheckpointError, SourceError) as error:
        _log.warning("%s: can't be read: %s", line.root, error)
        return None
    return None if name is None else join(line.root, name)


def set_newer_aside(lines: Iterable[Line], run: Run) -> None:
    """Set checkpoints newer than the resumed one aside: they are kept, but never count as newer ones. For rank 0.

    Raises :class:`LockedError` if another run has taken the line: the checkpoints may belong to it.
    """
    own = max((run.resumed_step, *run.published))
    for line in lines:
        paths = {step: join(line.root, name) for step, name in line.steps().items()}
        damaged = run.damaged.keys() - run.published.values()  # this run may have saved that step anew
        fates = {s: _fate(path, run) for s, path in paths.items() if s > own or path in damaged}
        if fates:
            line.take(own, {step: fate for step, fate in fates.items() if fate == "damaged"})
            words = [f"{os.path.basename(paths[step])} ({_WORDS[fate]})" for step, fate in fates.items()]
            _log.warning("%s: renamed checkpoints: %s", line.root, ", ".join(words))


def _fate(path: str, run: Run) -> Fate:
    return "damaged" if path in run.damaged else "superseded"


_WORDS: dict[Fate, str] = {"damaged": "damaged", "superseded": "of another line than this run"}


def rotate(line: Line, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints, but neither the newest nor the best. For rank 0.

    Never makes the save fail: the new checkpoint is published, and an extra old one does no harm.
    """
    if not limit or limit < 1:
        return
    steps = _steps_to_delete(line)
    kept = {*list(steps)[:1], *_steps_at(line, steps, best)}
    excess = len(steps) - max(limit, len(kept))
    line.remove([step for step in sorted(steps) if step not in kept][: max(excess, 0)])


def keep_only(lines: Sequence[Line], best: str) -> None:
    """Delete all checkpoints but the best, if it is one of them. For rank 0, at the end. Logs what fails."""
    found = [(line, _steps_to_delete(line)) for line in lines]
    kept = [_steps_at(line, steps, best) for line, steps in found]
    if any(kept):
        for (line, steps), own in zip(found, kept, strict=True):
            line.remove(steps.keys() - own)


def _steps_to_delete(line: Line) -> dict[int, str]:
    try:
        return line.own_steps()
    except (OSError, CheckpointError, SourceError) as error:
        _log.warning("no checkpoint is deleted: %s", error)
        return {}


def _steps_at(line: Line, steps: dict[int, str], path: str | None) -> set[int]:
    return {step for step, name in steps.items() if path and join(line.root, name) == absolute(path)}


def move_into(target: str, folder: str, weights: re.Pattern[str]) -> None:
    """Move everything in ``folder`` into ``target``, and delete other weights there, which would mix with these."""
    new = os.listdir(folder)
    _merge(folder, target)
    for name in os.listdir(target):
        if weights.fullmatch(name) and name not in new:
            patiently(os.unlink, os.path.join(target, name))
    fsync_directory(target)


def _merge(folder: str, target: str) -> None:
    """Move the files below ``folder`` to their places below ``target``. What else is in a directory there stays."""
    for name in os.listdir(folder):
        source, to = os.path.join(folder, name), os.path.join(target, name)
        if os.path.isdir(source):
            patiently(os.makedirs, to, exist_ok=True)
            _merge(source, to)
        else:
            patiently(os.replace, source, to)
