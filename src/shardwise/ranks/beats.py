"""Finds ranks that make no progress, by their beats: values in the store that change while a rank works."""

from __future__ import annotations

import time
from collections.abc import Mapping

__all__ = ["LOOK_PERIOD_S", "Watch", "look_period_s"]

LOOK_PERIOD_S = 1.0


def look_period_s(timeout_s: float) -> float:
    """Seconds between two signs of progress, and between two looks for them."""
    return min(LOOK_PERIOD_S, timeout_s / 4)


class Watch:
    """Looks at the beats of other ranks about once a second.

    Adds up the time between looks instead of comparing clocks: a watcher that was itself stopped or suspended does
    not blame other ranks when it wakes.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._period_s = look_period_s(timeout_s)
        self._looked = time.monotonic()
        self._beats: dict[int, bytes] = {}
        self._idle_s: dict[int, float] = {}

    def due(self) -> bool:
        return time.monotonic() - self._looked >= self._period_s

    def look(self, beats: Mapping[int, bytes]) -> tuple[int, ...]:
        """The ranks among ``beats`` that made no progress for the timeout."""
        now = time.monotonic()
        elapsed_s = min(now - self._looked, 2 * self._period_s)
        self._looked = now
        for rank, beat in beats.items():
            moved = self._beats.get(rank) != beat
            self._idle_s[rank] = 0.0 if moved else self._idle_s[rank] + elapsed_s
        self._beats = dict(beats)
        return tuple(rank for rank in sorted(beats) if self._idle_s[rank] >= self._timeout_s)
