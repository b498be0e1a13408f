"""The Trainer's folders: files next to the weights, the line of checkpoint folders, and classes that come before and after ours."""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from safetensors import safe_open

from ..checkpoint.sites import Hosts, Opened
from ..checkpoint.stored import read_checked
from ..checkpoint.verify import quick_check
from ..errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    NoCheckpointError,
    ShardwiseError,
    SourceError,
    UnsupportedConversionError,
    is_damage,
)
from ..export.hub import export_hf
from ..format.header import TRAINER_FILE, Fate, checked_step
from ..format.manifest import MANIFEST_NAME, Manifest, parse_documents, read_manifest
from ..internals.peft import adapter_configs, peft_model
from ..limits import MAX_JSON_BYTES, inside, parse_json
from ..planning.hub_rules import adapter_tensors
from ..publish.line import DirectoryLine, Line, line_of
from ..publish.lock import DirectoryLock, is_checkpoint, remove_ours
from ..publish.places import delete_all, delete_sealed, make_temporary, sweep_leftovers
from ..publish.write import fsync_directory
from ..ranks.ranks import Ranks, patiently
from ..storage import absolute
from ..storage.records import is_url, join
from ..tensors.live import describe
from ._trainer_data import trainer_extra

__all__ = [
    "ADAPTER",
    "CheckpointFolders",
    "FULL",
    "LOCK_NAME",
    "Run",
    "StandIns",
    "adapter_files",
    "add_beside",
    "contents",
    "drop_empty_weights",
    "gathered",
    "held",
    "into_model",
    "is_ours",
    "keep_only",
    "move_into",
    "newest",
    "overrides",
    "path_in",
    "read_all",
    "rotate",
    "save_processing",
    "set_newer_aside",
    "trainer_line_of",
    "without_fsdp",
]


# ----------------------------------------------------------------------------------------------------
# Files that Trainer and its subclasses write beside the weights, for checkpoints and exports.

_log = logging.getLogger(__name__)
#: Weights in hub format, of either kind.
FULL = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")
_CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")
#: Small files are held in memory on their way into a checkpoint.
MAX_FILES_BYTES = 2 * 1024**3


def overrides(cls: type, base: type, name: str) -> bool:
    """Whether a class after the mixin ``base`` in the method resolution order overrides a method of ``base``'s base."""
    order = cls.__mro__
    behind = order[order.index(base) + 1 :]
    return next(k for k in behind if name in vars(k)) is not next(
        k for k in base.__mro__[1:] if name in vars(k)
    )


@contextmanager
def without_fsdp(trainer: Any) -> Iterator[None]:
    """Hide FSDP from Trainer, which would gather the model for its ``_save``, or not call it. We write the weights."""
    was, trainer.is_fsdp_enabled = trainer.is_fsdp_enabled, False
    try:
        yield
    finally:
        trainer.is_fsdp_enabled = was


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

    unfinished = ranks.on_first(
        "make room for the adapter", lambda: make_temporary(os.path.join(run_dir, "adapter"), ())
    )
    folder = os.path.join(unfinished, "files")
    try:
        report = export_hf(model, folder)
        with ranks.agree("read adapter"):
            if ranks.rank == 0 and report.total_bytes > MAX_FILES_BYTES:
                _log.warning(
                    "adapters have %d bytes: the checkpoint has no copy for PEFT", report.total_bytes
                )
            elif ranks.rank == 0:
                return read_all(folder)
    finally:
        if ranks.rank == 0:
            remove_ours(unfinished)
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
# Local folders that Trainer opens in place of checkpoints in a store, or in parts on several hosts: with the small files, without
# the state.


@dataclass(slots=True)
class _StandIn:
    path: str
    """The checkpoint."""
    opened: Opened | None
    best: str | None
    """The best checkpoint that its ``trainer_state.json`` names: Trainer would look for a directory, on each rank."""
    stack: ExitStack
    """Closes the checkpoint, which is then None; it may be opened again."""


class StandIns:
    """The folders of one call of ``train``, on this rank."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._found: dict[str, _StandIn] = {}

    def folder_for(self, path: str | os.PathLike[str], hosts: Hosts) -> str:
        """The folder that Trainer opens for a checkpoint: one that all ranks see itself, else a new one with its small files. Collective.

        Raises as :func:`.read_manifest` and :meth:`.Hosts.opened`; :class:`FormatError` for a checkpoint that no ``ShardwiseTrainer``
        has written, :class:`IntegrityError` for a damaged file.
        """
        path = os.fspath(path)
        if not is_url(path) and not hosts.is_local:
            return path
        path = absolute(path)
        stack = self._stack.enter_context(ExitStack())
        opened = stack.enter_context(hosts.opened(path, also=_is_small))
        with Ranks.current().agree("fetch Trainer's files"):
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-resumed-"))
            best = _fetch(opened.path, read_manifest(opened.path), folder)
            self._found[folder] = _StandIn(path, opened, best, stack)
        return folder

    @contextmanager
    def opened(self, folder: str, hosts: Hosts) -> Iterator[Opened]:
        """The checkpoint for which a folder stands, for the block; it is closed with it. Collective."""
        found = self._found.get(folder)
        if found is None:
            with hosts.opened(folder) as opened:
                yield opened
            return
        with found.stack:
            try:
                yield self._again(found, hosts)
            finally:
                found.opened = None

    def reading_place(self, folder: str, hosts: Hosts) -> str:
        """Where this rank reads the checkpoint for which a folder stands, until :meth:`opened` has closed it. Collective."""
        found = self._found.get(folder)
        return folder if found is None else self._again(found, hosts).path

    def _again(self, found: _StandIn, hosts: Hosts) -> Opened:
        """The checkpoint. It is closed if Trainer trains again from the same folder, as with ``auto_find_batch_size``."""
        if found.opened is None:
            found.opened = found.stack.enter_context(hosts.opened(found.path, also=_is_small))
        return found.opened

    def path_of(self, folder: str) -> str:
        """The checkpoint for which a folder stands; for any other folder itself."""
        found = self._found.get(folder)
        return folder if found is None else found.path

    def best_of(self, folder: str) -> str | None:
        """The best checkpoint that the stored state of a stand-in names: a URL, or a path on the host of rank 0 of then."""
        found = self._found.get(folder)
        return None if found is None else found.best

    def close(self) -> None:
        """Delete the folders."""
        self._stack.close()


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
# The checkpoints of a Trainer run, and the files of its exports.

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


# ----------------------------------------------------------------------------------------------------
# Where a Trainer run's checkpoints lie: ``checkpoint-N`` in a directory, or the steps of a run in an object store. Both are lines.

#: ``push_to_hub`` skips names with a leading underscore, as it skips ``checkpoint-N``.
LOCK_NAME = "_lock"


def trainer_line_of(root: str, *, sweeps: bool = True) -> Line:
    """The checkpoints in a directory, under Trainer's names, or below a URL, under those of a run in a store.

    Without ``sweeps`` the directory is one of several hosts': the caller settles what killed saves left there.
    """
    return line_of(root) if is_url(root) else CheckpointFolders(root, sweeps=sweeps)


class CheckpointFolders(DirectoryLine):
    """``checkpoint-N`` in a directory. Implements :class:`.Line`.

    Names of other things in it begin with an underscore or a dot, so that ``push_to_hub`` skips them.
    """

    def open(self) -> None:
        lock = DirectoryLock(self.root, name=LOCK_NAME)
        while not lock.has_its_name():  # the run before deleted it, after this one had opened it
            lock.release()
            lock = DirectoryLock(self.root, name=LOCK_NAME)
        self._lock = lock
        if self._sweeps:
            sweep_leftovers(self.root)

    def close(self) -> None:
        if self._lock is not None and self._lock.has_its_name():
            with contextlib.suppress(OSError):
                patiently(os.unlink, os.path.join(self.root, LOCK_NAME))
        super().close()

    def steps(self) -> dict[int, str]:
        names = os.listdir(self.root) if os.path.isdir(self.root) else []
        found = {int(m[1]): n for n in names if (m := re.fullmatch(r"checkpoint-(\d+)", n))}
        return {s: n for s, n in sorted(found.items(), reverse=True) if os.path.isdir(self._path(n))}

    def own_steps(self) -> dict[int, str]:
        """Also those of plain Trainer, whose own rotation would delete them."""
        return {step: name for step, name in self.steps().items() if self._is_own(self._path(name))}

    def remove(self, steps: Iterable[int]) -> None:
        own = self.own_steps()
        delete_all([self._path(own[step]) for step in steps if step in own], self._is_own)

    def _is_own(self, path: str) -> bool:
        is_trainers = os.path.isfile(os.path.join(path, TRAINER_FILE)) and not os.path.islink(path)
        return is_trainers or is_checkpoint(path)

    def fresh_name(self, step: int) -> str:
        return f"checkpoint-{checked_step(step)}"

    def take(self, resumed: int, aside: Mapping[int, Fate]) -> None:
        for step, name in self.held_steps().items():
            if step <= resumed and step not in aside:
                continue
            path = self._path(name)
            moved = self._path(f"_{aside.get(step, 'superseded')}-{name}-{secrets.token_hex(4)}")
            try:
                patiently(os.rename, path, moved)
            except OSError as error:
                raise CheckpointError(f"{path}: can't be renamed: {error.strerror}") from error
            fsync_directory(self.root)

    def tidy(self, newest: int) -> None:
        """Delete sealed parts of failed saves, which are of no use now; :meth:`open` has deleted other leftovers."""
        if not self._sweeps:
            delete_sealed(self.root)

    def was_ever_published(self) -> bool:
        return any("checkpoint-" in name for name in os.listdir(self.root))

    def strangers(self, damaged: Iterable[int] = ()) -> str | None:
        return None

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)
