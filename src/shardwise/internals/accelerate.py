"""What shardwise uses of an ``Accelerator`` that Accelerate keeps private. accelerate 1.10-1.15.

It is only read, never written. Importing this does not import Accelerate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Prepared", "has_state_hooks", "prepared", "without_first_batches"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an accelerator prepared, and what was registered with it, in the order of its calls; the live lists.

    Without it, the integration would read Accelerate's private lists by itself.
    """

    models: Sequence[Any]
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    loaders: Sequence[Any]
    objects: Sequence[Any]
    """Of ``register_for_checkpointing``."""


def prepared(accelerator: Any) -> Prepared:
    """What ``accelerator.save_state`` would save. Without it, the caller would have to name everything again."""
    return Prepared(
        accelerator._models,
        accelerator._optimizers,
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator._custom_objects,
    )


def without_first_batches(loader: Any, count: int) -> Any:
    """A loader without the first batches of the present epoch, which is ``loader.iteration``.

    accelerate before 1.15: ``skip_first_batches`` makes a loader that counts epochs from 0. Without this function, a resume
    inside a later epoch would go on in the order of the first.
    """
    from accelerate import skip_first_batches

    rest = skip_first_batches(loader, count)
    if hasattr(rest, "iteration"):
        rest.iteration = loader.iteration
    return rest


def has_state_hooks(accelerator: Any, when: Literal["save", "load"]) -> bool:
    """Whether ``register_save_state_pre_hook`` or ``register_load_state_pre_hook`` was called.

    Without it, files that such a hook writes would be left out of a checkpoint, silently.
    """
    hooks = (
        accelerator._save_model_state_pre_hook if when == "save" else accelerator._load_model_state_pre_hook
    )
    return bool(hooks)
