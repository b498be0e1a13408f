"""A gradient scaler's state is whole between ``update`` and the next ``unscale_`` only."""

from __future__ import annotations

from typing import Any

from ..errors import StateError
from ..internals.optim import scaler_stages

__all__ = ["refuse_unfinished_step"]


def refuse_unfinished_step(scaler: Any) -> None:
    """Raise :class:`StateError` in the middle of a step of a ``torch.amp.GradScaler``.

    Between ``unscale_`` and ``step`` it knows that gradients are unscaled already, between ``step`` and ``update``
    whether they were finite; neither is in its ``state_dict``.
    """
    stages = scaler_stages(scaler)
    for stage, where in (("UNSCALED", "unscale_ and step"), ("STEPPED", "step and update")):
        if stage in stages:
            raise StateError(
                f"scaler: the save comes between its {where}, of which its state_dict holds nothing; save after "
                f"scaler.update()"
            )
