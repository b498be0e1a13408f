"""What shardwise uses of torch's optimizers, schedulers and scalers that torch keeps private. torch 2.12-2.14."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["inner_by_torch", "keeps_flat_history", "scale_function", "scaler_stages"]


def keeps_flat_history(optimizer: Optimizer) -> bool:
    """Whether an optimizer is LBFGS, or made like it: its state is one flat tensor over all parameters.

    torch 2.12-2.14: copies of it that don't derive from it are told by ``_numel_cache``, which it has after its first
    step. Without it, history would be stored under the name of the first parameter.
    """
    is_named_so = isinstance(optimizer, torch.optim.LBFGS) or type(optimizer).__name__ == "LBFGS"
    return is_named_so or getattr(optimizer, "_numel_cache", None) is not None


def scaler_stages(scaler: Any) -> set[str]:
    """How far the optimizers of a ``torch.amp.GradScaler`` are in a step: ``READY``, ``UNSCALED``, ``STEPPED``.

    torch 2.12-2.14: empty after ``update``. Without it, a save between ``unscale_`` and ``step`` would resume with
    gradients that are scaled down twice.
    """
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    return {state["stage"].name for state in states if "stage" in state}


def inner_by_torch(scheduler: Any) -> Sequence[Any]:
    """The schedulers in a ``SequentialLR`` or ``ChainedScheduler``; none of any other one.

    torch 2.12-2.14. Without it, a state for another number of them would be taken, and fail in a later step.
    """
    found: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return found


def scale_function(scheduler: Any) -> Any | None:
    """The function that was given to a ``CyclicLR`` as ``scale_fn``, which its state is without; else None.

    torch 2.12-2.14. Without it, both reports would be silent about a function that the program has to give again.
    """
    return getattr(scheduler, "_scale_fn_custom", None)
