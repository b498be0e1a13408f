"""When a save is due: every so many steps, or after so much time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from ..ranks.ranks import Ranks

__all__ = ["Due"]


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
