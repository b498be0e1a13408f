"""The steps of a run, in its directory or store and in a mirror of it: which are kept, which a resume tries, in which order.

All of this is rank 0's work, but for the paths.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, NoCheckpointError, ShardwiseError, SourceError, is_damage
from ..format.manifest import read_manifest
from ..objects import frozen
from ..ranks.patience import patiently
from ..storage import bytes_below, is_url, join, real
from ..store.line import Line, line_of
from ..store.publish import dcp_directories
from ..store.target import Target
from .check import check_files

if TYPE_CHECKING:
    from ..store.mirror import Mirror

__all__ = ["Candidate", "Retention", "RunSteps", "Stored"]

_log = logging.getLogger(__name__)
#: Steps beyond those that are kept which a place looks at, for steps that are not whole at some places.
_MORE_STEPS = 2


@frozen
class Retention:
    """Which steps stay: the newest valid ones, and those that are kept for good. See :class:`.Checkpointer`."""

    keep_last: int | None
    keep_every: int | None

    def excess(self, line: Line, newest: int, on_progress: Callable[[], object]) -> list[int]:
        """The steps of a line up to ``newest`` that go. Reads manifests, and compares sizes of files with them. What another run or program has
        put there neither counts nor goes.

        Raises :class:`CheckpointError`, :class:`SourceError`.
        """
        if self.keep_last is None:
            return []
        steps = {s: name for s, name in line.own_steps().items() if s <= newest}
        valid, found = 0, []
        for step, name in steps.items() if len(steps) > self.keep_last else ():
            if valid < self.keep_last:
                valid += _is_whole(join(line.root, name), step, on_progress)
            elif self.keep_every is None or step % self.keep_every:
                found.append(step)
        return found

    def apply(
        self, line: Line, newest: int, on_progress: Callable[[], object], *, spared: int | None = None
    ) -> None:
        """Delete what goes, but for the step that is ``spared`` this time.

        Never makes a save fail: the step is published, and an extra old step does no harm.
        """
        try:
            line.remove(s for s in self.excess(line, newest, on_progress) if s != spared)
        except (CheckpointError, SourceError) as error:
            _log.warning("no step is deleted: %s", error)


@frozen
class Stored:
    """What lies below the URL of a run, and is paid for."""

    steps: tuple[int, ...]
    """The steps that retention left, newest first."""
    set_aside: int
    """Steps that a resume has set aside: no retention deletes them."""
    objects: int
    nbytes: int
    """Of all objects, those of steps set aside and of killed saves included; a listing shows no parts of unfinished uploads."""


@frozen
class Candidate:
    """A published step that a resume may take."""

    step: int
    place: int
    """0: the run's own directory or store; then the mirror and the fall-back, where there are any."""
    path: str


class RunSteps:
    """The line of a run, and the mirror's, if there is one. Every rank makes one."""

    def __init__(
        self,
        root: str,
        mirror: str | None,
        retention: Retention,
        fallback: str | None = None,
        *,
        sweeps: bool = True,
    ) -> None:
        places = {"run's own directory": root, "mirror": mirror, "fallback": fallback}
        found: dict[str, str] = {}
        for name, place in places.items():
            if place is not None and (before := found.setdefault(real(place), name)) != name:
                raise ValueError(f"the {name} is the {before}: {place}; give another one")
        self._line = line_of(root, sweeps=sweeps)
        self._retention = retention
        self.stored: Stored | None = None
        self._fallback = None if fallback is None else line_of(fallback)
        self.mirror: Mirror | None = None
        if mirror is not None:
            from ..store.mirror import Mirror  # and with it what copies

            self.mirror = Mirror(line_of(mirror), self._line, retention.apply)

    @property
    def _lines(self) -> list[Line]:
        others = (None if self.mirror is None else self.mirror.line, self._fallback)
        return [self._line, *(line for line in others if line is not None)]

    @property
    def fallback(self) -> int | None:
        """The place of the fall-back; None without one."""
        return None if self._fallback is None else len(self._lines) - 1

    def open(self) -> None:
        """Take the directories, or look at the stores. Raises :class:`LockedError`."""
        for line in self._lines:
            line.open()

    def close(self) -> None:
        """Wait for the mirror, and release the directories."""
        if self.mirror is not None:
            self.mirror.wait()
        for line in self._lines:
            line.close()

    def target(self, name: str, place: int = 0) -> Target:
        """Where the save under this name publishes. On every rank."""
        return self._lines[place].target(name)

    def root_of(self, place: int) -> str:
        """The directory or URL of a place. On every rank."""
        return self._lines[place].root

    def path_of(self, place: int, name: str) -> str:
        """The path of a step. On every rank."""
        return join(self._lines[place].root, name)

    def name_of_next(self, step: int, *, has_begun: bool, place: int = 0) -> str:
        """The name of the directory for a save of ``step``. Refuses to mix runs: all published steps must be this run's own.

        ``has_begun``: this run has saved or resumed. Raises :class:`CheckpointError`, :class:`LockedError`.
        """
        for line in [self._lines[place]] if has_begun else self._lines:
            steps = line.held_steps()
            if steps and not has_begun:
                raise CheckpointError(
                    f"{line.root}: contains steps {sorted(steps)[-3:]} that this run did not resume from; call resume() first, "
                    f"or give this run another directory"
                )
            if steps and step <= max(steps):
                raise CheckpointError(
                    f"{line.root}: step {step} is not newer than the published step {max(steps)}"
                )
        return self._lines[place].fresh_name(step)

    def after_save(self, step: int, on_progress: Callable[[], object], place: int = 0) -> None:
        """Apply retention where the step was saved, and let the mirror follow."""
        if place:
            self._lines[place].tidy(step)
            self._retention.apply(self._lines[place], step, on_progress)
            return
        self._line.tidy(step)
        self._retention.apply(
            self._line, step, on_progress, spared=None if self.mirror is None else self.mirror.copying
        )
        if self._retention.keep_last is not None and is_url(self._line.root):
            self._look_what_is_stored()
        if self.mirror is not None:
            self.mirror.follow()

    def newest_whole(self, newest: int, is_whole: Callable[[str, int], bool]) -> list[int]:
        """The steps up to ``newest`` that one place may count: some more than are kept, because other places may count others."""
        if self._retention.keep_last is None:
            return []
        steps = [(s, name) for s, name in self._line.own_steps().items() if s <= newest]
        return [
            s
            for s, name in steps[: self._retention.keep_last + _MORE_STEPS]
            if is_whole(join(self._line.root, name), s)
        ]

    def keep_newest(self, newest: int, whole: Sequence[int]) -> None:
        """As :meth:`after_save`, where the places have agreed on the steps that are ``whole``, newest first."""
        self._line.tidy(newest)
        keep_last, keep_every = self._retention.keep_last, self._retention.keep_every
        if keep_last is not None and len(whole) >= keep_last:
            oldest = whole[keep_last - 1]
            try:
                self._line.remove(
                    s for s in self._line.own_steps() if s < oldest and (keep_every is None or s % keep_every)
                )
            except CheckpointError as error:
                _log.warning("no step is deleted: %s", error)

    def _look_what_is_stored(self) -> None:
        """One request for each 1,000 objects, and two for the head. Never makes a save fail."""
        root = self._line.root
        try:
            objects, nbytes = patiently(bytes_below, root)
            steps, aside = self._line.steps(), self._line.set_aside()
        except (CheckpointError, SourceError) as error:
            _log.warning("%s: can't be listed after the save: %s", root, error)
            return
        self.stored = Stored(tuple(steps), len(aside), objects, nbytes)
        _log.info(
            "%s: holds %d steps and %d quarantined ones, in %d objects of %.2f GB",
            root,
            len(steps),
            len(aside),
            objects,
            nbytes / 1e9,
        )

    def candidates(self, step: int | None) -> list[list[Any]]:
        """Step, place and name of each step to try, or of exactly ``step``: newest first, the run's own before those of mirror and fall-back.

        Raises :class:`CheckpointError` if there is no such step, or if another place holds the steps of another run;
        :class:`NoCheckpointError` if one of two places has lost its head.
        """
        if self.mirror is not None:
            self.mirror.wait()
        by_place = [line.steps() for line in self._lines]
        self._check_all(by_place)
        if step is not None and not any(step in steps for steps in by_place):
            raise CheckpointError(
                f"{self._line.root}: no step {step}; there are {sorted(set().union(*by_place))}"
            )
        if self.mirror is not None:
            by_place[1] = self._of_this_branch(*by_place[:2])
        found = [
            [s, place, name]
            for place, steps in enumerate(by_place)
            for s, name in steps.items()
            if step in (None, s)
        ]
        return sorted(found, key=lambda one: (-one[0], one[1]))

    def _of_this_branch(self, own: Mapping[int, str], copies: Mapping[int, str]) -> dict[int, str]:
        """The mirror's steps, without those that the run has superseded while it had no mirror."""

        from ..store.mirror import is_same

        def is_copy(name: str, step: int) -> bool | None:
            return patiently(is_same, self.path_of(0, name), self.path_of(1, copies[step]))

        apart = [s for s in own.keys() & copies.keys() if is_copy(own[s], s) is False]
        left = {s: name for s, name in copies.items() if s < min(apart, default=s + 1)}
        aside = [one for one in self._line.set_aside() if one.why == "superseded" and one.step in left]
        old = {one.step for one in aside if is_copy(one.name, one.step)}
        if superseded := sorted(copies.keys() - left.keys() | old):
            _log.warning("the mirror's steps %s are of another branch of the run", superseded)
        return {s: name for s, name in left.items() if s not in old}

    def _check_all(self, by_place: list[dict[int, str]]) -> None:
        """Raise if one of several places has lost its head, or if they hold steps of two runs."""
        if len(by_place) == 1:
            return
        runs: dict[str, str] = {}
        for line, steps in zip(self._lines, by_place, strict=True):
            if not steps and (strange := line.strangers()):
                raise NoCheckpointError(strange)
            for name in steps.values():
                try:
                    runs.setdefault(patiently(read_manifest, join(line.root, name)).run_id, line.root)
                    break
                except ShardwiseError as error:  # a resume finds the damage, and says so
                    if not is_damage(error) and not isinstance(error.__cause__, SourceError):
                        raise
        if len(runs) > 1:
            own, other = list(runs.values())[:2]
            kind = "fallback" if self._fallback is not None and other == self._fallback.root else "mirror"
            raise CheckpointError(
                f"{other}: holds the steps of another run than {own}; give each run a {kind} of its own"
            )

    def go_on_from(self, step: int, damaged: Mapping[int, Mapping[int, str]]) -> list[int]:
        """Set newer steps aside, and those that were found ``damaged``, by place. Returns the newer steps.

        Raises :class:`LockedError`, :class:`CheckpointError`.
        """
        newer: set[int] = set()
        # The mirror first: if it fails, the run's own newer steps are still tried before those of the mirror.
        for place, line in reversed(list(enumerate(self._lines))):
            newer |= {s for s in line.steps() if s > step}
            line.take(step, dict.fromkeys(damaged.get(place, ()), "damaged"))
        return sorted(newer, reverse=True)

    def raise_if_taken(self) -> None:
        """Raise :class:`LockedError` if another run has taken the steps, whose retention may have deleted the one that is read."""
        for line in self._lines:
            with contextlib.suppress(SourceError):  # the store is down: the first error says so
                line.steps()

    def raise_if_lost(self, step: int | None, damaged: Mapping[int, Mapping[int, str]]) -> None:
        """Raise :class:`NoCheckpointError` if steps were published and none is valid."""
        for place, line in enumerate(self._lines):
            bad = damaged.get(place, {})
            if bad:
                line.steps()  # raises if another run has changed the line, whose retention may have deleted these steps
            if strange := line.strangers(bad):
                raise NoCheckpointError(strange)
            if bad or line.was_ever_published():
                found = (
                    "; ".join(f"step {s}: {why}" for s, why in bad.items())
                    or "all were renamed as damaged or superseded"
                )
                which = "none is valid" if step is None else f"step {step} is not valid"
                raise NoCheckpointError(
                    f"{line.root}: steps were published, but {which} ({found}). Move the directory away "
                    f"to start again, or give a renamed step its old name"
                )
        root = self._line.root
        if others := [] if is_url(root) else dcp_directories(root):
            _log.warning(
                "%s: no step of shardwise to resume from; it holds DCP directories: %s. "
                "To begin with the state of one, call sw.restore(state, %r) where resume() returned None",
                root,
                ", ".join(others[-3:]),
                os.path.join(root, others[-1]),
            )


def _is_whole(path: str, step: int, on_progress: Callable[[], object]) -> bool:
    """Whether retention may count a step. A step that can't be read does not count: then fewer are deleted."""
    try:
        patiently(check_files, path, step, on_progress)
    except ShardwiseError as error:
        _log.warning("retention does not count %s: %s", path, error)
        return False
    return True
