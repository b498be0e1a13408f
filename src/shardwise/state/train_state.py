"""``TrainState``: what a checkpoint holds, by reference to the live objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import StateError
from ..layout.model import uses_fsdp1
from .gradients import bare_optimizer, watch_steps

__all__ = ["TrainState", "document_of"]


@dataclass(slots=True, kw_only=True)
class TrainState:
    """The live objects of a training run. Holds references only; nothing is copied or called here.

    Make it before training: its optimizers note after each step from then on which gradients it used. Gradients
    that wait for a step when a save comes (in the middle of an accumulation) are part of the state. Gradients that
    were there before the first ``TrainState``, and that no step has used since, are not: both reports say so.
    """

    model: nn.Module | Mapping[str, nn.Module]
    """Any module, sharded or plain; or several by name (an actor and a critic). Parameters, persistent buffers and
    ``get_extra_state`` of modules are stored; non-persistent buffers are what construction makes of them, also if
    training changed them."""
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None
    """An optimizer over parameters of one model, or several by name. Its state is stored by parameter name."""
    scheduler: Any = None
    """Learning rate scheduler, or anything with ``state_dict`` and ``load_state_dict``; or several by name."""
    dataloader: Any = None
    """Data position: a :class:`ResumableLoader`, torchdata's StatefulDataLoader, or anything with
    ``state_dict`` and ``load_state_dict``. It must count batches consumed, not prefetched."""
    scaler: Any = None
    """A ``torch.amp.GradScaler``."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further state by name: objects with ``state_dict``/``load_state_dict``, or plain values, which a
    resume puts back into this dict."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files put into the checkpoint by relative path, for other programs; those of rank 0. A resume reads none."""

    def __post_init__(self) -> None:
        wrapped = [name for name, model in self.models.items() if uses_fsdp1(model)]
        if wrapped:
            raise StateError(
                f"{', '.join(wrapped)}: wrapped by FSDP1 (FullyShardedDataParallel), whose flat parameters can't be stored or "
                "restored; wrap the model with FSDP2 (fully_shard, or shardwise.shard)"
            )
        _ = self.optimizers

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name; a single one is called ``model``."""
        named = self.model if isinstance(self.model, Mapping) else {"model": self.model}
        return _checked(named, "model", nn.Module)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name, without Accelerate's wrapper; a single one is called ``optimizer``."""
        if self.optimizer is None:
            return {}
        named = self.optimizer if isinstance(self.optimizer, Mapping) else {"optimizer": self.optimizer}
        checked = _checked(named, "optimizer", Optimizer)
        found = {name: bare_optimizer(optimizer) for name, optimizer in checked.items()}
        for optimizer in found.values():  # here, because one may be given later than the others
            watch_steps(optimizer)
        return found


def _checked(given: Mapping[str, Any], what: str, kind: type) -> dict[str, Any]:
    """Names become folders of the checkpoint."""
    for name, one in given.items():
        if not isinstance(one, kind):
            raise StateError(
                f"{what}: expected a {kind.__module__}.{kind.__name__}, or several by name, got a "
                f"{type(one).__name__} ({name!r})"
            )
    bad = [name for name in given if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name)]
    if bad or not given:
        raise StateError(
            f"{what}={{…}}: names must be words (letters, digits, '_', '-'), got {bad}"
            if bad
            else f"{what}={{}}: holds none"
        )
    return dict(given)


def document_of(kind: str, name: str, what: str = "") -> str:
    """Name of the document of a model or an optimizer: ``optimizer``, ``optimizers.critic``, ``optimizers.critic.opaque``.

    Of a single model, which is called ``model``, only ``what``.
    """
    stem = kind if name == kind else f"{kind}s.{name}"
    if not what:
        return stem
    return what if stem == "model" else f"{stem}.{what}"
