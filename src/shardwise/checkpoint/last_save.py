"""The last save of a run that was told to stop: which way publishes the newest step before the scheduler kills."""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, replace
from typing import Any

from ..objects import frozen
from ..ranks.ranks import Ranks

__all__ = ["SAVED", "LastSave", "SaveTimes", "Situation", "Way", "way_of"]

#: Why a step is not saved that is saved already.
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


@frozen
class Way:
    """What to do. A pending save is waited for in any case: it has written a part already, so that no new save is faster."""

    saves: bool
    why: str


def way_of(found: Situation) -> Way:
    """The way to the newest published step in the time that is left. Without any step a save is tried in any time: at worst it is
    killed, and leaves nothing."""
    if found.step in (found.newest, found.pending):
        return Way(saves=False, why=SAVED)
    if found.newest is None and found.pending is None:
        return Way(saves=True, why="there is no step yet")
    pending_s = 0.0 if found.pending is None else max(0.0, found.save_s - found.pending_s)
    needed_s = _MARGIN * (pending_s + found.save_s)
    if found.left_s is None or needed_s <= found.left_s:
        return Way(saves=True, why="there is time")
    step = found.newest if found.pending is None else found.pending
    return Way(
        saves=False,
        why=f"{found.left_s:.1f} s are left, but a save takes {found.save_s:.1f} s; the run will resume from step {step}",
    )


def way_for_all(found: list[list[Any]]) -> list[Any]:
    """Whether to save, and why, from the situations of all ranks: the slowest rank, and the least time that is left."""
    ranks = [Situation(*one) for one in found]
    left = [one.left_s for one in ranks if one.left_s is not None]
    way = way_of(
        replace(
            ranks[0],
            pending_s=min(one.pending_s for one in ranks),
            save_s=max(one.save_s for one in ranks),
            left_s=min(left, default=None),
        )
    )
    return [way.saves, way.why]


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


class LastSave:
    """Whether there is time for the last save, in a run whose program or trainer makes the saves. The same calls on every rank."""

    def __init__(self) -> None:
        self._times = SaveTimes()
        self._has_step = False

    def resumed(self) -> None:
        """There is a step to go on from."""
        self._has_step = True

    def saved(self, seconds: float) -> None:
        """Note a save that was published."""
        self._times.add(seconds)
        self._has_step = True

    def refusal(self, left_s: float | None, ranks: Ranks) -> str | None:
        """Why a new step is not saved in the time that is left on this rank; None if it is. Collective."""
        now = Situation(1, 0 if self._has_step else None, None, 0.0, self._times.longest_s, left_s)
        saves, why = ranks.combine("plan the last save", now.to_list, way_for_all)
        return None if saves else str(why)
