"""Where a Trainer run's checkpoints lie: ``checkpoint-N`` in a directory, or the steps of a run in an object store. Both are lines."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Mapping

from ..errors import CheckpointError
from ..format.head import Fate
from ..format.steps import TRAINER_FILE, checked_step
from ..ranks.patience import patiently
from ..storage import is_url
from ..store.line import DirectoryLine, Line, line_of
from ..store.lock import DirectoryLock
from ..store.marks import is_checkpoint
from ..store.part_target import delete_sealed
from ..store.publish import delete_all, sweep_leftovers
from ..store.write import fsync_directory

__all__ = ["LOCK_NAME", "CheckpointFolders", "trainer_line_of"]

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
