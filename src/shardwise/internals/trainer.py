"""What shardwise uses of the HF Trainer and its arguments that is private, or moves between releases. transformers 5.3-5.23."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["end_epoch", "fsdp_settings", "leaves_out_fsdp_version"]


def fsdp_settings(args: Any) -> dict[str, Any] | None:
    """The settings of the FSDP plugin that a Trainer with these arguments will have; None without FSDP.

    transformers before 5.10: Trainer sets two of them only after it has made the plugin. Without this function, a model that is
    sharded before would lack activation checkpointing.
    """
    if args.fsdp_plugin_args is None:
        return None
    late = ("limit_all_gathers", "activation_checkpointing")
    return {
        **{name: args.fsdp_config[name] for name in late if name in args.fsdp_config},
        **args.fsdp_plugin_args,
    }


def leaves_out_fsdp_version(args: Any) -> bool:
    """Whether arguments ask for FSDP and leave its version to transformers (before 5.10: FSDP1).

    Without it, the error would name FSDP1 to people who never asked for it.
    """
    return bool(args.fsdp) and "version" not in (args.fsdp_config or {})


def end_epoch(trainer: Any, epoch: int, given: Mapping[str, Any]) -> None:
    """What a Trainer does when an epoch has no more steps: callbacks, then a log, an evaluation and a save, as they say.

    ``given``: the arguments of its ``_run_epoch``. transformers 5.3-5.23: the last lines of ``Trainer._run_epoch``. Without it,
    a resume from a checkpoint that was saved after an epoch's last step would lose the evaluation at the epoch's end,
    and the numbers that its loader draws.
    """
    trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
    names = ("model", "trial", "ignore_keys_for_eval", "start_time")
    trainer._maybe_log_save_evaluate(
        trainer._tr_loss, None, epoch=epoch, **{name: given[name] for name in names}
    )
