"""What shardwise calls of the HF Trainer that is private. transformers 5.20-5.23."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["end_epoch"]


def end_epoch(trainer: Any, epoch: int, given: Mapping[str, Any]) -> None:
    """What a Trainer does when an epoch has no more steps: callbacks, then a log, an evaluation and a save, as they say.

    ``given``: the arguments of its ``_run_epoch``. transformers 5.20-5.23: the last lines of ``Trainer._run_epoch``. Without it,
    a resume from a checkpoint that was saved after an epoch's last step would lose the evaluation at the epoch's end,
    and the numbers that its loader draws.
    """
    trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
    names = ("model", "trial", "ignore_keys_for_eval", "start_time")
    trainer._maybe_log_save_evaluate(
        trainer._tr_loss, None, epoch=epoch, **{name: given[name] for name in names}
    )
