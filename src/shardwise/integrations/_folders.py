"""Numbered folders of checkpoints, ``checkpoint-N`` of the Trainer and ``checkpoint_N`` of Accelerate: which is newest, which are deleted."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..checkpoint.sites import Hosts
from ..errors import CheckpointError, SourceError
from ..format.header import TRAINER_FILE, Fate, checked_step
from ..objects import frozen
from ..publish.line import DirectoryLine, Line, line_of
from ..publish.lock import DirectoryLock, is_checkpoint
from ..publish.places import delete_all, delete_sealed, set_aside, sweep_leftovers
from ..ranks.ranks import patiently
from ..storage import absolute, is_directory, names_in
from ..storage.records import is_url, join

_log = logging.getLogger(__name__)
#: ``push_to_hub`` skips names with a leading underscore, as it skips ``checkpoint-N``.
LOCK_NAME = "_lock"


@frozen
class Naming:
    """How a program names its checkpoints."""

    prefix: str
    is_programs: Callable[[str], bool]
    """Whether a directory is one of the program's own checkpoints, which its own rotation would delete."""


TRAINER = Naming("checkpoint-", lambda path: os.path.isfile(os.path.join(path, TRAINER_FILE)))
#: Each rank's file in Accelerate's own checkpoints: ``accelerate.utils.RNG_STATE_NAME``, which is not imported for it.
ACCELERATE = Naming("checkpoint_", lambda path: any(n.startswith("random_states_") for n in os.listdir(path)))


class CheckpointFolders(DirectoryLine):
    """The checkpoints of a run in a directory, under a program's names. Implements :class:`.Line`.

    Names of other things in it begin with an underscore or a dot, so that ``push_to_hub`` skips them. Only :meth:`steps` works below a URL.
    """

    def __init__(self, root: str, naming: Naming, *, sweeps: bool = True) -> None:
        super().__init__(root, sweeps=sweeps)
        self._naming = naming

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
        prefix = self._naming.prefix
        names = names_in(self.root) if is_directory(self.root) else []
        found = {int(m[1]): n for n in names if (m := re.fullmatch(rf"{prefix}(\d+)", n))}
        there = {s: n for s, n in found.items() if is_url(self.root) or os.path.isdir(self._path(n))}
        return dict(sorted(there.items(), reverse=True))

    def own_steps(self) -> dict[int, str]:
        """Also those of the program itself, whose own rotation would delete them."""
        return {step: name for step, name in self.steps().items() if self._is_own(self._path(name))}

    def remove(self, steps: Iterable[int]) -> None:
        own = self.own_steps()
        delete_all([self._path(own[step]) for step in steps if step in own], self._is_own)

    def _is_own(self, path: str) -> bool:
        return (self._naming.is_programs(path) and not os.path.islink(path)) or is_checkpoint(path)

    def fresh_name(self, step: int) -> str:
        return f"{self._naming.prefix}{checked_step(step)}"

    def take(self, resumed: int, aside: Mapping[int, Fate]) -> None:
        for step, name in self.steps().items():
            if step > resumed or step in aside:
                why = aside.get(step, "superseded")
                set_aside(self._path(name), why, f"_{why}-{name}")

    def tidy(self, newest: int) -> None:
        """Delete sealed parts of failed saves, which are of no use now; :meth:`open` has deleted other leftovers."""
        if not self._sweeps:
            delete_sealed(self.root)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)


def trainer_line_of(root: str, *, sweeps: bool = True) -> Line:
    """The checkpoints of a Trainer in a directory, under its names, or below a URL, under those of a run in a store.

    Without ``sweeps`` the directory is one of several hosts': the caller settles what killed saves left there.
    """
    return line_of(root) if is_url(root) else CheckpointFolders(root, TRAINER, sweeps=sweeps)


def listed(
    roots: Sequence[str], hosts: Hosts, steps_of: Callable[[str], Mapping[int, str]]
) -> list[tuple[int, str]]:
    """The checkpoints in these directories or URLs with their steps, newest first. If two have the same step, that of the earlier root comes
    first. Collective.

    ``steps_of`` returns the names of the checkpoints in one of them, by step.
    """

    def look() -> list[list[Any]]:
        return [[step, k, name] for k, root in enumerate(roots) for step, name in steps_of(root).items()]

    of_hosts = hosts.on_each(roots[0], "find the newest checkpoint", look)
    found = {(step, k, name) for of_host in of_hosts for step, k, name in of_host}
    return [
        (step, join(roots[k], name)) for step, k, name in sorted(found, key=lambda one: (-one[0], one[1]))
    ]


def path_in(line: Line, step: int) -> str | None:
    """The path of a step's checkpoint, if the line has it; None also if the place can't be read now. For rank 0."""
    try:
        name = line.steps().get(step)
    except (OSError, CheckpointError, SourceError) as error:
        _log.warning("%s: can't be read: %s", line.root, error)
        return None
    return None if name is None else join(line.root, name)


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
