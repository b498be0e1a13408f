"""Works around two things that ``accelerator.prepare`` gets wrong for sharded models: wrapped classes, empty shards."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ShardError
from ..internals.torch import is_checkpointed, original_class
from ..internals.transformers import blocks_not_to_split
from ..names import unwrap

__all__ = ["Groups", "adopt", "explained", "groups_of", "put_back"]

Groups = list[list[torch.Tensor]]


@contextmanager
def explained(way: str) -> Iterator[None]:
    """Raise an error that names the cause if ``accelerator.prepare`` fails on a model that was loaded whole.

    ``way`` is the call that loads it sharded. Raises :class:`ShardError`.
    """
    try:
        yield
    except AttributeError as error:
        if "device_mesh" not in str(error):
            raise
        raise ShardError(
            f"the model was loaded unsharded, and Accelerate's cpu_ram_efficient_loading treats each of its tensors as a shard, even "
            f"a buffer or a parameter that isn't sharded ({error}). Load the model by {way}, or set "
            f"cpu_ram_efficient_loading to false: then every rank first loads the full model"
        ) from error


def groups_of(optimizer: torch.optim.Optimizer) -> Groups | None:
    """The parameters of a sharded model's optimizer, by group; None if nothing is sharded yet.

    ``accelerator.prepare`` identifies them by the address of their shards, but all empty shards have the address 0: on
    a rank without rows of two parameters it would add one twice and never the other. See :func:`put_back`.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    return groups if any(isinstance(p, DTensor) for group in groups for p in group) else None


def put_back(optimizer: torch.optim.Optimizer, groups: Groups) -> None:
    """Give an optimizer its former parameters; ``prepare`` does not replace those of a sharded model."""
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters


def adopt(plugin: Any, model: nn.Module) -> None:
    """Set in the plugin the settings that ``prepare`` would look up in the model and can't find after sharding.

    For models sharded under another plugin object, or by ``sw.shard``. Raises :class:`ShardError`.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    modules = list(model.modules())
    if not any(isinstance(m, FSDPModule) for m in modules):
        return
    if not isinstance(model, FSDPModule) and not isinstance(unwrap(model), FSDPModule):
        raise ShardError(
            f"parts of the {type(model).__name__} are sharded, and it is not: was it wrapped after it was loaded? "
            "Add adapters when you load: load_pretrained(args, path, adapter=peft_config), without peft_config for the trainer"
        )
    if any(map(is_checkpointed, modules)):
        plugin.activation_checkpointing = False  # the wrappers are there
    if plugin.auto_wrap_policy is not transformer_auto_wrap_policy:
        return
    names = plugin.transformer_cls_names_to_wrap
    if names is None:
        names = plugin.transformer_cls_names_to_wrap = list(blocks_not_to_split(model))
    classes = {cls for cls in map(original_class, modules) if cls.__name__ in names}
    plugin.auto_wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
