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
        """Whether the run was asked to stop, by a signal on any rank or :meth:`request_stop`. True at the same call on every rank.

        Call it after each step, and as often as you like in between: in a warm-up, or for each batch of an evaluation, then with
        the step of the training. Every rank must make the same calls with the same steps, from the main thread. A call is no
        collective and waits for no other rank than rank 0; it costs a microsecond, and about once in 20 ms a look at the
        process group's store (docs/howto/preemption.md has figures). With calls of 0.5 s or more all ranks stop at
        the call in which rank 0 learns of the signal or at the next one, with faster calls at most 12 calls later.

        When it is True, call :meth:`stop`, and exit with :attr:`exit_code`. Raises :class:`RankError` on all ranks for ranks whose calls
        differ, and if rank 0 does not come to the call within ``IOOptions.timeout_s``.
        """
        if not self._stops.has_stopped:
            self._check_open()
        return self._stops.should_stop(checked_step(step), self._ranks())

    def request_stop(self) -> None:
        """Ask all ranks to stop, as a signal would: for a limit of time, or a loss that is NaN. One rank is enough."""
        self._stops.request()

    @property
    def exit_code(self) -> int:
        """0, or ``exit_status`` (75) of a run that has stopped: give it to ``sys.exit``. A scheduler or launcher then starts it again."""
        return self._stops.exit_code

    def stop(self, state: TrainState, step: int) -> int | None:
        """Publish ``state`` as ``step`` by the fastest safe way, and :meth:`close`. Returns the newest published step.

        A step that is saved, or that an async save is about to publish, is not saved again. A pending save is always waited for:
        no new one is faster. If the time that is left (``deadline_s``; none after a second signal, 2 s or more after the first) is
        less than saves took here, the run ends with the step before. A scheduler that kills in the middle leaves the
        step before as it is. Collective. Raises as :meth:`save` and :meth:`close`.
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
