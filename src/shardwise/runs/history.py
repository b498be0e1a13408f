"""The steps of a run as records, from their manifests, headers and sizes: what was saved when, and what became of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime

from ..checkpoint.verify import check_part
from ..errors import NoCheckpointError, ShardwiseError, SourceError
from ..format.header import HEAD_NAME, OTHERS_NAME, TRAINER_FILE
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..limits import MAX_COUNT, MAX_VALUE_BYTES, read_json
from ..objects import frozen
from ..publish.line import line_of
from ..publish.places import was_ever_published
from ..storage import is_file, stat_of_expected
from ..storage.records import is_url, join

#: Files of one checkpoint that are counted.
_MOST_FILES = 10_000

#: What a resume looks for, under the names of the HF Trainer and of Accelerate.
RESUMED = {
    "optimizer": re.compile(r"optimizer([._].*)?|rank\d+-of-\d+-optimizer\.pt"),
    "scheduler": re.compile(r"scheduler\.pt"),
    "RNG states": re.compile(r"rng_state.*\.pth"),
}
_OF_ACCELERATE = re.compile(r"random_states_\d+\.pkl")
#: Each rank writes its own: of the HF Trainer, and of Accelerate.
_OF_ONE_RANK = re.compile(r"rng_state(_\d+)?\.pth|random_states_\d+\.pkl")
#: DeepSpeed's engine keeps these parts in a directory of its own, and users' scripts in objects that they register.
_KEPT_ELSEWHERE = re.compile(r"global_step\d+|custom_checkpoint_\d+\.pkl")


@frozen(kw_only=True)
class StepSummary:
    """A step of a checkpoints directory, from its manifest, its headers and the sizes of its files."""

    step: int
    path: str
    ok: bool | None
    """Whether manifest, headers and sizes agree. None: not checked, because another program records no sizes and no checksums."""
    fate: str = "published"
    """``published``; ``superseded`` or ``damaged`` for a step that a resume has set aside; ``of the HF Trainer`` or ``of another
    program`` for a checkpoint without a manifest of ours."""
    problem: str | None = None
    part: str | None = None
    """Of a directory that holds one host's part of the step: which part, and where the others are."""
    written: str | None = None
    """When the manifest was written: local time with its offset, ISO 8601."""
    run_id: str | None = None
    parent_step: int | None = None
    world_size: int | None = None
    file_bytes: int | None = None
    has_optimizer: bool | None = None
    """Whether the optimizer's state is stored; without it, training can't be resumed as it was. None: unknown."""


@frozen(kw_only=True)
class RootContents:
    """The steps of a checkpoints directory, newest first, and leftovers from interrupted saves."""

    kind: str = "checkpoints"
    path: str
    steps: tuple[StepSummary, ...]
    set_aside: tuple[StepSummary, ...]
    """Steps that a resume superseded or found damaged: in the history, but never resumed from."""
    leftovers: tuple[str, ...]
    missing: str | None = None
    """What these checkpoints don't tell, and why."""


def is_root(path: str) -> bool:
    """Whether a path holds checkpoints rather than being one: a run of ours, a store's prefix with a head, a Trainer's ``output_dir``,
    an Accelerate project's ``checkpoints`` or the project itself."""
    if is_file(os.path.join(path, MANIFEST_NAME)):
        return False
    if is_url(path):
        return is_file(join(path, HEAD_NAME))
    try:
        return os.path.isdir(path) and (was_ever_published(path) or bool(others_steps(path)))
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror or error}", path=path) from error


def others_steps(path: str) -> Mapping[int, str]:
    """The checkpoints that the HF Trainer and Accelerate number, in a local directory or its ``checkpoints``, newest first: step → path.

    None of a directory that is a model itself, as a Trainer's ``output_dir`` is at the end of its run: it is taken for that. Raises
    ``OSError``.
    """
    names = os.listdir(path)
    if any(name == "config.json" or name.endswith(".safetensors") for name in names):
        return {}
    return numbered_steps(path)


def numbered_steps(path: str) -> Mapping[int, str]:
    """As :func:`others_steps`, also of a directory that has a model as well. Raises ``OSError``."""
    names = os.listdir(path)
    if not any(map(OTHERS_NAME.fullmatch, names)) and "checkpoints" in names:
        path = os.path.join(path, "checkpoints")
        names = os.listdir(path) if os.path.isdir(path) else []
    found = {int(m[1]): os.path.join(path, m[0]) for m in map(OTHERS_NAME.fullmatch, names) if m is not None}
    return {
        step: found[step]
        for step in sorted(found, reverse=True)
        if step <= MAX_COUNT and os.path.isdir(found[step])
    }


def lost_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Which of :data:`RESUMED` a checkpoint of the HF Trainer or Accelerate with these names lacks; of any other, none. Pure."""
    if any(map(_KEPT_ELSEWHERE.fullmatch, names)):
        return ()
    if TRAINER_FILE in names:
        wanted = tuple(RESUMED)
    elif any(map(_OF_ACCELERATE.fullmatch, names)):
        wanted = ("optimizer",)  # it saves a scheduler only if it was prepared
    else:
        return ()
    return tuple(part for part in wanted if not any(map(RESUMED[part].fullmatch, names)))


def ranks_of(names: Sequence[str]) -> int:
    """How many ranks saved a checkpoint of the HF Trainer or Accelerate with these names; 0 if no name tells. Pure."""
    return sum(map(bool, map(_OF_ONE_RANK.fullmatch, names)))


def steps_below(path: str) -> RootContents:
    """The steps of the run at ``path``. Raises :class:`SourceError`, :class:`CheckpointError`."""
    if not is_url(path) and not was_ever_published(path):
        others = numbered_steps(path)
        steps = tuple(_step_of_another(step, place) for step, place in others.items())
        missing = _not_told(others) if any(s.ok is None for s in steps) else None
        return RootContents(path=path, steps=steps, set_aside=(), leftovers=(), missing=missing)
    line = line_of(path)
    aside = sorted(line.set_aside(), key=lambda one: -one.step)
    return RootContents(
        path=path,
        steps=tuple(_step(step, join(path, name), "published") for step, name in line.seen_steps().items()),
        set_aside=tuple(_step(one.step, join(path, one.name), one.why) for one in aside),
        leftovers=tuple(line.leftovers()),
    )


def newest_step(path: str) -> StepSummary | None:
    """The newest step of the run at ``path`` that is valid, as a resume would take it; None of a path that is no directory of steps.

    Another program's newest step is taken unchecked. Raises :class:`NoCheckpointError` if no step is valid, :class:`SourceError`.
    """
    if not is_root(path):
        return None
    if is_url(path) or was_ever_published(path):
        steps = line_of(path).seen_steps()
        found = (_step(step, join(path, name), "published") for step, name in steps.items())
    else:
        found = (_step_of_another(step, place) for step, place in others_steps(path).items())
    for step in found:
        if step.ok is not False:
            return step
    raise NoCheckpointError(
        f"{path}: contains no valid step; shardwise inspect shows what's wrong with each of them"
    )


def _not_told(steps: Mapping[int, str]) -> str:
    """What the newest of another program's checkpoints tells of the run, and what none tells."""
    nothing = "they don't record which step a launch resumed from, so parents and resumes are unknown"
    file = os.path.join(next(iter(steps.values())), TRAINER_FILE)
    try:
        state = read_json(file, "state of the Trainer", MAX_VALUE_BYTES)
    except SourceError:
        return f"Checkpoints of another program: {nothing}"
    known = state if isinstance(state, dict) else {}
    step, last = known.get("global_step"), known.get("max_steps")
    at = f", at step {step} of {last}" if type(step) is int and type(last) is int else ""
    return (
        f"Checkpoints of the HF Trainer{at}: {nothing}; a log of the run may tell: shardwise report train.log"
    )


def losses_of_trainer(path: str) -> tuple[str, dict[int, float]] | None:
    """The losses by step that the newest ``trainer_state.json`` in or below a local directory logs, and that file; None without one."""
    own = os.path.join(path, TRAINER_FILE)
    if os.path.isfile(own) and (points := losses_in(own)):
        return own, points
    return losses_of_steps(numbered_steps(path))


def losses_of_steps(steps: Mapping[int, str]) -> tuple[str, dict[int, float]] | None:
    """As :func:`losses_of_trainer`, of numbered checkpoints, newest first."""
    for place in steps.values():
        file = os.path.join(place, TRAINER_FILE)
        if os.path.isfile(file) and (points := losses_in(file)):
            return file, points
    return None


def losses_in(file: str) -> dict[int, float]:
    """The losses by step that a ``trainer_state.json`` logs. Raises :class:`SourceError`, :class:`FormatError`."""
    return _logged(file, "loss")


def rates_in(file: str) -> dict[int, float]:
    """As :func:`losses_in`, the learning rates."""
    return _logged(file, "learning_rate")


def _logged(file: str, name: str) -> dict[int, float]:
    history = read_json(file, "state of the Trainer", MAX_VALUE_BYTES)
    entries = history.get("log_history") if isinstance(history, dict) else None
    return {
        entry["step"]: float(entry[name])
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict)
        and type(entry.get("step")) is int
        and isinstance(entry.get(name), int | float)
        and 0 <= entry["step"] < 2**53
        and abs(entry[name]) < 2**62
    }


def _step_of_another(step: int, path: str) -> StepSummary:
    """A numbered checkpoint of the Trainer or Accelerate: ours inside, or their own files."""
    if os.path.isfile(os.path.join(path, MANIFEST_NAME)):
        return _step(step, path, "published")
    is_trainer = os.path.isfile(os.path.join(path, TRAINER_FILE))
    nbytes = files = 0
    for folder, _, names in os.walk(path):
        for name in names[: _MOST_FILES - files]:
            nbytes, files = nbytes + os.lstat(os.path.join(folder, name)).st_size, files + 1
    fate = "of the HF Trainer" if is_trainer else "of another program"
    has_optimizer = "optimizer" not in lost_parts(os.listdir(path)) if is_trainer else None
    return StepSummary(
        step=step,
        path=path,
        ok=None,
        fate=fate,
        written=_time(os.stat(path).st_mtime),
        file_bytes=nbytes,
        has_optimizer=has_optimizer,
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
        written=None if written is None else _time(written),
        run_id=manifest.run_id,
        parent_step=manifest.parent_step,
        world_size=manifest.world_size,
        file_bytes=sum(f.nbytes for f in manifest.files.values()),
        has_optimizer=bool(manifest.packed),
    )


def _written_s(path: str) -> float | None:
    if not is_url(path):
        return os.stat(path).st_mtime
    found = stat_of_expected(path)
    return None if found is None else found.changed_s


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
