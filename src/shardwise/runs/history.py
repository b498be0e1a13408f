"""The steps of a run as records, from their manifests, headers and sizes: what was saved when, and what became of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime

from ..checkpoint.check import check_part
from ..errors import ShardwiseError, SourceError
from ..format.head import HEAD_NAME
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..storage import is_file, is_url, join, stat_of_expected
from ..store.line import line_of
from ..store.publish import was_ever_published

__all__ = ["RootContents", "StepSummary", "is_root", "steps_below"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """A step of a checkpoints directory, from its manifest, its headers and the sizes of its files."""

    step: int
    path: str
    ok: bool
    fate: str = "published"
    """``published``; ``superseded`` or ``damaged`` for a step that a resume has set aside."""
    problem: str | None = None
    part: str | None = None
    """Of a directory that holds one host's part of the step: which part, and where the others are."""
    written: str | None = None
    """When the manifest was written: local time with its offset, ISO 8601."""
    run_id: str | None = None
    parent_step: int | None = None
    world_size: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RootContents:
    """The steps of a checkpoints directory, newest first, and leftovers of stopped saves."""

    kind: str = "checkpoints"
    path: str
    steps: tuple[StepSummary, ...]
    set_aside: tuple[StepSummary, ...]
    """Steps that a resume superseded or found damaged: in the history, but never resumed from."""
    leftovers: tuple[str, ...]


def is_root(path: str) -> bool:
    """Whether a path is a directory of checkpoints, or a store's prefix with a head, rather than one checkpoint."""
    if is_file(os.path.join(path, MANIFEST_NAME)):
        return False
    if is_url(path):
        return is_file(join(path, HEAD_NAME))
    try:
        return os.path.isdir(path) and was_ever_published(path)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror or error}", path=path) from error


def steps_below(path: str) -> RootContents:
    """The steps of the run at ``path``. Raises :class:`SourceError`, :class:`CheckpointError`."""
    line = line_of(path)
    aside = sorted(line.set_aside(), key=lambda one: -one.step)
    return RootContents(
        path=path,
        steps=tuple(_step(step, join(path, name), "published") for step, name in line.seen_steps().items()),
        set_aside=tuple(_step(one.step, join(path, one.name), one.why) for one in aside),
        leftovers=tuple(line.leftovers()),
    )


def _step(step: int, path: str, fate: str) -> StepSummary:
    problem = part = None
    try:
        manifest, part = check_part(path, step)
    except ShardwiseError as error:
        problem = str(error)
        try:
            manifest = read_manifest(path)
        except ShardwiseError:
            return StepSummary(step=step, path=path, ok=False, fate=fate, problem=problem)
    written = _written_s(os.path.join(path, MANIFEST_NAME))
    return StepSummary(
        step=step,
        path=path,
        ok=problem is None,
        fate=fate,
        problem=problem,
        part=part,
        written=None
        if written is None
        else datetime.fromtimestamp(written).astimezone().isoformat(timespec="seconds"),
        run_id=manifest.run_id,
        parent_step=manifest.parent_step,
        world_size=manifest.world_size,
        file_bytes=sum(f.nbytes for f in manifest.files.values()),
    )


def _written_s(path: str) -> float | None:
    if not is_url(path):
        return os.stat(path).st_mtime
    found = stat_of_expected(path)
    return None if found is None else found.changed_s
