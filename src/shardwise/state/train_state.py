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
    """The live objects of a training run. Holds references only; nothing is copied.

    Make it before training: it registers a hook with its optimizers (:meth:`watch`), and from then on notes after each
    step which gradients the step used. Gradients that wait for a step when a save comes (in the middle of an
    accumulation) are part of the state. Gradients that were there before the first ``TrainState``, and that no step has
    used since, are not: both reports say so.

    Further state that a model or an optimizer saves on its own (by its own ``state_dict``, its modules'
    ``_save_to_state_dict``, or hooks) is stored too, and restored through its own ``load_state_dict``. The reports name
    the parts that can't be stored or do not arrive. See docs/state.md.

    Rank-local; but a save or a restore needs one on every rank, with the same names. Raises :class:`StateError` for a
    model that FSDP1 wraps, an object of another type than its field names, and names that are not words (letters,
    digits, ``_``, ``-``): they become names of folders.
    """

    model: nn.Module | Mapping[str, nn.Module]
    """Any module, sharded or plain; or several by name (an actor and a critic). Parameters, persistent buffers and
    ``get_extra_state`` of modules are stored. Non-persistent buffers are not: construction makes them again."""
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None
    """An optimizer over parameters of one model, or several by name. Its state is stored by parameter name."""
    _: KW_ONLY
    scheduler: Any = None
    """Learning rate scheduler, or anything with ``state_dict`` and ``load_state_dict``; or several by name."""
    dataloader: Any = None
    """Data position: a :class:`ResumableLoader`, torchdata's StatefulDataLoader, or anything with
    ``state_dict`` and ``load_state_dict``. It must count batches consumed, not prefetched."""
    scaler: Any = None
    """A ``torch.amp.GradScaler``."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further state by name: objects with ``state_dict``/``load_state_dict``, or plain values, which a restore puts back
    into this dict."""
    frozen: Literal["hold", "refer"] = "hold"
    """``"refer"``: of parameters that have neither ``requires_grad`` nor optimizer state, a checkpoint holds digests and no
    content: of a base under adapters. Such a checkpoint needs that base: load it first, and the restore compares each
    digest with the live tensor before it changes anything. It is no source of ``load`` or ``export_hf``. A restore
    goes by the checkpoint, not by this field."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files by relative path, put into the checkpoint for other programs. Rank 0's are written; no restore reads
    them."""

    def __post_init__(self) -> None:
        if self.frozen not in ("hold", "refer"):
            raise StateError(f"frozen={self.frozen!r}: expected 'hold' or 'refer'")
        for model in self.models.values():
            refuse_fsdp1(fsdp1_problem(model.named_modules()))
        self.watch()
        warn_of_rounded_updates(self.optimizers)

    def watch(self) -> None:
        """Note from now on which gradients each step of the optimizers uses; once per optimizer, however often it is called.

        Registers a hook (``register_step_post_hook``). Making the state does it, and so does each save and restore, for an
        optimizer that was given later.
        """
        for optimizer in self.optimizers.values():
            watch_steps(optimizer)

    @property
    def not_given(self) -> tuple[str, ...]:
        """The fields that a training usually has, ``optimizer`` and ``dataloader``, and that this state lacks."""
        return tuple(name for name in ("optimizer", "dataloader") if getattr(self, name) is None)

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by name; a single one is called ``model``."""
        named = self.model if isinstance(self.model, Mapping) else {"model": self.model}
        return _checked(named, "model", nn.Module)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name, without their wrappers; a single one is called ``optimizer``."""
        return {name: bare_optimizer(optimizer) for name, optimizer in self.given_optimizers.items()}

    @property
    def given_optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by name as given: with Accelerate's wrapper, or one that has its own state."""
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
