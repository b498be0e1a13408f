"""The directory of a Trainer run: which ``checkpoint-N`` it holds, who holds it, what an export puts into it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator

from ..catalog.manifest import MANIFEST_NAME
from ..dist import Ranks
from ..errors import FormatError, IntegrityError, NoCheckpointError
from ..proof.quick import quick_check
from ..store.lock import DirectoryLock
from ..store.publish import sweep_leftovers
from ..store.write import fsync_directory

__all__ = [
    "ADAPTER",
    "FULL",
    "STATE_NAME",
    "checkpoints",
    "held",
    "is_ours",
    "move_into",
    "newest",
    "read_all",
]

_log = logging.getLogger(__name__)
STATE_NAME = "trainer_state.json"
#: Weights in the folder of an export before, of either kind.
FULL = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")


@contextlib.contextmanager
def held(root: str) -> Iterator[None]:
    """Hold a run's directory, and clear it of what killed saves left. Collective."""
    lock: DirectoryLock | None = None

    def take() -> bytes:
        nonlocal lock
        lock = DirectoryLock(root)
        sweep_leftovers(root)
        return b""

    try:
        Ranks.current().on_first("lock output directory", take)
        yield
    finally:
        if lock is not None:
            lock.release()


def is_ours(path: str) -> bool:
    """Whether a directory holds a shardwise checkpoint; else plain Trainer wrote it."""
    return os.path.isfile(os.path.join(path, MANIFEST_NAME))


def checkpoints(root: str) -> dict[int, str]:
    """``checkpoint-N`` in a directory, by falling step."""
    names = os.listdir(root) if os.path.isdir(root) else []
    found = {int(m[1]): os.path.join(root, n) for n in names if (m := re.fullmatch(r"checkpoint-(\d+)", n))}
    return {step: path for step, path in sorted(found.items(), reverse=True) if os.path.isdir(path)}


def newest(root: str) -> bytes:
    """The newest checkpoint that is whole, as far as that can be told without payload; nothing if there are none."""
    damaged = []
    for step, path in checkpoints(root).items():
        try:
            if is_ours(path):
                quick_check(path, step)
            elif not os.path.isfile(os.path.join(path, STATE_NAME)):
                raise IntegrityError(f"holds neither {MANIFEST_NAME} nor {STATE_NAME}", path=path)
        except (FormatError, IntegrityError) as error:
            _log.warning("skipping damaged %s: %s", path, error)
            damaged.append(str(error))
            continue
        return path.encode()
    if damaged:
        raise NoCheckpointError(
            f"{root}: no checkpoint is valid ({'; '.join(damaged)}). Move them away to start anew"
        )
    return b""


def read_all(folder: str) -> dict[str, bytes]:
    """Every file below a folder, by relative path."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder).replace(os.sep, "/")] = file.read()
    return found


def move_into(target: str, folder: str, weights: re.Pattern[str]) -> None:
    """Everything in ``folder`` into ``target``, where weights that are not among it go, so that none are mixed."""
    new = os.listdir(folder)
    for name in new:
        to = os.path.join(target, name)
        if os.path.isdir(to) and not os.path.islink(to):
            shutil.rmtree(to)
        os.replace(os.path.join(folder, name), to)
    for name in os.listdir(target):
        if weights.fullmatch(name) and name not in new:
            os.unlink(os.path.join(target, name))
    fsync_directory(target)
