"""Shards a model by an accelerator's FSDP2 plugin or its tensor parallel mesh, without loading anything."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ShardError
from ..internals.accelerate import keep_masters, keeps_tie
from ..models.memory import give_addresses
from ..names import named_tensors
from ..sharding.fsdp import remember_sharding
from ._accelerate_settings import (
    SettingsWithoutLoading,
    check_supported,
    copy_of_plugin,
    cut_by_tp_plan,
    keep_whole,
    takes_over_checkpointing,
    without_rows,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["device_of", "shard", "warn_if_whole"]

_log = logging.getLogger(__name__)


def shard(accelerator: Accelerator, model: nn.Module) -> tuple[str, ...]:
    """Apply FSDP2 to ``model`` in place, as ``accelerator.prepare`` would, without loading anything. Works best on meta.

    With ``tp_size`` in the accelerator's ``parallelism_config``, a transformers model is sharded by its own plan instead, unless it already
    contains DTensors; ``accelerator.prepare`` accepts the result. With neither, it does nothing, but rank 0 logs a warning if there are several
    ranks.

    Parameters without dims (a logit scale) are replicated, and their gradients are averaged after each backward, as with
    :func:`shardwise.shard`.

    Returns the names of the parameters in the plugin's ignored modules. These stay plain, and you must reduce their gradients, as
    with Accelerate. Every rank must call it. Raises :class:`ShardError` for FSDP1, DeepSpeed, Megatron, context or sequence parallelism, tensor
    parallelism combined with FSDP or without a plan, 4-bit parameters, and models that ``fully_shard`` refuses.
    """
    check_supported(accelerator)
    parallelism = accelerator.parallelism_config
    if parallelism is not None and parallelism.tp_enabled:
        cut_by_tp_plan(model, accelerator.torch_device_mesh["tp"])
        _remember(accelerator, model)
    elif not accelerator.is_fsdp2:
        warn_if_whole(
            accelerator,
            model,
            accelerator.device.type,
            "FSDP isn't enabled. Set fsdp=True in TrainingArguments, or distributed_type: FSDP and fsdp_version: 2 in the YAML of "
            "accelerate launch (on CPU, Accelerate ignores both)",
        )
    if not accelerator.is_fsdp2:
        return ()
    from accelerate.utils import fsdp2_apply_ac, fsdp2_prepare_model

    try:
        # Look up the plugin's class names now: prepare() can't find them in a sharded model.
        accelerator.state.fsdp_plugin.set_auto_wrap_policy(model)
    except ValueError as error:
        raise ShardError(f"the FSDP plugin does not fit {type(model).__name__}: {error}") from error
    settings = SettingsWithoutLoading(accelerator, model, whole := without_rows(model))
    ignored = _names_in(model, settings.ignored)
    for module in settings.ignored:
        if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            module.to(accelerator.device)
    for tensor in whole:
        if not tensor.tensor.is_meta:
            tensor.tensor.data = tensor.tensor.data.to(accelerator.device)
    try:
        if takes_over_checkpointing(accelerator.state.fsdp_plugin):
            fsdp2_apply_ac(settings, model)
        keep_masters(accelerator, model)
        with keeps_tie(model):
            fsdp2_prepare_model(settings, model)
    except (NotImplementedError, ValueError, AssertionError) as error:
        raise ShardError(
            f"{type(model).__name__} can't be sharded as the FSDP plugin says: {str(error).splitlines()[0]} … Change the "
            "plugin, or shard the model yourself (shardwise.shard and shardwise.load): prepare() takes a sharded model "
            "as it is"
        ) from error
    keep_whole(model, [t for t in whole if t.name not in ignored])
    give_addresses(model.parameters())
    _remember(accelerator, model)
    return ignored


def warn_if_whole(accelerator: Any, model: nn.Module, device: str, why: str) -> None:
    """Warn on rank 0 if each of several ranks has the whole of ``model`` on ``device``, or will. Rank-local."""
    parameters, ranks = list(model.parameters()), accelerator.num_processes
    if ranks == 1 or not accelerator.is_main_process or any(isinstance(p, DTensor) for p in parameters):
        return
    gib, memory = sum(p.nbytes for p in parameters) / 1024**3, "host" if device == "cpu" else device
    _log.warning(
        "every rank holds the whole %s: %d ranks × %.3g GiB of %s memory, because %s",
        type(model).__name__,
        ranks,
        gib,
        memory,
        why,
    )


def _remember(accelerator: Any, model: nn.Module) -> None:
    """Remember the sharding for :func:`shardwise.clone`. Keeps settings only, because an accelerator keeps its models."""
    names = ("distributed_type", "is_fsdp2", "parallelism_config", "torch_device_mesh", "mixed_precision")
    settings: Any = SimpleNamespace(**{name: getattr(accelerator, name, None) for name in names})
    settings.device, settings.is_main_process = accelerator.device, accelerator.is_main_process
    settings.state = SimpleNamespace(
        fsdp_plugin=copy_of_plugin(getattr(accelerator.state, "fsdp_plugin", None))
    )
    remember_sharding(model, lambda second: shard(settings, second))


def _names_in(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    held = {id(p) for module in modules for p in module.parameters()}
    return tuple(t.name for t in named_tensors(model) if id(t.tensor) in held)


def device_of(accelerator: Accelerator) -> torch.device | str:
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        return "cpu"
    device: torch.device = accelerator.device
    return device
