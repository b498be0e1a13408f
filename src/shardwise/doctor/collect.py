"""Collects the facts: of this machine, and of each path that was given. Judges nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field, replace

from ..catalog.kinds import kind_of
from ..errors import SourceError
from ..format.manifest import MANIFEST_NAME
from ..format.steps import OTHERS_NAME, TRAINER_FILE
from ..limits import brief
from ..runs.history import losses_in, losses_of_steps, numbered_steps, others_steps, rates_in
from ..storage import absolute, is_directory, is_file, is_url, names_in
from .bucket import look_at_bucket
from .checkpoints import holds_checkpoint, look_at_checkpoint, look_for_lost
from .facts import Bucket, Checkpoint, Facts, Foreign, Log, Model, Place, Settings
from .logs import log_of_losses, read_log
from .machine import look_at_machine
from .probe import PREFIX, delete_probes, look_at_place
from .rule import count, number
from .settings import ARGUMENTS_FILE, is_accelerate, is_arguments, read_pickled_arguments, read_settings
from .software import launch_variables, requirements, versions
from .weights import holds_weights, look_at_model, look_at_stored_model

__all__ = ["collect", "sizes_of"]

#: What all paths of one call may take, and one path.
_ALL_S, _EACH_S = 12.0, 10.0
#: Files of the given paths that ranks compare.
_MOST_FILES = 2_000


_KINDS = (
    "places",
    "buckets",
    "accelerate",
    "arguments",
    "models",
    "checkpoints",
    "logs",
    "foreign",
    "unknown",
    "absent",
)
#: Of the numbered checkpoints of the Trainer or Accelerate, the newest that are looked at.
_STEPS_CHECKED = 3
#: Those whose names are read, and how many next to each are compared with it.
_STEPS_LISTED, _NEIGHBORS = 200, 4


@dataclass(slots=True)
class _Found:
    """What the given paths turned out to be."""

    places: list[Place] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    accelerate: list[Settings] = field(default_factory=list)
    arguments: list[Settings] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    foreign: list[Foreign] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    taken_for: dict[str, str] = field(default_factory=dict)
    silent: dict[str, float] = field(default_factory=dict)


def collect(paths: Iterable[str], *, outputs: Iterable[str] = (), ranks: int | None = None) -> Facts:
    """Facts of this machine and of ``paths``. Rank-local.

    A path may be an Accelerate YAML, TrainingArguments as JSON or in ``training_args.bin``, a model directory, a checkpoint or a
    directory of them, a ``trainer_state.json``, a log, a URL, or a directory in which a run will write. ``outputs``: directories or URLs in which a run will write; one
    that does not exist yet is looked at through the nearest directory above it. ``ranks``: how many are to run on this host; None: as the launcher, the given YAML or the devices
    say. Writes at most 64 MiB into each directory to be written, and deletes them. Takes at most about 20 s.

    Raises :class:`SourceError` for a path that can't be read.
    """
    found = _Found()
    end = time.monotonic() + _ALL_S
    for look, path in (*((_look_at, path) for path in paths), *((_look_at_output, path) for path in outputs)):
        if "\0" in os.fspath(path):
            raise SourceError("no path has a NUL character", path=brief(os.fspath(path)))
        _look_with_limit(look, absolute(path), found, max(2.0, min(_EACH_S, end - time.monotonic())))
    environment = launch_variables()
    machine = look_at_machine()
    return Facts(
        ranks=ranks or _ranks_here(environment, found.accelerate, machine.gpus),
        machine=machine,
        software=versions(),
        environment=environment,
        requirements=requirements(),
        places=tuple(found.places),
        buckets=tuple(found.buckets),
        accelerate=tuple(found.accelerate),
        arguments=tuple(found.arguments),
        models=tuple(found.models),
        checkpoints=tuple(found.checkpoints),
        logs=tuple(found.logs),
        foreign=tuple(found.foreign),
        unknown=tuple(found.unknown),
        absent=tuple(found.absent),
        taken_for=found.taken_for,
        silent=found.silent,
    )


def _ranks_here(environment: dict[str, str], accelerate: list[Settings], gpus: int) -> int:
    given = environment.get("LOCAL_WORLD_SIZE") or environment.get("SLURM_NTASKS_PER_NODE") or ""
    if given.isdecimal() and int(given):
        return int(given)
    for settings in accelerate:
        processes = number(settings.values.get("num_processes"))
        machines = number(settings.values.get("num_machines"))
        if processes:
            return max(1, processes // (machines or 1))
    return max(1, gpus)


def _look_with_limit(look_at: Callable[[str, _Found], str], path: str, found: _Found, limit_s: float) -> None:
    """Look in a thread: a call into storage that hangs does not return. What comes too late is left out."""
    seen, errors = _Found(), list[Exception]()

    def look() -> None:
        try:
            seen.taken_for[path] = look_at(path, seen)
        except Exception as error:  # raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=copy_context().run, args=(look,), daemon=True, name="shardwise-doctor")
    try:
        thread.start()
        thread.join(limit_s)
    except (
        BaseException
    ):  # Ctrl-C, or a signal that the command turned into an exit: the thread ends with the process
        delete_probes()
        raise
    if thread.is_alive():
        found.silent[path] = limit_s
        found.taken_for[path] = f"unknown: its storage didn't answer within {limit_s:.0f} s"
        return
    for error in errors:
        raise error
    for name in _KINDS:
        getattr(found, name).extend(getattr(seen, name))
    found.taken_for |= seen.taken_for


# Each of these notes facts of a path, and returns what the path was taken for.


def _look_at(path: str, found: _Found) -> str:
    if is_url(path):
        return _look_at_url(path, found)
    if os.path.isdir(path):
        return _look_in(path, found)
    if os.path.lexists(path):
        return _look_at_file(path, found)
    found.absent.append(path)
    return "nothing: it does not exist"


def _look_at_output(path: str, found: _Found) -> str:
    """As :func:`_look_at`; a directory that does not exist is going to be made."""
    if is_url(path) or os.path.lexists(path):
        return _look_at(path, found)
    above = path
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    found.places.append(replace(look_at_place(above), path=path))
    return f"a directory that the run will create; wrote test files to {above}"


def _look_in(path: str, found: _Found) -> str:
    try:
        names = os.listdir(path)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror or error}", path=path) from error
    foreign = _note_foreign(path, found)
    if holds_checkpoint(path, names):
        checkpoint = look_for_lost(look_at_checkpoint(path, names), names, _beside(path))
        found.checkpoints.append(checkpoint)
        if checkpoint.kind != "step" and any(name.endswith(".safetensors") for name in names):
            found.models.append(look_at_model(path))
        if checkpoint.kind == "steps":  # a run continues in it
            found.places.append(look_at_place(path))
            return foreign or _words_of(checkpoint)
        return (foreign or _words_of(checkpoint)) + _and_its_run(path, found)
    if others := others_steps(path):
        return _look_at_numbered(path, others, found)
    if holds_weights(names):
        found.models.append(look_at_model(path))
        return "a model directory" + _and_its_run(path, found)
    if not foreign:
        found.places.append(look_at_place(path))
    return foreign or "a directory to write to; wrote test files to it, and deleted them"


def _and_its_run(path: str, found: _Found) -> str:
    """Look at the numbered checkpoints in an ``output_dir`` that also has the final model; words for that."""
    if not (steps := numbered_steps(path)):
        return ""
    words = _look_at_numbered(path, steps, found)
    # That model is what the run made: its first loss says nothing of how it was loaded.
    found.logs = [replace(log, first_loss=None) for log in found.logs]
    return f", and {words}"


def _beside(path: str) -> list[list[str]]:
    """The names in the numbered checkpoints of the HF Trainer or Accelerate that are next to one, by their steps."""
    if not (own := OTHERS_NAME.fullmatch(os.path.basename(path))):
        return []
    try:
        steps = numbered_steps(os.path.dirname(path))
        near = sorted(
            (step for step in steps if step != int(own[1])), key=lambda step: abs(step - int(own[1]))
        )
        listed = [os.listdir(steps[step]) for step in near[:_NEIGHBORS]]
    except OSError:
        return []  # the directory above may be another user's
    return [names for names in listed if MANIFEST_NAME not in names]


def _look_at_numbered(path: str, steps: Mapping[int, str], found: _Found) -> str:
    """A Trainer's ``output_dir``, or an Accelerate project."""
    for place in [*steps.values()][:_STEPS_CHECKED]:
        names = os.listdir(place)
        if holds_checkpoint(place, names):
            found.checkpoints.append(look_for_lost(look_at_checkpoint(place, names), names, _beside(place)))
    for place in [*steps.values()][_STEPS_CHECKED:_STEPS_LISTED]:
        names = os.listdir(place)
        kind = "step" if MANIFEST_NAME in names else "full"
        older = look_for_lost(Checkpoint(path=place, kind=kind), names, _beside(place))
        found.checkpoints += [older] * bool(older.lost or older.lost_files)
    found.places.append(look_at_place(path))
    words = f"a run of the HF Trainer or Accelerate, {_some_steps(steps)}"
    if losses := losses_of_steps(steps):
        file, points = losses
        found.logs.append(log_of_losses(file, points, steps, rates_in(file)))
        words += f"; {count(len(points), 'loss', 'losses')} in {os.path.relpath(file, path)}"
    return words


def _look_at_url(url: str, found: _Found) -> str:
    try:
        if is_file(url):
            found.unknown.append(url)
            return "an object, which doctor doesn't open"
        names = names_in(url)
    except SourceError as error:
        found.buckets.append(Bucket(url=url, failures={"list": str(error)}))
        return "a URL to write to, which can't be listed"
    if foreign := _note_foreign(url, found):
        return foreign
    words = "a URL to write to; wrote test objects to it, and deleted them"
    if names and holds_checkpoint(url, names):
        checkpoint = look_at_checkpoint(url, names)
        found.checkpoints.append(checkpoint)
        words = _words_of(checkpoint)
    elif names and holds_weights(names):
        found.models.append(look_at_stored_model(url, names))
        return "a model"  # it may well be read-only
    found.buckets.append(look_at_bucket(url))
    return words


def _note_foreign(path: str, found: _Found) -> str | None:
    """The name of the kind of a path that can't be read, which is noted; None for any other path."""
    kind = kind_of(path)
    if kind is None or kind.works:
        return None
    found.foreign.append(Foreign(path=path, name=kind.name, instead=kind.line(path)))
    return kind.name


def _look_at_file(path: str, found: _Found) -> str:
    if foreign := _note_foreign(path, found):
        return foreign
    name = os.path.basename(path)
    if name == TRAINER_FILE:
        return _look_at_state(path, found)
    if name == ARGUMENTS_FILE:
        found.arguments.append(read_pickled_arguments(path))
        return "TrainingArguments, read from a pickle without running it"
    if path.endswith((".yaml", ".yml", ".json")):
        settings = read_settings(path)
        if is_arguments(settings):
            found.arguments.append(settings)
            return "TrainingArguments"
        if is_accelerate(settings):
            found.accelerate.append(settings)
            return "a configuration of Accelerate"
    elif os.path.isfile(path) and not path.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt")):
        log = read_log(path)
        found.logs.append(log)
        return f"a log, {count(log.losses, 'loss', 'losses')}, {count(len(log.lines), 'known line')}"
    found.unknown.append(path)
    return "nothing that doctor knows"


def _look_at_state(path: str, found: _Found) -> str:
    """The Trainer's list of losses, in one of its checkpoints or next to them."""
    folder = os.path.dirname(path)
    root = os.path.dirname(folder) if OTHERS_NAME.fullmatch(os.path.basename(folder)) else folder
    points = losses_in(path)
    found.logs.append(log_of_losses(path, points, numbered_steps(root), rates_in(path)))
    return f"the state of the HF Trainer, {count(len(points), 'loss', 'losses')}"


def _words_of(checkpoint: Checkpoint) -> str:
    if checkpoint.kind == "steps":
        return f"a directory of checkpoints, {_some_steps(checkpoint.steps)}"
    if checkpoint.kind == "step":
        return "a checkpoint"
    kind = kind_of(checkpoint.path)
    return "another program's checkpoint" if kind is None else kind.name


def _some_steps(steps: Collection[int]) -> str:
    if not steps:
        return "without a step"
    newest = sorted(steps)[-_STEPS_CHECKED:]
    return f"{'step' if len(steps) == 1 else 'steps'} {'… ' * (len(steps) > len(newest))}{', '.join(map(str, newest))}"


def sizes_of(paths: Iterable[str]) -> dict[str, int]:
    """Bytes of every local file at or below ``paths``, for comparison with other ranks; at most 2,000 files."""
    found: dict[str, int] = {}
    for path in map(absolute, paths):
        if is_url(path):
            continue
        if os.path.isfile(path):
            found[path] = os.path.getsize(path)
        elif is_directory(path):
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(f for f in folders if not f.startswith(PREFIX))
                for name in sorted(names):
                    if name.startswith(PREFIX):
                        continue
                    try:
                        found[os.path.join(folder, name)] = os.stat(os.path.join(folder, name)).st_size
                    except OSError:
                        continue
                    if len(found) >= _MOST_FILES:
                        return found
    return found
