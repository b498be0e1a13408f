"""What shardwise uses of an ``Accelerator`` that Accelerate keeps private. accelerate 1.11-1.15.

Importing this does not import Accelerate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Literal

import torch
from packaging.version import Version
from torch import nn

from ..objects import frozen

__all__ = [
    "Prepared",
    "count_own_batches",
    "has_state_hooks",
    "keep_masters",
    "keeps_tie",
    "prepared",
    "without_first_batches",
]


@frozen
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


def count_own_batches(loader: Any) -> None:
    """Make the state of a stateful loader count the batches that this rank got.

    accelerate before 1.13: takes one batch off for each other rank, which only a dispatcher's state needs. Without this function, a
    resume inside an epoch would see batches again, silently.
    """
    from accelerate.data_loader import DataLoaderShard
    from accelerate.state import GradientState, PartialState

    name = "adjust_state_dict_for_prefetch"
    if type(loader) is not DataLoaderShard or name in vars(DataLoaderShard) or name in vars(loader):
        return
    setattr(loader, name, _nothing)
    state = vars(loader).get("dl_state_dict") or {}
    is_running = any(one is loader for one in GradientState().dataloader_references)
    if not is_running and not state.get("_iterator_finished"):
        return
    taken = PartialState().num_processes - 1
    for key in ("_sampler_iter_yielded", "_num_yielded"):
        if key in state:
            state[key] += taken
    if "samples_yielded" in (state.get("_index_sampler_state") or {}):
        state["_index_sampler_state"]["samples_yielded"] += taken * loader.batch_size


def _nothing() -> None:
    """Stands for a loader's method."""


def _is_release(major: int, minor: int) -> bool:
    """Whether a release is installed whose fault is worked around here: accelerate 1.13 or 1.14."""
    return Version(metadata.version("accelerate")).release[:2] == (major, minor)


@contextmanager
def keeps_tie(model: Any) -> Iterator[None]:
    """Let ``fsdp2_prepare_model`` leave an embedding and its tied head to one group, the root's, for the block.

    accelerate 1.14: gives them two groups, which makes two parameters of one. Without this function, a model with a tied head could
    not be filled.
    """
    names = ("get_input_embeddings", "get_output_embeddings")
    found = [getattr(model, name)() for name in names if _is_release(1, 14) and hasattr(model, name)]
    weights = [getattr(module, "weight", None) for module in found]
    if len(weights) < 2 or weights[0] is None or weights[0] is not weights[1]:
        yield
        return
    for name in names:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)


def keep_masters(accelerator: Any, model: nn.Module) -> None:
    """Make a model's trainable parameters fp32 if the accelerator trains in mixed precision. Call it before the model is sharded.

    accelerate 1.13: says so in a warning, and leaves them as they are. Without this function, weights stored in bf16 would be trained
    in bf16.
    """
    if accelerator.mixed_precision == "no" or getattr(model, "dtype", None) == torch.float32:
        return
    if _is_release(1, 13):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)


def has_state_hooks(accelerator: Any, when: Literal["save", "load"]) -> bool:
    """Whether ``register_save_state_pre_hook`` or ``register_load_state_pre_hook`` was called.

    Without it, files that such a hook writes would be left out of a checkpoint, silently.
    """
    hooks = (
        accelerator._save_model_state_pre_hook if when == "save" else accelerator._load_model_state_pre_hook
    )
    return bool(hooks)
