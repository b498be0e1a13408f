"""``TrainState``: the live objects that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from ..errors import StateError
from ..format.documents import document_of
from ..layout.model import fsdp1_problem
from ..limits import is_word
from .beyond_model import refuse_fsdp1
from .gradients import bare_optimizer, watch_steps
from .rounding import warn_of_rounded_updates

__all__ = ["TrainState", "document_of"]


@dataclass(slots=True)
class TrainState:
    """The objects of a training run that are saved and restored together. It holds references and copies nothing.

    Create it before training: it registers a hook with each optimizer (:meth:`watch`) to record which gradients each step used. At a save,
    gradients that still wait for a step (in the middle of an accumulation) are part of the state. Gradients that existed before the first
    ``TrainState`` and that no step has used since aren't saved; both reports say so.

    Custom state that a model or an optimizer saves (through its own ``state_dict``, its modules' ``_save_to_state_dict``, or
    hooks) is stored too, and restored through its own ``load_state_dict``. The reports list the parts that can't be stored or that weren't
    accepted. See docs/state.md.

    Creating it needs no other rank, but a save or a restore needs one on every rank, with the same names. Raises :class:`StateError` for a
    model wrapped by FSDP1, for an object of the wrong type, and for names with characters other than letters, digits, ``_`` and ``-``,
    because names become folder names.
    """

    model: nn.Module | Mapping[str, nn.Module]
    """Any module, sharded or not, or several by name (an actor and a critic, for example). Parameters, persistent buffers and the
    ``get_extra_state`` of modules are stored. Non-persistent buffers aren't, because constructing the model creates them again."""
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None
    """An optimizer over the parameters of one model, or several by name. Its state is stored by parameter name."""
    _: KW_ONLY
    scheduler: Any = None
    """A learning rate scheduler, or any object with ``state_dict`` and ``load_state_dict``, or several by name."""
    dataloader: Any = None
    """Where the run is in its data: a :class:`ResumableLoader`, torchdata's StatefulDataLoader, or any object with ``state_dict`` and
    ``load_state_dict``. It must count the batches that were consumed, not those that were prefetched."""
    scaler: Any = None
    """A ``torch.amp.GradScaler``."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional state by name: objects with ``state_dict`` and ``load_state_dict``, or plain values, which a restore writes back into this dict."""
    frozen: Literal["hold", "refer"] = "hold"
    """``"refer"``: for parameters with neither ``requires_grad`` nor optimizer state, such as the base under adapters, a checkpoint stores
    digests instead of content. Such a checkpoint needs the same base: load it first, and the restore compares each digest with the live tensor
    before it changes anything. ``load`` and ``export_hf`` can't read it. A restore follows the checkpoint, not this field."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files by relative path, added to the checkpoint for other programs. Rank 0's are written. A restore doesn't read them."""

    def __post_init__(self) -> None:
        if self.frozen not in ("hold", "refer"):
            raise StateError(f"frozen={self.frozen!r}: expected 'hold' or 'refer'")
        for model in self.models.values():
            refuse_fsdp1(fsdp1_problem(model.named_modules()))
        self.watch()
        warn_of_rounded_updates(self.optimizers)

    def watch(self) -> None:
        """Record from now on which gradients each optimizer step uses. Each optimizer is watched once, no matter how often you call this.

        Registers a hook (``register_step_post_hook``). Creating the state does this, and so does each save and restore for
        optimizers that were added later.
        """
        for optimizer in self.optimizers.values():
            watch_steps(optimizer)

    @property
    def not_given(self) -> tuple[str, ...]:
        """The fields that a training usually has, ``optimizer`` and ``dataloader``, and that this state lacks."""
        return tuple(name for name in ("optimizer", "dataloader") if getattr(self, name) is None)

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name; a single one is named ``model``."""
        named = self.model if isinstance(self.model, Mapping) else {"model": self.model}
        return _checked(named, "model", nn.Module)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name, without wrappers; a single one is named ``optimizer``."""
        return {name: bare_optimizer(optimizer) for name, optimizer in self.given_optimizers.items()}

    @property
    def given_optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name, as they were passed: with Accelerate's wrapper, or one that has its own state."""
        if self.optimizer is None:
            return {}
        named = self.optimizer if isinstance(self.optimizer, Mapping) else {"optimizer": self.optimizer}
        return _checked(named, "optimizer", Optimizer)


def _checked(given: Mapping[str, Any], what: str, cls: type) -> dict[str, Any]:
    """The given objects by name, checked: names become folders of the checkpoint."""
    for name, one in given.items():
        if not isinstance(one, cls):
            raise StateError(
                f"{what}: expected a {cls.__module__}.{cls.__name__}, or several by name, got a "
                f"{type(one).__name__} ({name!r})"
            )
    bad = [name for name in given if not is_word(name)]
    if bad or not given:
        raise StateError(
            f"{what}={{…}}: names must be words (letters, digits, '_', '-'), got {bad}"
            if bad
            else f"{what}={{}}: holds none"
        )
    return dict(given)
