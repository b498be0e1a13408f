"""Whether a run should stop: signals of this process, the agreement of all ranks, the time that is left, the exit status."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist

from ..errors import RankError
from ..internals.torch import default_store
from ..ranks.ranks import Ranks
from .leases import StopPoint, Store
from .signals import Received, StopSignals, numbers_of

__all__ = ["PreemptionPolicy", "Stops"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPolicy:
    """Which signals ask a run to stop, and how it then ends. Pass it as ``preemption=`` to ``Checkpointer``, ``ShardwiseAccelerator`` or
    ``ShardwiseTrainer``.

    Creating a policy doesn't install any handler. Raises :class:`ValueError` for unknown signal names and for numbers out of range.
    """

    stop_on: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    """Names of the signals. Handlers that were already installed are still called, and are restored when the run is closed. ``()`` listens for no
    signal; ``request_stop`` still works. Python handles signals in the main thread, so create the run's object there."""
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
            "stopping together", lambda: [step, calls, ago_s, number, first is not None], _first
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
            "stopping together",
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
