"""Applies an accelerator's settings to a model before anything is loaded, and refuses unsupported ones."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ShardError
from ..internals.parallel import tp_by_plan
from ..internals.transformers import is_transformers_model
from ..names import NamedTensor, named_tensors
from ..sharding.replicated import reduce_after_backward

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "SettingsWithoutLoading",
    "check_kind",
    "check_supported",
    "copy_of_plugin",
    "cut_by_tp_plan",
    "keep_taken_over",
    "keep_whole",
    "takes_over_checkpointing",
    "without_rows",
]

#: Kinds of accelerators whose models shardwise can neither fill nor save.
_OTHER_WAYS = {
    "FSDP1": "FSDP1 (fsdp_version: 1), whose flat parameters nothing here can fill or save",
    "DEEPSPEED": "DeepSpeed, which shards and saves models in its own way",
    "MEGATRON_LM": "Megatron-LM, which builds, shards and saves its own models",
}


def cut_by_tp_plan(model: nn.Module, mesh: Any) -> None:
    """Apply tensor parallelism by a transformers model's own plan, unless the caller has applied one."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return
    if not is_transformers_model(model) or not getattr(model, "tp_plan", None):
        raise ShardError(
            f"{type(model).__name__} has no plan for tensor parallelism (tp_plan), and tp_size is {mesh.size()}; call "
            "parallelize_module(model, accelerator.torch_device_mesh['tp'], …) before the load, or set tp_size to 1"
        )
    tp_by_plan(model, mesh)


class SettingsWithoutLoading:
    """Stands for an accelerator in ``fsdp2_prepare_model``, but without its loading.

    The plugin is a copy: the accelerator's own stays unchanged. ``ignored`` are the modules that the plugin skips. The
    parameters ``whole`` are skipped, too: FSDP2 can't shard them.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, whole: Sequence[NamedTensor]) -> None:
        self._accelerator = accelerator
        plugin = copy.copy(accelerator.state.fsdp_plugin)
        plugin.cpu_ram_efficient_loading = False
        ignored = plugin.ignored_modules
        if isinstance(ignored, str):  # given names, it would move the modules, which is impossible on meta
            ignored = [m for name, m in model.named_modules() if re.fullmatch(ignored, name)]
        self.ignored: tuple[nn.Module, ...] = tuple(ignored or ())
        if self.ignored or whole:
            plugin.ignored_modules = [*self.ignored, nn.ParameterList(t.tensor for t in whole)]
        self.state = SimpleNamespace(fsdp_plugin=plugin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def without_rows(model: nn.Module) -> list[NamedTensor]:
    """The parameters without dims or elements: ``fully_shard`` takes none of them, so they stay whole on every rank."""
    return [
        t
        for t in named_tensors(model)
        if t.kind == "parameter"
        and not isinstance(t.tensor, DTensor)
        and (not t.tensor.dim() or not t.tensor.numel())
    ]


def keep_whole(model: nn.Module, whole: Sequence[NamedTensor]) -> None:
    """Average the gradients of the parameters ``whole`` over the ranks that share the model, after each backward."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    if whole and meshes:
        reduce_after_backward([t.owners[0] for t in whole], list(model.modules()), meshes[0])


def takes_over_checkpointing(plugin: Any) -> bool:
    """Whether the user asked for checkpointing. Its wrappers must precede sharding; prepare() must not add them again.

    prepare() looks only at the plugin, not at the model, so the plugin is changed for good.
    """
    if plugin.activation_checkpointing:
        _note_taken_over(plugin)
        plugin.activation_checkpointing = False
    return _is_taken_over(plugin)


def keep_taken_over(plugin: Any) -> None:
    """Leave activation checkpointing to the model that has it, although someone asked the plugin for it again.

    transformers before 5.10: Trainer does, when its accelerator is there.
    """
    if _is_taken_over(plugin):
        plugin.activation_checkpointing = False


#: Plugins that were asked for activation checkpointing, before it was switched off in them. By id: they have no hash.
_TAKEN_OVER: dict[int, weakref.ref[Any]] = {}


def _note_taken_over(plugin: Any) -> None:
    key = id(plugin)
    _TAKEN_OVER[key] = weakref.ref(plugin, lambda _: _TAKEN_OVER.pop(key, None))


def _is_taken_over(plugin: Any) -> bool:
    known = _TAKEN_OVER.get(id(plugin))
    return known is not None and known() is plugin


def copy_of_plugin(plugin: Any) -> Any:
    """A copy with the same settings, those that were taken over from it included."""
    copied = copy.copy(plugin)
    if _is_taken_over(plugin):
        _note_taken_over(copied)
    return copied


def check_kind(accelerator: Accelerator) -> None:
    """Raise :class:`ShardError` for an accelerator that shards and saves without DTensors."""
    kind = accelerator.distributed_type.value
    if kind == "FSDP" and not accelerator.is_fsdp2:
        kind = "FSDP1"
    if kind in _OTHER_WAYS:
        raise ShardError(
            f"the accelerator is set to {_OTHER_WAYS[kind]}; expected FSDP2 (1-D or HSDP), tensor parallelism alone, DDP or "
            "one process. Set distributed_type: FSDP with fsdp_version: 2"
        )


def check_supported(accelerator: Accelerator) -> None:
    """Raise :class:`ShardError` for unsupported settings."""
    check_kind(accelerator)
    kind = accelerator.distributed_type.value
    problem = ""
    if kind not in ("FSDP", "NO", "MULTI_GPU", "MULTI_CPU"):
        problem = f"distributed_type {kind}"
    parallelism = accelerator.parallelism_config
    for name in ("cp", "sp"):
        if parallelism is not None and getattr(parallelism, f"{name}_enabled", False):
            problem = f"{name}_size > 1 in parallelism_config"
    if parallelism is not None and parallelism.tp_enabled and accelerator.is_fsdp2:
        # Accelerate 1.15: prepare() imports a name that transformers 5 has removed.
        problem = "tp_size > 1 together with FSDP, which its prepare() can't do (transformers 5.1 removed ReplicateParallel)"
    if problem:
        raise ShardError(
            f"the accelerator is set to {problem}; expected FSDP2 (1-D or HSDP), tensor parallelism alone, DDP or one "
            "process. Shard the model yourself (shardwise.load fills any DTensors), or leave this out"
        )
