"""The directory of a Trainer run: its ``checkpoint-N``, its lock, the files of an export."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.check import quick_check
from ..checkpoint.stored_documents import read_checked
from ..errors import CheckpointError, FormatError, IntegrityError, NoCheckpointError
from ..format.documents import parse_documents
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..limits import MAX_JSON_BYTES
from ..ranks.patience import patiently, remove_tree
from ..ranks.ranks import Ranks
from ..store.lock import DirectoryLock, check_held
from ..store.publish import delete_all, sweep_leftovers
from ..store.write import fsync_directory
from ._trainer_place import trainer_extra

__all__ = [
    "STATE_NAME",
    "Run",
    "checkpoints",
    "contents",
    "held",
    "is_ours",
    "move_into",
    "newest",
    "rotate",
    "set_newer_aside",
]

_log = logging.getLogger(__name__)
STATE_NAME = "trainer_state.json"
#: ``push_to_hub`` skips names with a leading underscore, as it skips ``checkpoint-N``.
LOCK_NAME = "_lock"
#: A shardwise checkpoint, even a damaged one, has at least one of these.
_OURS = ("state.json", "rank/[0-9]*.json", "model/shard-*-model-*.safetensors")


@dataclass(slots=True)
class Run:
    """The state of one call of ``train`` and its directory."""

    falls_back: bool = False
    """Whether damage leads to the checkpoint before. Not if the caller named one."""
    damaged: dict[int, str] = field(default_factory=dict)
    """Checkpoints that were skipped, with their damage."""
    resumed_step: int = -1
    published: set[str] = field(default_factory=set)
    rng: Any = None
    """Random states in the checkpoint."""
    loader: Any = None
    """Trainer's data loader."""
    batches_in_epoch: int = 0
    place: tuple[int, int] = (0, 0)
    """Epoch in which a resume goes on, and the number of its batches before that place."""
    seeds: dict[str, int] = field(default_factory=dict)
    """Seeds in the checkpoint of samplers that seed themselves for each epoch."""


@contextlib.contextmanager
def held(root: str) -> Iterator[None]:
    """Hold a run's directory, delete leftovers of killed saves, and delete the lock's file at the end. Collective."""
    lock: DirectoryLock | None = None

    def take() -> None:
        nonlocal lock
        lock = DirectoryLock(root, name=LOCK_NAME)
        while not lock.has_its_name():  # the run before deleted it, after this one had opened it
            lock.release()
            lock = DirectoryLock(root, name=LOCK_NAME)
        sweep_leftovers(root)

    try:
        Ranks.current().on_first("lock output directory", take)
        yield
    finally:
        if lock is not None:
            with Ranks.current().patience():
                if lock.has_its_name():
                    with contextlib.suppress(OSError):
                        patiently(os.unlink, os.path.join(root, LOCK_NAME))
                lock.release()


def is_ours(path: str) -> bool:
    """Whether a directory holds a shardwise checkpoint; otherwise plain Trainer wrote it.

    Raises :class:`IntegrityError` for a shardwise checkpoint that lost its manifest: nothing proves its content.
    """
    if os.path.isfile(os.path.join(path, MANIFEST_NAME)):
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


def checkpoints(root: str) -> dict[int, str]:
    """``checkpoint-N`` in a directory, by falling step."""
    names = os.listdir(root) if os.path.isdir(root) else []
    found = {int(m[1]): os.path.join(root, n) for n in names if (m := re.fullmatch(r"checkpoint-(\d+)", n))}
    return {step: path for step, path in sorted(found.items(), reverse=True) if os.path.isdir(path)}


def newest(root: str, damaged: dict[int, str]) -> str:
    """The newest checkpoint that is intact, as far as a check without payload can tell; empty if there are none.

    Skips those in ``damaged``, and adds newly found damage to it. Collective. Raises :class:`NoCheckpointError` if all
    are damaged. Raises the error of a checkpoint that can't be read for another reason, which is not damage.
    """

    def search() -> list[Any]:
        for step, path in checkpoints(root).items():
            if step in damaged:
                continue
            try:
                if is_ours(path):
                    quick_check(path, step)
                    contents(path)
                elif not os.path.isfile(os.path.join(path, STATE_NAME)):
                    raise IntegrityError(f"holds neither {MANIFEST_NAME} nor {STATE_NAME}", path=path)
            except (FormatError, IntegrityError) as error:
                _log.warning("skipping damaged %s: %s", path, error)
                damaged[step] = str(error)
                continue
            return [path, {str(step): why for step, why in damaged.items()}]
        if damaged:
            found = "; ".join(damaged.values())
            raise NoCheckpointError(f"{root}: no checkpoint is valid ({found}). Move them away to start anew")
        return ["", {}]

    path, known = Ranks.current().on_first("find newest checkpoint", search)
    damaged |= {int(step): why for step, why in known.items()}
    return str(path)


def set_newer_aside(root: str, run: Run) -> None:
    """Rename checkpoints newer than the resumed one: they are kept, but never count as newer ones.

    Their names begin with an underscore, which ``push_to_hub`` skips. For rank 0. Raises :class:`LockedError` if this
    process held the lock on ``root`` and has lost it: the checkpoints may belong to the run that holds it now.
    """
    check_held(root)
    newer = {step: path for step, path in checkpoints(root).items() if step > run.resumed_step}
    for step, path in newer.items():
        if path in run.published:
            continue
        why = "damaged" if step in run.damaged else "superseded"
        aside = os.path.join(root, f"_{why}-{os.path.basename(path)}-{secrets.token_hex(4)}")
        try:
            patiently(os.rename, path, aside)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be set aside: {error.strerror}") from error
        fsync_directory(root)
        _log.warning("%s is %s; it is %s now", path, _WORDS[why], aside)


_WORDS = {"damaged": "damaged", "superseded": "of another line than this run"}


def rotate(root: str, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints, but neither the newest nor the best. For rank 0.

    Never makes the save fail: the new checkpoint is published, and an extra old one does no harm.
    """
    found = list(checkpoints(root).values())
    if not limit or limit < 1:
        return
    kept = {found[0], os.path.abspath(best or found[0])}
    excess = len(found) - max(limit, len(kept))
    delete_all([p for p in reversed(found) if p not in kept][: max(excess, 0)])


def move_into(target: str, folder: str, weights: re.Pattern[str]) -> None:
    """Move everything in ``folder`` into ``target``, and delete other weights there, which would mix with these."""
    new = os.listdir(folder)
    for name in new:
        to = os.path.join(target, name)
        if os.path.isdir(to) and not os.path.islink(to):
            remove_tree(to)
        patiently(os.replace, os.path.join(folder, name), to)
    for name in os.listdir(target):
        if weights.fullmatch(name) and name not in new:
            patiently(os.unlink, os.path.join(target, name))
    fsync_directory(target)
