"""The half of a Checkpointer that ends a run which was asked to stop."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from ..format.steps import checked_step
from ..preemption.stops import Stops
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from .async_save import AsyncSave
from .collect import Lineage
from .last_save import SAVED, SaveTimes, Situation, way_for_all
from .save import SaveReport

__all__ = ["Stopping"]

_log = logging.getLogger(__name__)


class Stopping(ABC):
    """The stopping methods of :class:`.checkpointer.Checkpointer`."""

    _stops: Stops
    _times: SaveTimes
    _pending: AsyncSave | None
    _lineage: Lineage | None

    @abstractmethod
    def save(self, state: TrainState, step: int) -> SaveReport:
        """The Checkpointer's."""

    @abstractmethod
    def close(self) -> None:
        """The Checkpointer's."""

    @abstractmethod
    def _settle(self) -> tuple[int, str] | None: ...

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _ranks(self) -> Ranks: ...

    def should_stop(self, step: int) -> bool:
        """Whether the run was asked to stop, by a signal on any rank or by :meth:`request_stop`. True in the same call on every rank.

        Call it after each step, and as often as you like in between: during a warm-up, or for each batch of an evaluation (with the training
        step's number). Every rank must make the same calls with the same steps, from the main thread. A call isn't a collective and
        waits for rank 0 only. It takes about a microsecond, and every 20 ms or so it also checks the process group's store
        (docs/howto/preemption.md has numbers). If calls are 0.5 s or more apart, all ranks stop at the call in which rank 0 learns of the
        signal, or at the next one. With more frequent calls, they stop at most 12 calls later.

        When it returns True, call :meth:`stop` and exit with :attr:`exit_code`. Raises :class:`RankError` on all ranks if their calls differ, or if
        rank 0 doesn't make the call within ``IOOptions.timeout_s``.
        """
        if not self._stops.has_stopped:
            self._check_open()
        return self._stops.should_stop(checked_step(step), self._ranks())

    def request_stop(self) -> None:
        """Ask all ranks to stop, as a signal would: at a time limit, or when the loss is NaN, for example. One rank's call is enough."""
        self._stops.request()

    @property
    def exit_code(self) -> int:
        """Pass this to ``sys.exit``: ``exit_status`` (75) if the run was stopped, so that the scheduler or launcher restarts it, otherwise 0."""
        return self._stops.exit_code

    def stop(self, state: TrainState, step: int) -> int | None:
        """Save ``state`` as ``step`` in the fastest safe way, and :meth:`close`. Returns the newest published step.

        A step that is already saved, or about to be published by an async save, isn't saved again. A pending save is always awaited, because
        no new save could be faster. If the time left until ``deadline_s`` is shorter than previous saves took, the run ends with the
        previous step. A second signal, 2 s or more after the first, leaves no time. If the scheduler kills the process during the save,
        the previous step is unaffected. Every rank must call it. Raises the errors of :meth:`save` and :meth:`close`.
        """
        step, ranks = checked_step(step), self._ranks()
        for _ in range(2):  # what fails is tried once more, an async save in the fallback
            saves, why = ranks.combine(
                "plan the last save", lambda: self._situation(step).to_list(), way_for_all
            )
            if not saves:
                if ranks.rank == 0 and why != SAVED:
                    _log.warning("step %d is not saved: %s", step, why)
                break
            self.save(state, step)
            self._settle()
        self.close()
        newest = None if self._lineage is None else self._lineage.parent_step
        if ranks.rank == 0:
            _log.warning("stopped after step %d; the newest saved step is %s", step, newest)
        return newest

    def _situation(self, step: int) -> Situation:
        pending, newest = self._pending, None if self._lineage is None else self._lineage.parent_step
        return Situation(
            step,
            newest,
            None if pending is None else pending.step,
            0.0 if pending is None else pending.seconds,
            self._times.longest_s,
            self._stops.left_s(),
        )
