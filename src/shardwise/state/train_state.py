"""``TrainState``: what a checkpoint holds, by reference to the live objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["TrainState"]


@dataclass(slots=True, kw_only=True)
class TrainState:
    """The live objects of a training run. Holds references only; nothing is copied or called here."""

    model: nn.Module
    """Any module: sharded or plain. Parameters, persistent buffers and ``get_extra_state`` of modules are stored;
    non-persistent buffers are what construction makes of them, also if training changed them."""
    optimizer: Optimizer | None = None
    """An optimizer over parameters of ``model``. Its state is stored by parameter name."""
    scheduler: Any = None
    """Learning rate scheduler, or anything with ``state_dict`` and ``load_state_dict``."""
    dataloader: Any = None
    """Data position: a :class:`ResumableLoader`, torchdata's StatefulDataLoader, or anything with
    ``state_dict`` and ``load_state_dict``. It must count batches consumed, not prefetched."""
    scaler: Any = None
    """A ``torch.amp.GradScaler``."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further state by name: objects with ``state_dict``/``load_state_dict``, or plain values, which a
    resume puts back into this dict."""
