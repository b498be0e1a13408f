"""Refuses to save a gradient scaler except between ``update`` and the next ``unscale_``."""

from __future__ import annotations

from typing import Any

from ..errors import StateError
from ..internals.optim import scaler_stages

__all__ = ["refuse_unfinished_step"]


def refuse_unfinished_step(scaler: Any) -> None:
    """Raise :class:`StateError` in the middle of a step of a ``torch.amp.GradScaler``.

    Between ``unscale_`` and ``step`` the scaler knows that gradients are unscaled already, between ``step`` and
    ``update`` whether they were finite. Its ``state_dict`` holds neither.
    """
    stages = scaler_stages(scaler)
    for stage, where in (("UNSCALED", "unscale_ and step"), ("STEPPED", "step and update")):
        if stage in stages:
            raise StateError(
                f"scaler: can't save between {where}, because GradScaler.state_dict() does not record that; save after "
                f"scaler.update()"
            )
