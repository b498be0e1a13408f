"""A Trainer's run: the files next to its weights, the checkpoint that it resumes from, its newest one, and when it stops."""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from safetensors import safe_open
from transformers import TrainerCallback

from ..checkpoint.sites import Hosts, Opened
from ..checkpoint.stored import read_checked
from ..checkpoint.verify import quick_check
from ..errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    NoCheckpointError,
    ShardwiseError,
    UnsupportedConversionError,
    is_corruption,
)
from ..export.hub import ExportReport, export_hf
from ..format.header import TRAINER_FILE
from ..format.manifest import MANIFEST_NAME, Manifest, read_manifest
from ..internals.peft import adapter_configs, peft_model
from ..limits import inside, parse_json
from ..planning.hub_rules import adapter_tensors
from ..publish.line import Line
from ..publish.lock import remove_ours
from ..publish.places import make_temporary
from ..publish.write import fsync_directory
from ..ranks.ranks import Ranks, patiently
from ..ranks.stop import PreemptionPolicy, Stops
from ..storage import absolute
from ..storage.records import is_url, join
from ..tensors.live import describe
from ._folders import listed
from ._trainer_data import contents

# ----------------------------------------------------------------------------------------------------
# Files that Trainer and its subclasses write beside the weights, for checkpoints and exports.

_log = logging.getLogger(__name__)
#: Weights in hub format, of either kind.
FULL = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")
_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")
#: Small files are held in memory on their way into a checkpoint.
MAX_FILES_BYTES = 2 * 1024**3


def drop_empty_weights(folder: str) -> None:
    """Delete weight files of Trainer's ``_save`` without tensors; files with tensors stay."""
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            if name.endswith(".safetensors") and (FULL.fullmatch(name) or ADAPTER.fullmatch(name)):
                with safe_open(path, "pt") as file:
                    is_empty = not list(file.keys())
                if is_empty:
                    patiently(os.unlink, path)


def read_all(folder: str) -> dict[str, bytes]:
    """Every file below a folder, by relative path. Raises :class:`CheckpointError` above 2 GiB."""
    found: dict[str, bytes] = {}
    paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    total = sum(map(os.path.getsize, paths))
    if total > MAX_FILES_BYTES:
        raise CheckpointError(
            f"{folder}: save_model or _save wrote {total} bytes next to the weights, the limit is {MAX_FILES_BYTES}: write "
            f"large files in a callback's on_save, elsewhere"
        )
    for path in paths:
        with open(path, "rb") as file:
            found[os.path.relpath(path, folder).replace(os.sep, "/")] = file.read()
    return found


def gathered(ranks: Ranks, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of all ranks on rank 0 (for equal names the lowest rank's); none on other ranks. Collective."""
    found = dict(files) if ranks.rank == 0 else {}
    own = None if ranks.rank == 0 else dict(files)  # rank 0 has its own already
    for of_rank in ranks.gather("files next to the weights", own) or ():
        for name, content in (of_rank or {}).items():
            found.setdefault(name, content)
    return found


@contextmanager
def exported(model: Any, parent: str, what: str) -> Iterator[tuple[str, ExportReport]]:
    """Export the model into a temporary folder below ``parent``, which is deleted after the block. Yields the folder and the report.
    Collective."""
    ranks = Ranks.current()
    unfinished = ranks.on_first(
        f"make room for the {what}", lambda: make_temporary(os.path.join(parent, what), ())
    )
    folder = os.path.join(unfinished, "files")
    try:
        yield folder, export_hf(model, folder)
    finally:
        if ranks.rank == 0:
            remove_ours(unfinished)


def adapter_files(model: Any, run_dir: str | None, ranks: Ranks) -> dict[str, bytes]:
    """The files of a ``PeftModel``'s adapters, as PEFT reads them, on rank 0; none for other models. Collective.

    Gathers them through a temporary folder in ``run_dir``, which all ranks must see; there are none without it, with a warning. Adapters that PEFT computes when it stores them (prompt and
    prefix tuning) have no files, with a warning: the checkpoint holds them as the model does.
    """
    if peft_model(model) is None:
        return {}
    refused = ranks.combine(
        "look at the adapters", lambda: _refused(model), lambda found: next(filter(None, found), None)
    )
    if run_dir is None:
        refused = refused or "no directory is seen by all hosts (local=True); export them by save_model"
    if refused is not None or run_dir is None:
        if ranks.rank == 0:
            _log.warning("the checkpoint has no copy of the adapters for PEFT: %s", refused)
        return {}

    with exported(model, run_dir, "adapter") as (folder, report), ranks.agree("read adapter"):
        if ranks.rank == 0 and report.total_bytes > MAX_FILES_BYTES:
            _log.warning("adapters have %d bytes: the checkpoint has no copy for PEFT", report.total_bytes)
        elif ranks.rank == 0:
            return read_all(folder)
    return {}


def _refused(model: Any) -> str | None:
    """Why the adapters have no files for PEFT; None if they have. Rank-local."""
    try:
        live = describe(model)
        for adapter in adapter_configs(model):
            adapter_tensors(live, adapter)
    except UnsupportedConversionError as error:
        return str(error)
    return None


def save_processing(processing: Any) -> dict[str, bytes]:
    """The files that a tokenizer or processor saves, by relative path; none for None."""
    if processing is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        processing.save_pretrained(folder)
        return read_all(folder)


def into_model(folder: str, files: Collection[str]) -> None:
    """Move ``files`` from the top of a checkpoint into its ``model/``, where exports look; the save links them back."""
    for name in files:
        if os.path.isfile(source := os.path.join(folder, name)):
            target = os.path.join(folder, "model", name)
            patiently(os.makedirs, os.path.dirname(target), exist_ok=True)
            patiently(os.replace, source, target)
    for name in sorted({os.path.dirname(name) for name in files} - {""}, reverse=True):
        with contextlib.suppress(OSError):  # another class's files may be there, too
            os.rmdir(os.path.join(folder, name))


def add_beside(folder: str, files: Mapping[str, bytes]) -> None:
    """Add files to an export without replacing its weights, configs and code."""
    for name, content in files.items():
        path = os.path.join(folder, name)
        is_its_own = name.endswith((".py", ".safetensors", ".index.json")) or name in _CONFIGS
        if not (is_its_own and os.path.exists(path)):
            patiently(os.makedirs, os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)


# ----------------------------------------------------------------------------------------------------
# The checkpoint that a run resumes from. Trainer opens a local folder: for a checkpoint in a store, or in parts on several hosts, one
# with the small files, without the state.


class Resumed:
    """A checkpoint that a call of ``train`` resumes from, on this rank."""

    def __init__(self, path: str, hosts: Hosts) -> None:
        self.path = self.folder = path
        """The checkpoint, and the folder that Trainer opens for it."""
        self.best: str | None = None
        """The best checkpoint that its ``trainer_state.json`` names, if Trainer can't look for it: a URL, or a path on the host of the saved
        run's rank 0."""
        self._hosts = hosts
        self._stack, self._folders = ExitStack(), ExitStack()
        self._opened: Opened | None = None

    def make_folder(self) -> None:
        """Make the folder, unless all ranks see the checkpoint itself. Collective.

        Raises as :func:`.read_manifest` and :meth:`.Hosts.opened`; :class:`FormatError` for a checkpoint that no ``ShardwiseTrainer``
        has written, :class:`IntegrityError` for a damaged file.
        """
        if not is_url(self.path) and not self._hosts.is_local:
            return
        self.path = absolute(self.path)
        opened = self.reading()
        with Ranks.current().agree("fetch Trainer's files"):
            temporary = tempfile.TemporaryDirectory(prefix="shardwise-resumed-")
            self.folder = self._folders.enter_context(temporary)
            self.best = _fetch(opened.path, read_manifest(opened.path), self.folder)

    def reading(self) -> Opened:
        """The checkpoint, open until :meth:`opened` has closed it. Collective.

        Trainer may train again from the same folder, as with ``auto_find_batch_size``: it is then opened again.
        """
        if self._opened is None:
            self._opened = self._stack.enter_context(self._hosts.opened(self.path, also=_is_small))
        return self._opened

    @contextmanager
    def opened(self) -> Iterator[Opened]:
        """The checkpoint for the block; it is closed with it. Collective."""
        with self._stack:
            try:
                yield self.reading()
            finally:
                self._opened = None

    def close(self) -> None:
        """Delete the folder."""
        self._stack.close()
        self._folders.close()


def _fetch(path: str, manifest: Manifest, folder: str) -> str | None:
    """Copy the files at the top, but weights and documents, into ``folder``. Returns the best checkpoint, if one is named."""
    if TRAINER_FILE not in manifest.files:
        raise FormatError(
            f"contains no {TRAINER_FILE}, which checkpoints of a ShardwiseTrainer have; restore it with shardwise.restore",
            path=path,
        )
    best = None
    for name in manifest.files:
        if not _is_small(name):
            continue
        content = read_checked(path, manifest, name, MAX_FILES_BYTES)
        if name == TRAINER_FILE:
            best, content = _without_best(content, inside(path, name))
        with open(inside(folder, name), "wb") as file:
            file.write(content)
    return best


def _is_small(name: str) -> bool:
    """Whether a file at the top is one of Trainer's."""
    return not ("/" in name or name == "state.json" or name.endswith(".safetensors"))


def _without_best(content: bytes, path: str) -> tuple[str | None, bytes]:
    """The best checkpoint in Trainer's state, if there is one, and the state without it."""
    state = parse_json(content, path, "Trainer's state")
    if not isinstance(state, dict):
        raise FormatError("is not Trainer's state: not a JSON object", path=path)
    best = state.get("best_model_checkpoint")
    if not isinstance(best, str):
        return None, content
    return best, json.dumps({**state, "best_model_checkpoint": None}, indent=2).encode()


# ----------------------------------------------------------------------------------------------------
# A Trainer run: its state, its stops, its checkpoints, and the files of its exports.

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
    base: dict[tuple[str, str], int] = field(default_factory=dict)
    """Digests of what its checkpoints only refer to, by model and name."""
    lines: dict[str, Line] = field(default_factory=dict)
    """Where its checkpoints lie, by directory or URL."""
    resumed: list[Resumed] = field(default_factory=list)
    """The checkpoints that it has tried to resume from."""
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

    def checkpoint_in(self, folder: str, hosts: Hosts) -> Resumed:
        """The checkpoint for which Trainer opens a folder; any other folder is one itself."""
        found = next((one for one in self.resumed if one.folder == folder), None)
        if found is None:
            self.resumed.append(found := Resumed(folder, hosts))
        return found

    def close(self) -> None:
        """Close the checkpoints, and delete the folders that were made for them."""
        for one in self.resumed:
            one.close()


class StoppedInEvaluationError(Exception):
    """Ends an evaluation on every rank, at the same batch."""


class Watch(TrainerCallback):
    """While ``train`` runs, checks after each step and each batch of an evaluation whether to stop. Also notes when an epoch has ended."""

    def __init__(self) -> None:
        self.stops: Stops | None = None
        self.is_listening = False
        self.epoch_has_ended = False
        """Whether the end of the present epoch has come: its callbacks, and its evaluation."""

    @property
    def has_stopped(self) -> bool:
        return self.stops is not None and self.stops.has_stopped

    @contextmanager
    def listening(self, policy: PreemptionPolicy | None) -> Iterator[None]:
        """Listen for signals in the block. Collective."""
        self.stops = None if policy is None else Stops(policy, Ranks.current())
        self.is_listening = self.stops is not None
        try:
            yield
        finally:
            self.is_listening = False
            if self.stops is not None:
                self.stops.close()

    def _should_stop(self, state: Any) -> bool:
        if self.stops is None or not self.is_listening:
            return False  # an evaluation outside of ``train``
        return self.stops.should_stop(state.global_step, Ranks.current())

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epoch_has_ended = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # An evaluation that is due begins and ends with its first batch: its loader draws a number, on which a resume depends.
        if self._should_stop(state):
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epoch_has_ended = True
        if self.has_stopped:
            control.should_evaluate = False

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._should_stop(state):
            raise StoppedInEvaluationError


@contextmanager
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


def newest(lines: Sequence[Line], damaged: dict[str, tuple[int, str]], hosts: Hosts) -> str:
    """The newest checkpoint of all lines that is intact, as far as a check without payload can tell; empty if there are none.

    Of two of one step that of the first line. Skips those in ``damaged``, and adds newly found damage to it. Collective. Raises
    :class:`NoCheckpointError` if all are damaged. Raises the error of a checkpoint that can't be read for another
    reason, which is not damage.
    """
    ranks, steps = Ranks.current(), {line.root: line.steps for line in lines}
    for step, path in listed([*steps], hosts, lambda root: steps[root]()):
        if path in damaged:
            continue
        try:  # of hosts that have parts of it: whether they have all
            with hosts.opened(path, step) as opened:
                look = partial(_look_at, opened.path, None if hosts.is_local else step)
                ranks.on_first("look at checkpoint", look)
                return path
        except ShardwiseError as error:
            if not is_corruption(error):
                raise
            damaged[path] = (step, str(error))
        if ranks.rank == 0:
            _log.warning("skipping damaged %s: %s", path, damaged[path][1])
    if damaged:
        found = "; ".join(why for _, why in damaged.values())
        raise NoCheckpointError(
            f"{lines[0].root}: no checkpoint is valid ({found}). Move them away to start again"
        )
    return ""


def _look_at(path: str, step: int | None) -> None:
    """Raise the error that tells of a checkpoint's damage. ``step``: None if its files were checked before. For rank 0."""
    if is_ours(path):
        if step is not None:
            patiently(quick_check, path, step)
        contents(path)
    elif not os.path.isfile(os.path.join(path, TRAINER_FILE)):
        raise IntegrityError(f"holds neither {MANIFEST_NAME} nor {TRAINER_FILE}", path=path)


def set_newer_aside(lines: Iterable[Line], run: Run) -> None:
    """Set checkpoints newer than the resumed one aside: they are kept, but never count as newer ones. For rank 0.

    Raises :class:`LockedError` if another run has taken the line: the checkpoints may belong to it.
    """
    own = max((run.resumed_step, *run.published))
    damaged = run.damaged.keys() - run.published.values()  # this run may have saved that step again
    for line in lines:
        paths = {step: join(line.root, name) for step, name in line.steps().items()}
        bad = {step for step, path in paths.items() if path in damaged}
        aside = [step for step in paths if step > own or step in bad]
        if aside:
            line.take(own, dict.fromkeys(bad, "damaged"))
            words = [
                f"{os.path.basename(paths[step])} ({'damaged' if step in bad else 'of another line than this run'})"
                for step in aside
            ]
            _log.warning("%s: renamed checkpoints: %s", line.root, ", ".join(words))


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
