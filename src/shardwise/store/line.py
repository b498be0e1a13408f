"""The line of a run: its published steps in one place, which one process at a time may change."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Protocol

from ..errors import CheckpointError, SourceError
from ..format.head import Fate, SetAside
from ..storage import is_url
from . import publish
from .head_line import HeadLine
from .lock import DirectoryLock, check_held
from .marks import run_of
from .target import DirectoryTarget, Target

__all__ = ["DirectoryLine", "Line", "line_of"]

_log = logging.getLogger(__name__)


class Line(Protocol):
    """Every rank makes one. Rank 0 alone calls its methods, but for :meth:`target`. They raise :class:`CheckpointError`, or
    :class:`SourceError` where a store can't be asked."""

    @property
    def root(self) -> str:
        """The directory or URL of the steps."""

    def open(self) -> None:
        """Look at the place; a directory is locked. Raises :class:`LockedError` if another run holds it."""

    def close(self) -> None:
        """Release what :meth:`open` took."""

    def steps(self) -> dict[int, str]:
        """The published steps and the names of their directories, newest first."""

    def own_steps(self) -> dict[int, str]:
        """As :meth:`steps`, without what another run or program has put there: what retention may count and delete."""

    def seen_steps(self) -> dict[int, str]:
        """As :meth:`steps`; another run may hold the line. From any thread."""

    def held_steps(self) -> dict[int, str]:
        """As :meth:`steps`, before a save, which the target's :meth:`~.Target.begin` refuses if another run has taken the line
        meanwhile. Raises :class:`LockedError`."""

    def fresh_name(self, step: int) -> str:
        """The name of the directory for a save of ``step``. Raises :class:`StateError` if it is not a step."""

    def target(self, name: str) -> Target:
        """Where a save publishes; its commit makes the step one of the line."""

    def add(self, step: int, name: str) -> None:
        """Make a checkpoint that was copied under :meth:`fresh_name` one of the line. Raises :class:`LockedError`."""

    def take(self, resumed: int, aside: Mapping[int, Fate]) -> None:
        """Go on from a step: set the newer ones aside, as superseded, and those of ``aside``. They stay, but no resume or retention
        counts them.

        Raises :class:`LockedError` if another run has changed the line since :meth:`steps`.
        """

    def remove(self, steps: Iterable[int]) -> None:
        """Delete steps, but no others than :meth:`own_steps`, so that a half-deleted one never counts. Logs a warning for one that can't be
        deleted, and goes on."""

    def tidy(self, newest: int) -> None:
        """After a save: write hints for people, delete leftovers of killed saves. Logs what fails."""

    def set_aside(self) -> list[SetAside]:
        """The steps that a resume set aside."""

    def leftovers(self) -> list[str]:
        """Names of what killed saves left, and saves that are under way."""

    def was_ever_published(self) -> bool:
        """Whether there is any step, including those set aside."""

    def strangers(self, damaged: Iterable[int] = ()) -> str | None:
        """The text of an error if the place holds steps that are not of a line: another program's, or copies. None if it does not."""


def line_of(root: str, *, sweeps: bool = True) -> Line:
    """The line in a directory, or below a URL. Without ``sweeps`` the caller deletes what killed saves left in a directory."""
    return HeadLine(root) if is_url(root) else DirectoryLine(root, sweeps=sweeps)


class DirectoryLine:
    """Steps in a local directory: see :mod:`.publish` and :mod:`.lock`."""

    def __init__(self, root: str, *, sweeps: bool = True) -> None:
        self.root = root
        self._sweeps = sweeps
        self._lock: DirectoryLock | None = None
        self._runs: dict[str, str] = {}
        """By the name of a step, the run that published it."""
        self._said: set[str] = set()

    def open(self) -> None:
        self._lock = DirectoryLock(self.root)
        if self._sweeps:
            publish.sweep_leftovers(self.root)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def steps(self) -> dict[int, str]:
        return {step: os.path.basename(path) for step, path in publish.published_steps(self.root).items()}

    def own_steps(self) -> dict[int, str]:
        steps = self.steps()
        for name in steps.values():
            if name not in self._runs and (run := run_of(os.path.join(self.root, name))) is not None:
                self._runs[name] = run
        runs = {step: self._runs[name] for step, name in steps.items() if name in self._runs}
        newest = next(iter(runs.values()), None)  # a run takes no directory whose newest step is not its own
        return {step: steps[step] for step, run in runs.items() if run == newest}

    def seen_steps(self) -> dict[int, str]:
        return self.steps()

    def held_steps(self) -> dict[int, str]:
        check_held(self.root)
        return self.steps()

    def fresh_name(self, step: int) -> str:
        return publish.step_name(step)

    def target(self, name: str) -> Target:
        return DirectoryTarget(os.path.join(self.root, name))

    def add(self, step: int, name: str) -> None:
        check_held(self.root)

    def take(self, resumed: int, aside: Mapping[int, Fate]) -> None:
        for step, name in self.steps().items():
            if step > resumed or step in aside:
                publish.set_aside(os.path.join(self.root, name), aside.get(step, "superseded"))

    def remove(self, steps: Iterable[int]) -> None:
        own = self.own_steps()
        names = [own[step] for step in steps if step in own]
        # Looked at again, because the directory of that name may be another one now.
        publish.delete_all(
            [os.path.join(self.root, name) for name in names],
            lambda path: run_of(path) == self._runs[os.path.basename(path)],
        )

    def tidy(self, newest: int) -> None:
        try:
            publish.write_hint(self.root, newest)
        except (CheckpointError, SourceError) as error:  # the step is published already
            if str(error) not in self._said:  # of what is in the way: once, not after each save
                self._said.add(str(error))
                _log.warning("%s", error)

    def set_aside(self) -> list[SetAside]:
        return publish.steps_set_aside(self.root)

    def leftovers(self) -> list[str]:
        return publish.leftovers(self.root)

    def was_ever_published(self) -> bool:
        return publish.was_ever_published(self.root)

    def strangers(self, damaged: Iterable[int] = ()) -> str | None:
        return publish.describe_dcp_steps(self.root, damaged)
