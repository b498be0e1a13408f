"""What an accelerator's settings ask of a model before anything is loaded, and which of them can't be honoured."""

from __future__ import annotations

import copy
import logging
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from .._compat import is_transformers_model, tp_by_plan
from ..dist import Ranks
from ..errors import ShardError
from ..names import named_tensors

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "SettingsWithoutLoading",
    "check_supported",
    "cut_by_tp_plan",
    "takes_over_checkpointing",
    "warn_of_empty_shards",
]

_log = logging.getLogger(__name__)


def cut_by_tp_plan(model: nn.Module, mesh: Any) -> None:
    """Tensor parallelism as a transformers model's own plan says, unless the caller has applied one."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return
    if not is_transformers_model(model) or not getattr(model, "tp_plan", None):
        raise ShardError(
            f"{type(model).__name__} has no plan for tensor parallelism (tp_plan), and tp_size is {mesh.size()}; call "
            "parallelize_module(model, accelerator.torch_device_mesh['tp'], …) before the load, or set tp_size to 1"
        )
    tp_by_plan(model, mesh)


class SettingsWithoutLoading:
    """What ``fsdp2_prepare_model`` asks of an accelerator, with the loading left to us.

    The plugin is a copy: the accelerator's own stays as the user made it.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self._accelerator = accelerator
        plugin = copy.copy(accelerator.state.fsdp_plugin)
        plugin.cpu_ram_efficient_loading = False
        ignored = plugin.ignored_modules
        if isinstance(ignored, str):  # by name it would move the modules, which can't be done from meta
            plugin.ignored_modules = [m for name, m in model.named_modules() if re.fullmatch(ignored, name)]
        self.state = SimpleNamespace(fsdp_plugin=plugin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def takes_over_checkpointing(plugin: Any) -> bool:
    """Whether the user asked for it. Wrappers have to be there before sharding, and prepare() must not add them again.

    It looks at the plugin alone, not at the model, so the plugin is changed for good.
    """
    wanted = plugin.activation_checkpointing or getattr(plugin, "_checkpoints_activations", False)
    plugin.activation_checkpointing, plugin._checkpoints_activations = False, wanted
    return bool(wanted)


def check_supported(accelerator: Accelerator) -> None:
    """Raises :class:`ShardError` for settings that can't be honoured."""
    kind = accelerator.distributed_type.value
    problem = ""
    if kind == "FSDP" and not accelerator.is_fsdp2:
        problem = "FSDP version 1; say fsdp_version: 2"
    elif kind not in ("FSDP", "NO", "MULTI_GPU", "MULTI_CPU"):
        problem = f"distributed_type {kind}"
    parallelism = accelerator.parallelism_config
    for name in ("cp", "sp"):
        if parallelism is not None and getattr(parallelism, f"{name}_enabled", False):
            problem = f"{name}_size > 1 in parallelism_config"
    if parallelism is not None and parallelism.tp_enabled and accelerator.is_fsdp2:
        # Accelerate 1.15: prepare() imports what transformers 5 has no more.
        problem = "tp_size > 1 beside FSDP, which its prepare() can't do (ReplicateParallel went with transformers 4)"
    if problem:
        raise ShardError(
            f"the accelerator is set to {problem}; expected FSDP2 (1-D or HSDP), tensor parallelism alone, DDP or one "
            "process. Shard the model yourself (shardwise.load fills any DTensors), or leave this out"
        )


def warn_of_empty_shards(model: nn.Module) -> None:
    """On rank 0, where several trainable parameters have shards without rows: ``accelerator.prepare`` mixes them up."""
    found = [
        t.name
        for t in named_tensors(model)
        if t.kind == "parameter" and t.tensor.requires_grad and _is_empty_somewhere(t.tensor)
    ]
    if len(found) > 1 and Ranks.current().rank == 0:
        _log.warning(
            "%s and %d more have too few rows for all ranks; call shardwise.integrations.accelerate.prepare(accelerator, …) "
            "instead of accelerator.prepare(…), which would mix them up in the optimizer of the ranks that hold none; "
            "ShardwiseTrainer does so itself",
            found[0],
            len(found) - 1,
        )


def _is_empty_somewhere(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            size, ranks = tensor.shape[placement.dim], tensor.device_mesh.size(axis)
            if -(-size // ranks) * (ranks - 1) >= size:
                return True
    return False
