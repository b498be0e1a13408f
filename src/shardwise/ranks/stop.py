"""Whether a run should stop: signals of this process, the agreement of all ranks, the time that is left, the exit status."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing.util
import os
import secrets
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, cast

import torch.distributed as dist

from ..errors import RankError
from ..internals.torch import default_store
from ..objects import frozen
from .protocol import Watch
from .ranks import Ranks

# ----------------------------------------------------------------------------------------------------
# The call at which all ranks stop, without a round of agreement at each call.
#
# Rank 0 lends calls: its lease in the store says up to which call no rank stops. A rank looks at the store when its own count
# of calls has used the lease up. A rank that was asked to stop says so in the store; rank 0 then lends no more, and marks the
# last lease as final: every rank stops where it ends. No rank can have passed that call, so they agree whenever the signal came,
# on whichever ranks, and however far the ranks are apart.
#
# A lease is one call long where calls take 20 ms or more, and up to 8 calls where they are faster. It ends early where the
# program turns from calls with new steps to calls with the same step again (an evaluation), or back: calls may then take much longer.

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
            raise RankError("coordinated stop", {0: cause}) from error

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
                raise RankError("coordinated stop", {}, (0,), self._timeout_s)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        return True


# ----------------------------------------------------------------------------------------------------
# The signals that ask this process to stop. A handler only sets a flag; processes that inherit it are left as they were.

_log = logging.getLogger(__name__)
#: A scheduler and a launcher often pass on one and the same signal. What comes later than this is a second one.
_SAME_SIGNAL_S = 2.0


@frozen
class Received:
    """The first signal that asked this process to stop."""

    number: int
    at_s: float
    """By ``time.monotonic()``."""


def numbers_of(names: Iterable[str]) -> tuple[int, ...]:
    """The numbers of signals by name. Raises ``ValueError`` for a name that this system lacks, or that can't be handled."""
    if isinstance(names, str):
        raise ValueError(f"stop_on={names!r} is a string; expected a tuple of names: stop_on=({names!r},)")
    found = []
    for name in names:
        number = getattr(signal, name, None) if isinstance(name, str) and name.startswith("SIG") else None
        if not isinstance(number, signal.Signals) or name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"stop_on holds {name!r}; expected names of signals: ('SIGTERM', 'SIGUSR1')")
        found.append(int(number))
    return tuple(dict.fromkeys(found))


class StopSignals:
    """Handlers of some signals in this process, from :meth:`listen` to :meth:`close`.

    A handler writes down the first signal, and whether a second one came, then calls the handler that was there before.
    It allocates nothing that the interrupted code could hold, waits for nothing and logs nothing.

    In forked processes: the handlers of before are given back at once. A worker of :mod:`multiprocessing` (a worker of a
    ``DataLoader``) obeys these signals from its parent alone: a scheduler that signals the whole process group would end it,
    and the parent with it, before a step is saved.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = tuple(numbers)
        self.first: Received | None = None
        self.came_again = False
        self._pid = os.getpid()
        self._is_open = False
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Install the handlers. Raises ``ValueError`` outside of the main thread, and for a handler that is not Python's."""
        if not self.numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "signals can only be handled in the main thread, and this is a different one; create the Checkpointer there, or leave "
                "stop_on out and call request_stop()"
            )
        before = {number: signal.getsignal(number) for number in self.numbers}
        if foreign := [signal.Signals(n).name for n, handler in before.items() if handler is None]:
            raise ValueError(
                f"{foreign[0]} has a handler that was not installed from Python; choose another signal"
            )
        self._before, self._is_open = before, True
        for number in self.numbers:
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)  # libraries' system calls go on where a signal came
        _heard.add(self)
        _hook_forks()
        multiprocessing.util.register_after_fork(self, StopSignals._obey_parent_alone)

    def close(self) -> None:
        """Give the handlers of before back. A handler that was installed over this one stays, and calls the one before through it."""
        self._is_open = False
        _heard.discard(self)
        self._give_back()

    def _give_back(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # the handler that stays does nothing but call the one before
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # in a forked process, in the instant before its own handlers are back
        if self._is_open:
            now = time.monotonic()
            if self.first is None:
                self.first = Received(number, now)
            elif now - self.first.at_s > _SAME_SIGNAL_S:
                self.came_again = True
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _in_fork(self) -> None:
        """Give handlers back in a forked process."""
        with contextlib.suppress(ValueError):
            self._give_back()

    def _obey_parent_alone(self) -> None:
        """In a new worker of multiprocessing: take the signals that its parent sends, and drop those of other senders."""
        if not self._is_open or not hasattr(signal, "sigwaitinfo"):
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        threading.Thread(
            target=_pass_on_from, args=(self._pid, self.numbers), name="shardwise-signals", daemon=True
        ).start()


def _pass_on_from(parent: int, numbers: tuple[int, ...]) -> None:
    """Deliver the blocked signals of one sender to this process, as if they had not been blocked. Runs until the process ends."""
    while True:
        received = signal.sigwaitinfo(numbers)
        if received.si_pid == parent or os.getppid() != parent:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
            os.kill(
                os.getpid(), received.si_signo
            )  # this thread alone can take it: it has done so when this returns
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


_heard: weakref.WeakSet[StopSignals] = weakref.WeakSet()
_is_hooked = False


def _hook_forks() -> None:
    """Once in this process: Python can't take such a hook back."""
    global _is_hooked
    if not _is_hooked:
        _is_hooked = True
        os.register_at_fork(after_in_child=_in_every_fork)


def _in_every_fork() -> None:
    for signals in list(_heard):
        signals._in_fork()


# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPolicy:
    """Which signals ask a run to stop, and how it then ends. Pass it as ``preemption=`` to ``Checkpointer``, ``ShardwiseAccelerator`` or
    ``ShardwiseTrainer``.

    Creating a policy doesn't install any handler. Raises :class:`ValueError` for unknown signal names and for numbers out of range.
    """

    stop_on: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    """Names of the signals. Handlers that were already installed are still called, and are restored when the run is closed. ``()``: don't listen for any signals; ``request_stop`` still works. Python handles signals in the main thread, so create the run's object there."""
    deadline_s: float | None = None
    """Seconds between the first signal and the scheduler's SIGKILL. Used to decide whether a last save can finish in time. None: unknown. torchrun
    itself kills its ranks 30 seconds after it forwards a signal (from torch 2.12 on, ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` changes that)."""
    exit_status: int = 75
    """``exit_code`` of a run that was stopped. 75 is ``EX_TEMPFAIL`` in sysexits.h: "temporary failure, try again"."""

    def __post_init__(self) -> None:
        numbers_of(self.stop_on)
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ValueError(f"deadline_s must be positive or None, got {self.deadline_s}")
        if not 0 <= self.exit_status <= 255:
            raise ValueError(f"exit_status must be from 0 to 255, got {self.exit_status}")


class Stops:
    """One run's stop. Every rank makes one and makes the same calls, in the main thread."""

    def __init__(self, policy: PreemptionPolicy | None, ranks: Ranks) -> None:
        self._policy = policy = policy or PreemptionPolicy(stop_on=())
        self._signals = StopSignals(numbers_of(policy.stop_on))
        self._asked: Received | None = None
        self._point: StopPoint | None = None
        self._agreed_end_s: float | None = None
        self.has_stopped = False
        if ranks.rank == 0 and (told := _too_late_for_torchrun(policy)):
            _log.warning("%s", told)
        if policy.stop_on:
            try:
                with ranks.agree("listen for signals"):
                    self._signals.listen()
            except BaseException:
                self._signals.close()
                raise

    def close(self) -> None:
        """Give the handlers of before back, and leave the store."""
        self._point = None
        self._signals.close()

    def request(self) -> None:
        """Ask all ranks to stop, as a signal would; one rank is enough. Rank-local."""
        if self._asked is None:
            self._asked = Received(0, time.monotonic())

    def should_stop(self, step: int, ranks: Ranks) -> bool:
        """Whether all ranks stop at this call. Raises as :meth:`.StopPoint.reached`; :class:`RankError` if ranks stop apart."""
        if self.has_stopped:
            return True
        is_asked = (self._signals.first or self._asked) is not None
        if ranks.world_size == 1:
            self.has_stopped = is_asked
        else:
            self._point = self._point or _point_of(ranks)
            self.has_stopped = self._point.reached(step, is_asked=is_asked)
        if self.has_stopped:
            self._agree(step, ranks)
        return self.has_stopped

    def left_s(self) -> float | None:
        """Seconds until the scheduler kills, on this rank; 0 after a second signal, None where no deadline was given."""
        if self._signals.came_again:
            return 0.0
        return None if self._agreed_end_s is None else max(0.0, self._agreed_end_s - time.monotonic())

    @property
    def exit_code(self) -> int:
        """The status with which the process should exit."""
        return self._policy.exit_status if self.has_stopped else 0

    def _agree(self, step: int, ranks: Ranks) -> None:
        """Learn from all ranks how long ago the first signal came: their clocks differ, these times don't."""
        calls = 0 if self._point is None else self._point.calls
        first = self._signals.first or self._asked
        ago_s = 0.0 if first is None else time.monotonic() - first.at_s
        number = 0 if first is None else first.number
        ago_s, who = ranks.combine(
            "coordinated stop", lambda: [step, calls, ago_s, number, first is not None], _first
        )
        if self._policy.deadline_s is not None:
            end_s = time.monotonic() + self._policy.deadline_s - ago_s
            # Ranks that came late have held up the agreement. The rank that was asked knows the time without it, and the least counts.
            self._agreed_end_s = end_s if first is None else min(end_s, first.at_s + self._policy.deadline_s)
        if ranks.rank == 0:
            _log.warning(
                "stopping after step %d: a signal or request reached %s %.1f s ago", step, who, ago_s
            )


#: Seconds after which torchrun kills ranks that it has forwarded a signal to: from torch 2.12 on it reads another number from the
#: environment, or from its option ``--shutdown-timeout``, which ranks don't see.
_TORCHRUN_S = 30
_TORCHRUN_VARIABLES = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


def _too_late_for_torchrun(policy: PreemptionPolicy) -> str | None:
    """The warning for a deadline longer than torchrun waits; None without torchrun."""
    deadline_s = policy.deadline_s
    if deadline_s is None or "SIGTERM" not in policy.stop_on or not dist.is_torchelastic_launched():
        return None
    from torch.distributed.launcher.api import LaunchConfig  # slow to import

    can_be_set = "shutdown_timeout" in LaunchConfig.__dataclass_fields__
    given = next((os.environ[name] for name in _TORCHRUN_VARIABLES if name in os.environ), "")
    limit_s = int(given) if can_be_set and given.isdecimal() else _TORCHRUN_S
    if deadline_s <= limit_s:
        return None
    longer = (
        f"launch with {_TORCHRUN_VARIABLES[1]}={math.ceil(deadline_s)}"
        if can_be_set
        else "use torch 2.12 or later"
    )
    unless = ". Ignore this if you passed --shutdown-timeout to torchrun" if can_be_set else ""
    return (
        f"deadline_s={deadline_s:g}, but torchrun kills its ranks {limit_s} s after it forwards SIGTERM, so the last save may not "
        f"finish: set deadline_s={limit_s}, {longer}, or launch without torchrun (srun){unless}"
    )


def _first(found: list[list[Any]]) -> list[Any]:
    """How long ago the first rank was asked, and which ranks were. Raises :class:`RankError` for ranks at different calls."""
    places = [(step, calls) for step, calls, *_ in found]
    if apart := {r: p for r, p in enumerate(places) if p != places[0]}:
        words = "call {1} to should_stop, with step {0}".format
        raise RankError(
            "coordinated stop",
            {r: f"is at {words(*p)}; rank 0 is at {words(*places[0])}" for r, p in apart.items()},
        )
    asked = [rank for rank, one in enumerate(found) if one[4]]
    who = "all ranks" if len(asked) == len(found) else f"rank {', '.join(map(str, asked[:10]))}"
    return [max(one[2] for one in found), who]


def _point_of(ranks: Ranks) -> StopPoint:
    """A point of its own: under torchrun the store outlives the run, and holds what an earlier one has agreed on."""
    made: list[StopPoint] = []

    def point(nonce: str) -> StopPoint:
        key = f"shardwise/stop/{nonce}"
        return StopPoint(cast(Store, default_store()), key, ranks.rank, ranks.timeout_s)

    def begin() -> str:
        nonce = secrets.token_hex(8)
        made.append(point(nonce))
        made[0].begin()
        return nonce

    nonce = ranks.on_first("begin to look for a stop", begin)
    return made[0] if made else point(nonce)
