"""A Trainer run that signals stop: after a step, or inside an evaluation."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from transformers import Trainer, TrainerCallback

from ..checkpoint.last_save import LastSave
from ..errors import CheckpointError
from ..preemption.stops import PreemptionPolicy, Stops
from ..ranks.ranks import Ranks
from ._trainer_folder import Run

_log = logging.getLogger(__name__)

__all__ = ["StopCallback", "Stopping", "StoppedInEvaluationError"]


class StoppedInEvaluationError(Exception):
    """Ends an evaluation on every rank, at the same batch."""


class StopCallback(TrainerCallback):
    """Looks whether to stop after each step and each batch of an evaluation; only while ``train`` runs."""

    def __init__(self) -> None:
        self.stops: Stops | None = None
        self.is_listening = False

    @property
    def has_stopped(self) -> bool:
        return self.stops is not None and self.stops.has_stopped

    def _should_stop(self, state: Any) -> bool:
        if self.stops is None or not self.is_listening:
            return False  # an evaluation outside of ``train``
        return self.stops.should_stop(state.global_step, Ranks.current())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # An evaluation that is due begins and ends with its first batch: its loader draws a number, on which a resume depends.
        if self._should_stop(state):
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.has_stopped:
            control.should_evaluate = False

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._should_stop(state):
            raise StoppedInEvaluationError


class Stopping(Trainer):
    """The stopping methods of :class:`.trainer.ShardwiseTrainer`, which documents the contract."""

    _preemption: PreemptionPolicy | None
    _stopping: StopCallback
    _last_save: LastSave
    _run: Run
    resume_report: Any

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Listen for signals in the block. Collective."""
        self._stopping.stops, self._last_save = None, LastSave()
        if self._preemption is not None:
            self._stopping.stops = Stops(self._preemption, Ranks.current())
            self._stopping.is_listening = True
        try:
            yield
        finally:
            self._stopping.is_listening = False
            if self._stopping.stops is not None:
                self._stopping.stops.close()

    def request_stop(self) -> None:
        """Ask all ranks to stop, as a signal would: at a time limit, or when the loss is NaN. One rank's call is enough, for example in a callback.

        ``train`` checks for requests only with a :class:`shardwise.PreemptionPolicy`; without one, this raises :class:`CheckpointError`. Does
        nothing while ``train`` isn't running.
        """
        if self._preemption is None:
            raise CheckpointError(
                "request_stop: train() doesn't check for stop requests; pass the trainer preemption=shardwise.PreemptionPolicy()"
            )
        if self._stopping.stops is not None and self._stopping.is_listening:
            self._stopping.stops.request()

    @property
    def exit_code(self) -> int:
        """Pass this to ``sys.exit``: the policy's ``exit_status`` if ``train`` was stopped, otherwise 0."""
        return 0 if self._stopping.stops is None else self._stopping.stops.exit_code

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As Trainer's, unless it is the last save and there is no time for it."""
        stops, started = self._stopping.stops, time.monotonic()
        if stops is None or self.state.global_step in self._run.published:
            super()._save_checkpoint(model, trial)
            return
        if self.resume_report is not None:
            self._last_save.resumed()
        if stops.has_stopped and (why := self._last_save.refusal(stops.left_s(), Ranks.current())):
            _log.warning("checkpoint %d is not saved: %s", self.state.global_step, why)
            return
        super()._save_checkpoint(model, trial)
        if self.state.global_step in self._run.published:
            self._last_save.saved(time.monotonic() - started)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; but a run that was stopped goes on from its newest checkpoint, so neither is the best model loaded, nor does
        ``save_total_limit=1`` leave the best checkpoint alone."""
        best = self.state.best_model_checkpoint
        if self._stopping.has_stopped:
            self.state.best_model_checkpoint = None
        output = super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.state.best_model_checkpoint = best
        return output

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As Trainer's; an evaluation that a signal has stopped has no metrics."""
        try:
            metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        except StoppedInEvaluationError:
            self.control.should_training_stop = self.control.should_save = True
            return {}
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As Trainer's; without metrics nothing is compared, and the step is saved."""
        return True if self._stopping.has_stopped else bool(super()._determine_best_metric(metrics, trial))
