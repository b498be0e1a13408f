"""The steps of a run: which are kept, which one a resume uses, when the next save is due, and what happens when a save fails."""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import errors
from ..errors import (
    CheckpointError,
    LockedError,
    NoCheckpointError,
    RankError,
    ShardwiseError,
    SourceError,
    is_corruption,
)
from ..format.manifest import read_manifest
from ..objects import frozen
from ..publish.line import Line, line_of
from ..publish.places import dcp_directories
from ..ranks.ranks import Ranks, patiently
from ..storage import bytes_below, place_at, real
from ..storage.records import is_url, join
from .save import SaveReport
from .verify import check_files, check_parts

if TYPE_CHECKING:
    from ..publish.copy import Mirror
    from .held import HeldStep


# ----------------------------------------------------------------------------------------------------
# The steps of a run, in its directory or store and in a mirror of it: which are kept, which a resume tries, in which order.
#
# All of this is rank 0's work, but for the paths.

_log = logging.getLogger(__name__)
#: Steps beyond those that are kept which a place looks at, for steps that are not whole at some places.
_MORE_STEPS = 2


#: Whether retention may count a step, by its path and number.
IsWhole = Callable[[str, int], bool]


@frozen
class Retention:
    """Which steps stay: the newest valid ones, and those that are kept for good. See :class:`.Checkpointer`."""

    keep_last: int | None
    keep_every: int | None

    def apply(self, line: Line, newest: int, is_whole: IsWhole, *, spared: int | None = None) -> None:
        """Delete the steps of a line up to ``newest`` that go, but for the step that is ``spared`` this time. What another run or program has
        put there neither counts nor goes.

        Never makes a save fail: the step is published, and an extra old step does no harm.
        """
        if self.keep_last is None:
            return
        valid, gone = 0, []
        try:
            steps = {s: name for s, name in line.own_steps().items() if s <= newest}
            for step, name in steps.items() if len(steps) > self.keep_last else ():
                if valid < self.keep_last:
                    valid += is_whole(join(line.root, name), step)
                elif step != spared and (self.keep_every is None or step % self.keep_every):
                    gone.append(step)
            line.remove(gone)
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
    """A step that a resume may take."""

    step: int
    place: int
    """0: the run's own directory or store; then the mirror and the fall-back, where there are any; -1: memory."""
    path: str
    held: HeldStep | None = None
    """In memory."""


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
                raise ValueError(f"the {name} and the {before} are the same: {place}; use a different one")
        self._line = line_of(root, sweeps=sweeps)
        self._retention = retention
        self.stored: Stored | None = None
        self._fallback = None if fallback is None else line_of(fallback)
        self.mirror: Mirror | None = None
        if mirror is not None:
            from ..publish.copy import Mirror  # and with it what copies

            self.mirror = Mirror(line_of(mirror), self._line, partial(retention.apply, is_whole=_is_whole))

    @property
    def lines(self) -> list[Line]:
        """By place: the run's own, then those of the mirror and of the fallback, where there are any."""
        others = (None if self.mirror is None else self.mirror.line, self._fallback)
        return [self._line, *(line for line in others if line is not None)]

    @property
    def fallback(self) -> int | None:
        """The place of the fall-back; None without one."""
        return None if self._fallback is None else len(self.lines) - 1

    def open(self) -> None:
        """Take the directories, or look at the stores. Raises :class:`LockedError`."""
        for line in self.lines:
            line.open()

    def close(self) -> None:
        """Wait for the mirror, and release the directories."""
        if self.mirror is not None:
            self.mirror.wait()
        for line in self.lines:
            line.close()

    def name_of_next(self, step: int, *, has_begun: bool, place: int = 0) -> str:
        """The name of the directory for a save of ``step``. Refuses to mix runs: all published steps must be this run's own.

        ``has_begun``: this run has saved or resumed. Raises :class:`CheckpointError`, :class:`LockedError`.
        """
        for line in [self.lines[place]] if has_begun else self.lines:
            steps = line.held_steps()
            if steps and not has_begun:
                raise CheckpointError(
                    f"{line.root}: contains steps {sorted(steps)[-3:]} that this run did not resume from; call resume() first, "
                    f"or use a different directory for this run"
                )
            if steps and step <= max(steps):
                raise CheckpointError(
                    f"{line.root}: step {step} is not newer than the published step {max(steps)}"
                )
        return self.lines[place].fresh_name(step)

    def after_save(
        self,
        step: int,
        on_progress: Callable[[], object],
        place: int = 0,
        agreed: Collection[int] | None = None,
    ) -> None:
        """Apply retention where the step was saved, and let the mirror follow. ``agreed``: the steps that count, where hosts have agreed on
        them."""

        def is_whole(path: str, one: int) -> bool:
            return _is_whole(path, one, on_progress) if agreed is None else one in agreed

        line = self.lines[place]
        line.tidy(step)
        spared = None if place or self.mirror is None else self.mirror.copying
        self._retention.apply(line, step, is_whole, spared=spared)
        if place:
            return
        if self._retention.keep_last is not None and is_url(line.root):
            self._look_what_is_stored()
        if self.mirror is not None:
            self.mirror.follow()

    def newest_whole(self, newest: int, place_id: str, on_progress: Callable[[], object]) -> list[int]:
        """The steps up to ``newest`` of which this host, whose place has this id, has its own part whole: some more than are kept, because
        other hosts may lack others."""
        if self._retention.keep_last is None:
            return []
        steps = [(s, name) for s, name in self._line.own_steps().items() if s <= newest]
        return [
            s
            for s, name in steps[: self._retention.keep_last + _MORE_STEPS]
            if _has_own_part(join(self._line.root, name), s, place_id, on_progress)
        ]

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
            "%s: contains %d steps and %d quarantined ones: %d objects, %.2f GB",
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
        by_place = [line.steps() for line in self.lines]
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

        from ..publish.copy import is_same

        def is_copy(name: str, step: int) -> bool | None:
            first, second = self.lines[:2]
            return patiently(is_same, join(first.root, name), join(second.root, copies[step]))

        apart = [s for s in own.keys() & copies.keys() if is_copy(own[s], s) is False]
        left = {s: name for s, name in copies.items() if s < min(apart, default=s + 1)}
        aside = [one for one in self._line.set_aside() if one.why == "superseded" and one.step in left]
        old = {one.step for one in aside if is_copy(one.name, one.step)}
        if superseded := sorted(copies.keys() - left.keys() | old):
            _log.warning("the mirror's steps %s belong to a different branch of the run", superseded)
        return {s: name for s, name in left.items() if s not in old}

    def _check_all(self, by_place: list[dict[int, str]]) -> None:
        """Raise if one of several places has lost its head, or if they hold steps of two runs."""
        if len(by_place) == 1:
            return
        runs: dict[str, str] = {}
        for line, steps in zip(self.lines, by_place, strict=True):
            if not steps and (strange := line.strangers()):
                raise NoCheckpointError(strange)
            for name in steps.values():
                try:
                    runs.setdefault(patiently(read_manifest, join(line.root, name)).run_id, line.root)
                    break
                except ShardwiseError as error:  # a resume finds the damage, and says so
                    if not is_corruption(error) and not isinstance(error.__cause__, SourceError):
                        raise
        if len(runs) > 1:
            own, other = list(runs.values())[:2]
            kind = "fallback" if self._fallback is not None and other == self._fallback.root else "mirror"
            raise CheckpointError(
                f"{other}: contains steps from a different run than {own}; give each run its own {kind}"
            )

    def go_on_from(self, step: int, damaged: Mapping[int, Mapping[int, str]]) -> list[int]:
        """Set newer steps aside, and those that were found ``damaged``, by place. Returns the newer steps.

        Raises :class:`LockedError`, :class:`CheckpointError`.
        """
        newer: set[int] = set()
        # The mirror first: if it fails, the run's own newer steps are still tried before those of the mirror.
        for place, line in reversed(list(enumerate(self.lines))):
            newer |= {s for s in line.steps() if s > step}
            line.take(step, dict.fromkeys(damaged.get(place, ()), "damaged"))
        return sorted(newer, reverse=True)

    def raise_if_taken(self) -> None:
        """Raise :class:`LockedError` if another run has taken the steps, whose retention may have deleted the one that is read."""
        for line in self.lines:
            with contextlib.suppress(SourceError):  # the store is down: the first error says so
                line.steps()

    def raise_if_lost(self, step: int | None, damaged: Mapping[int, Mapping[int, str]]) -> None:
        """Raise :class:`NoCheckpointError` if steps were published and none is valid."""
        for place, line in enumerate(self.lines):
            bad = damaged.get(place, {})
            if strange := line.strangers(bad):
                raise NoCheckpointError(strange)
            if bad or line.was_ever_published():
                found = (
                    "; ".join(f"step {s}: {why}" for s, why in bad.items())
                    or "all were renamed as damaged or superseded"
                )
                which = "none is valid" if step is None else f"step {step} is not valid"
                raise NoCheckpointError(
                    f"{line.root}: steps were published, but {which} ({found}). Move the directory elsewhere "
                    f"to start over, or rename a step back to its old name"
                )
        root = self._line.root
        if others := [] if is_url(root) else dcp_directories(root):
            _log.warning(
                "%s: no shardwise step to resume from, but there are DCP directories: %s. "
                "To start from one of them, call sw.restore(state, %r) when resume() returns None",
                root,
                ", ".join(others[-3:]),
                os.path.join(root, others[-1]),
            )


def _is_whole(path: str, step: int, on_progress: Callable[[], object] = lambda: None) -> bool:
    """Whether retention may count a step. A step that can't be read does not count: then fewer are deleted."""
    return _checked(path, lambda: bool(check_files(path, step, on_progress)))


def _has_own_part(path: str, step: int, place_id: str, on_progress: Callable[[], object]) -> bool:
    """As :func:`_is_whole`, of the part of one place."""

    def is_here() -> bool:
        manifest, here = check_parts(path, step, on_progress, heads=False)
        return all(number in here for number, p in enumerate(manifest.places) if p.id == place_id)

    return _checked(path, is_here)


def _checked(path: str, check: Callable[[], bool]) -> bool:
    try:
        return patiently(check)
    except ShardwiseError as error:
        _log.warning("retention does not count %s: %s", path, error)
        return False


# ----------------------------------------------------------------------------------------------------
# When a save is due: every so many steps, or after so much time.


class Due:
    """Whether a save is due at a step, the same on every rank that makes the same calls.

    A number of steps needs no messages. For a time rank 0's clock decides, and ranks ask it at calls that all of them know: at the first
    one, then each time half of what is left has passed at the pace of the steps so far, but at most twice as many calls after a look as there
    were before it. So a save comes at most a step late, for about ten looks between two saves.

    Raises :class:`ValueError` for less than 1 step, and for a time that isn't positive.
    """

    def __init__(self, every: int | timedelta | None, clock: Callable[[], float] = time.monotonic) -> None:
        if every is not None and (every <= timedelta(0) if isinstance(every, timedelta) else every < 1):
            raise ValueError(
                f"save_every must be at least 1 step, or a positive datetime.timedelta, got {every!r}"
            )
        self._every, self._clock = every, clock
        self.restart()

    def restart(self) -> None:
        """Count from now: a step was saved, or restored."""
        self._began, self._calls, self._next_look = self._clock(), 0, 1

    def at(self, step: int, newest: int | None, ranks: Ranks) -> bool:
        """Whether ``step`` is due. ``newest``: the newest saved or restored step, which is not due again."""
        if self._every is None:
            raise ValueError(
                "should_save: give the Checkpointer save_every=, a number of steps or a datetime.timedelta"
            )
        if newest is not None and step <= newest:
            return False
        if not isinstance(self._every, timedelta):
            return step % self._every == 0
        self._calls += 1
        if self._calls < self._next_look:
            return False
        interval = self._every.total_seconds()
        passed = ranks.on_first("check whether a save is due", lambda: self._clock() - self._began)
        ahead = int((interval - passed) / 2 * self._calls / max(passed, 1e-9))
        self._next_look = self._calls + max(1, min(ahead, self._calls))
        return passed >= interval


# ----------------------------------------------------------------------------------------------------
# Saves that fail while training goes on: where else they are tried, which failures may pass, and how many in a row.
#
# :class:`.Checkpointer`, Accelerate and the Trainer save through :meth:`Failures.attempt`.


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """How a run handles saves that fail because of a storage problem. Pass it as ``failures=`` to ``Checkpointer``, ``ShardwiseAccelerator`` or
    ``ShardwiseTrainer``.

    Without a policy, the first failed save raises. With one, a failed save is logged no matter which rank it failed on, and training
    continues: the report gives the reason (``failure``), and the next save is attempted as usual. Errors in the program itself always raise.
    Raises :class:`ValueError` if ``max_failures`` is below 1.
    """

    max_failures: int = 3
    """Raise after this many failed saves in a row. 1: raise at the first one."""
    fallback: str | os.PathLike[str] | None = None
    """A second directory or URL for steps that can't be saved in the first one. A resume looks there, too. Pass the same one at every launch, and use a different one for each run."""

    def __post_init__(self) -> None:
        if self.max_failures < 1:
            raise ValueError(f"max_failures must be at least 1, got {self.max_failures}")


@dataclass(slots=True)
class Failures:
    """The saves of a run that failed in a row. Every rank counts the same, because a save fails on all ranks or on none."""

    most: int = 1
    fallback: str | None = None
    """The policy's, absolute."""
    in_a_row: int = 0
    total: int = 0

    @classmethod
    def under(cls, policy: FailurePolicy | None) -> Failures:
        """None yet, of a run with this policy."""
        if policy is None:
            return cls()
        fallback = policy.fallback
        return cls(policy.max_failures, None if fallback is None else place_at(fallback))

    def roots(self, own: str) -> list[str]:
        """The run's own place, then the fall-back if there is one."""
        return [own] if self.fallback is None else [own, self.fallback]

    def attempt(
        self, step: int, ways: Mapping[str, Callable[[], SaveReport]], *, is_first_rank: bool
    ) -> SaveReport:
        """Save by the first of ``ways`` that storage does not make fail: by path, the run's own place before the fall-back.

        If all fail, the report says why, or the last error is raised; see :meth:`note`. Raises the error in a
        :class:`RefusalError` at once. Collective, if the ways are.
        """
        last = [*ways][-1]
        for path, save in ways.items():
            try:
                report = save()
            except RefusalError as refusal:
                raise refusal.error from None
            except Exception as error:
                if path != last and may_pass(error):
                    if is_first_rank:
                        _log.warning("step %d goes to the fallback: %s", step, _words(error))
                    continue
                self.note(error, step, is_first_rank=is_first_rank)
                return SaveReport.of_failure(path, step, str(error))
            if report.is_published:
                self.succeed()
            return report
        raise AssertionError("there is no way")

    def note(self, error: Exception, step: int, *, is_first_rank: bool) -> None:
        """Count a failed save and warn. Raises ``error`` itself if it must not pass, and at the limit."""
        if not may_pass(error):
            raise error
        self.in_a_row += 1
        self.total += 1
        if self.in_a_row >= self.most:
            if self.most > 1:
                error.add_note(f"{self.in_a_row} saves in a row have failed; max_failures={self.most}")
            raise error
        if is_first_rank:
            _log.warning(
                "step %d was not saved (failure %d in a row; the run ends after %d): %s",
                step,
                self.in_a_row,
                self.most,
                _words(error),
            )

    def succeed(self) -> None:
        """Begin to count anew."""
        self.in_a_row = 0


def may_pass(error: BaseException) -> bool:
    """Whether the next save may well succeed: storage failed, on whichever rank, and no rank is missing.

    Not so: another run holds the directory, a state that can't be stored, an error in a program.
    """
    if isinstance(error, RankError):
        return not error.missing and bool(error.causes) and all(map(_is_of_storage, error.causes.values()))
    return isinstance(error, (OSError, SourceError, CheckpointError)) and not isinstance(error, LockedError)


def _is_of_storage(cause: str) -> bool:
    """By the type's name, with which each cause begins."""
    name = cause.partition(":")[0]
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    return (
        isinstance(kind, type)
        and issubclass(kind, (OSError, SourceError, CheckpointError))
        and kind is not LockedError
    )


def _words(error: Exception) -> str:
    """The error with the ranks that it comes from: what rank 0 finds for all of them names none."""
    return str(error) if isinstance(error, RankError) else f"rank 0: {error}"


class RefusalError(Exception):
    """A call that no storage would take: it is the program's error, and no failure of a save."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(error)
        self.error = error


# ----------------------------------------------------------------------------------------------------
# The last save of a run that was told to stop: which way publishes the newest step before the scheduler kills.

#: Why a step that's already saved isn't saved again.
SAVED = "the step is saved"
#: A save while other ranks stop, too, takes longer than those before it.
_MARGIN = 1.25


@frozen
class Situation:
    """What rank 0 plans with. Times are the largest of all ranks."""

    step: int
    newest: int | None
    """The step that this run has published or resumed."""
    pending: int | None
    """The step of an async save that still runs."""
    pending_s: float
    """How long that save has run."""
    save_s: float
    """What the slowest of the last saves took; 0 if there was none."""
    left_s: float | None
    """Time to the kill; None if it is not known."""

    def to_list(self) -> list[Any]:
        """For rank 0."""
        return list(astuple(self))


def way_of(found: Situation) -> tuple[bool, str]:
    """Whether to save, and why, to have the newest published step in the time that is left. A pending save is waited for in any case: it has
    written a part already, so that no new save is faster. Without any step a save is tried in any time: at worst it is killed, and leaves
    nothing."""
    if found.step in (found.newest, found.pending):
        return False, SAVED
    if found.newest is None and found.pending is None:
        return True, "there is no step yet"
    pending_s = 0.0 if found.pending is None else max(0.0, found.save_s - found.pending_s)
    needed_s = _MARGIN * (pending_s + found.save_s)
    if found.left_s is None or needed_s <= found.left_s:
        return True, "there is time"
    step = found.newest if found.pending is None else found.pending
    return (
        False,
        f"{found.left_s:.1f} s are left, but a save takes {found.save_s:.1f} s; the run will resume from step {step}",
    )


def way_for_all(found: list[list[Any]]) -> list[Any]:
    """Whether to save, and why, from the situations of all ranks: the slowest rank, and the least time that is left."""
    ranks = [Situation(*one) for one in found]
    left = [one.left_s for one in ranks if one.left_s is not None]
    slowest = replace(
        ranks[0],
        pending_s=min(one.pending_s for one in ranks),
        save_s=max(one.save_s for one in ranks),
        left_s=min(left, default=None),
    )
    return list(way_of(slowest))


class SaveTimes:
    """Seconds that the last saves of this rank took, from the call to the published step."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=3)

    def add(self, seconds: float) -> None:
        """Note a save that was published."""
        self._last.append(seconds)

    @property
    def longest_s(self) -> float:
        """0 before the first save."""
        return max(self._last, default=0.0)


class LastSave(SaveTimes):
    """Whether there is time for the last save, in a run whose program or trainer makes the saves. The same calls on every rank."""

    _has_step = False

    def resumed(self) -> None:
        """There is a step to go on from."""
        self._has_step = True

    def saved(self, seconds: float) -> None:
        """Note a save that was published."""
        self.add(seconds)
        self._has_step = True

    def refusal(self, left_s: float | None, ranks: Ranks) -> str | None:
        """Why a new step isn't saved in the time that is left on this rank; None if it is. Collective."""
        now = Situation(1, 0 if self._has_step else None, None, 0.0, self.longest_s, left_s)
        saves, why = ranks.combine("plan the last save", now.to_list, way_for_all)
        return None if saves else str(why)
