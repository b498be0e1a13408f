"""The call at which all ranks stop, without a round of agreement at each call.

Rank 0 lends calls: its lease in the store says up to which call no rank stops. A rank looks at the store when its own count
of calls has used the lease up. A rank that was asked to stop says so in the store; rank 0 then lends no more, and marks the
last lease as final: every rank stops where it ends. No rank can have passed that call, so they agree whenever the signal came,
on whichever ranks, and however far the ranks are apart.

A lease is one call long where calls take 20 ms or more, and up to 8 calls where they are faster. It ends early where the
program turns from calls with new steps to calls with the same step again (an evaluation), or back: calls may then take much longer.
"""

from __future__ import annotations

import time
from typing import Protocol

from ..errors import RankError
from ..objects import frozen
from ..ranks.beats import Watch

__all__ = ["Lease", "Lender", "Store", "StopPoint"]

_LOOK_S = 0.02  # a rank looks at the store about once in this time
_MOST_CALLS = 8  # how late a stop may come where calls slow down suddenly
_SLOW_CALL_S = 0.5  # from here on rank 0 lends one call only: a stop must come at once
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02


class Store(Protocol):
    """The methods of the process group's store that are used here."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@frozen
class Lease:
    """No rank stops before this place: ``calls``, counted from 1, or the first call after ``turns`` changes of kind."""

    calls: int = 1
    turns: int = 0
    is_final: bool = False
    """Every rank stops at this place."""

    def covers(self, calls: int, turns: int) -> bool:
        """Whether a rank passes this call."""
        return self.turns > turns or (self.turns == turns and calls < self.calls)

    def packed(self) -> bytes:
        """The value in the store."""
        return f"{self.calls} {self.turns} {self.is_final:d}".encode()

    @classmethod
    def unpacked(cls, value: bytes) -> Lease:
        """The lease that :meth:`packed` has made a value of."""
        calls, turns, is_final = map(int, value.split())
        return cls(calls, turns, bool(is_final))


class Lender:
    """Rank 0's side: how many calls the next lease has. Knows times only, and no store."""

    def __init__(self) -> None:
        self._since: tuple[int, int, float] | None = None
        self._length, self._ahead = 1, 0

    def is_due(self, lease: Lease, calls: int, turns: int) -> bool:
        """Whether to lend now: before the other ranks have used the lease up, if calls are fast."""
        return not lease.covers(calls + self._ahead, turns)

    def next(self, last: Lease, calls: int, turns: int, now_s: float) -> Lease:
        """A lease from this call on, which takes back nothing of the last one: other ranks may have passed its calls."""
        self._length, self._ahead = 1, 0
        if self._since is not None and self._since[0] == turns and calls > self._since[1]:
            each_s = max(1e-6, (now_s - self._since[2]) / (calls - self._since[1]))
            self._length = max(1, min(_MOST_CALLS, int(_LOOK_S / each_s)))
            self._ahead = 0 if each_s >= _SLOW_CALL_S else max(1, self._length // 2)
        self._since = turns, calls, now_s
        end = calls + self._ahead + self._length
        return Lease(max(end, last.calls) if last.turns == turns else end, turns)


class StopPoint:
    """One rank's count of calls, and the leases. Every rank must make the same calls with the same steps."""

    def __init__(self, store: Store, key: str, rank: int, timeout_s: float) -> None:
        self._store, self._key, self._rank, self._timeout_s = store, key, rank, timeout_s
        self._lease, self._lender = Lease(), Lender()
        self._step: int | None = None
        self._repeats = False
        self._has_asked = False
        self.calls = self.turns = 0

    def begin(self) -> None:
        """Rank 0, before any rank counts a call: a key that is not there would block its reader."""
        self._store.set(f"{self._key}/lease", self._lease.packed())

    def reached(self, step: int, *, is_asked: bool) -> bool:
        """Count a call; whether all ranks stop at it. ``is_asked``: this rank was told to stop.

        Raises :class:`RankError` if rank 0 does not come to this call for the timeout, or if the store is gone.
        """
        repeats = step == self._step
        self.turns += repeats != self._repeats
        self._step, self._repeats = step, repeats
        self.calls += 1
        try:
            if self._rank == 0:
                return self._lend(is_asked)
            if is_asked and not self._has_asked:
                self._store.set(f"{self._key}/asked", b"1")
                self._has_asked = True
            return self._follow()
        except RuntimeError as error:  # the store's
            cause = (
                "unreachable: the process group's store is gone (did rank 0, or the process hosting it, end?)"
            )
            raise RankError("stopping together", {0: cause}) from error

    def _lend(self, is_asked: bool) -> bool:
        lease = self._lease
        if not lease.is_final and self._lender.is_due(lease, self.calls, self.turns):
            if is_asked or self._store.check([f"{self._key}/asked"]):
                lease = Lease(lease.calls, lease.turns, is_final=True)
            else:
                lease = self._lender.next(lease, self.calls, self.turns, time.monotonic())
            self._store.set(f"{self._key}/lease", lease.packed())
            self._lease = lease
        return lease.is_final and not lease.covers(self.calls, self.turns)

    def _follow(self) -> bool:
        if self._lease.covers(self.calls, self.turns):
            return False
        watch, pause_s = Watch(self._timeout_s), _FIRST_PAUSE_S
        while not self._lease.is_final:
            packed = self._store.get(f"{self._key}/lease")
            self._lease = Lease.unpacked(packed)
            if self._lease.covers(self.calls, self.turns):
                return False
            if watch.due() and watch.look({0: packed}):
                raise RankError("stopping together", {}, (0,), self._timeout_s)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return True
