"""What the Accelerate integration builds on: settings of the FSDP plugin, sharding and preparing a model."""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ShardError
from ..internals.torch import is_checkpointed, original_class
from ..internals.trainers import keep_masters, keeps_tie, tp_by_plan
from ..internals.transformers import blocks_not_to_split, is_transformers_model
from ..models.meta import give_addresses
from ..names import NamedTensor, named_tensors, unwrap
from ..sharding.fsdp import remember_sharding
from ..tensors.live import reduce_after_backward

if TYPE_CHECKING:
    from accelerate import Accelerator

_log = logging.getLogger(__name__)


# ----------------------------------------------------------------------------------------------------
# Applies an accelerator's settings to a model before anything is loaded, and refuses unsupported ones.

#: Kinds of accelerators whose models shardwise can neither fill nor save.
_OTHER_WAYS = {
    "FSDP1": "FSDP1 (fsdp_version: 1), whose flat parameters nothing here can fill or save",
    "DEEPSPEED": "DeepSpeed, which shards and saves models in its own way",
    "MEGATRON_LM": "Megatron-LM, which builds, shards and saves its own models",
}


def _cut_by_tp_plan(model: nn.Module, mesh: Any) -> None:
    """Apply tensor parallelism by a transformers model's own plan, unless the caller has applied one."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return
    if not is_transformers_model(model) or not getattr(model, "tp_plan", None):
        raise ShardError(
            f"{type(model).__name__} has no plan for tensor parallelism (tp_plan), and tp_size is {mesh.size()}; call "
            "parallelize_module(model, accelerator.torch_device_mesh['tp'], …) before the load, or set tp_size to 1"
        )
    tp_by_plan(model, mesh)


class _SettingsWithoutLoading:
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


#: Set in a plugin that was asked for activation checkpointing, before it was switched off in it.
_TAKEN_OVER = "checkpointing_is_applied_by_shardwise"


def _takes_over_checkpointing(plugin: Any) -> bool:
    """Whether the user asked for checkpointing. Its wrappers must precede sharding; prepare() must not add them again.

    prepare() looks only at the plugin, not at the model, so the plugin is changed for good.
    """
    if plugin.activation_checkpointing:
        setattr(plugin, _TAKEN_OVER, True)
        plugin.activation_checkpointing = False
    return hasattr(plugin, _TAKEN_OVER)


def keep_taken_over(plugin: Any) -> None:
    """Leave activation checkpointing to the model that has it, although someone asked the plugin for it again.

    transformers before 5.10: Trainer does, when its accelerator is there.
    """
    if hasattr(plugin, _TAKEN_OVER):
        plugin.activation_checkpointing = False


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


# ----------------------------------------------------------------------------------------------------
# Shards a model by an accelerator's FSDP2 plugin or its tensor parallel mesh, without loading anything.


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
        _cut_by_tp_plan(model, accelerator.torch_device_mesh["tp"])
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
    whole = [  # without dims or elements: ``fully_shard`` takes none of them, so they stay whole on every rank
        t
        for t in named_tensors(model)
        if t.kind == "parameter"
        and not isinstance(t.tensor, DTensor)
        and (not t.tensor.dim() or not t.tensor.numel())
    ]
    settings = _SettingsWithoutLoading(accelerator, model, whole)
    held = {id(p) for module in settings.ignored for p in module.parameters()}
    ignored = tuple(t.name for t in named_tensors(model) if id(t.tensor) in held)
    for module in settings.ignored:
        if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            module.to(accelerator.device)
    for tensor in whole:
        if not tensor.tensor.is_meta:
            tensor.tensor.data = tensor.tensor.data.to(accelerator.device)
    try:
        if _takes_over_checkpointing(accelerator.state.fsdp_plugin):
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
    # Average the gradients of the parameters that stay whole, over the ranks that share the model, after each backward.
    owners = [t.owners[0] for t in whole if t.name not in ignored]
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    if owners and meshes:
        reduce_after_backward(owners, list(model.modules()), meshes[0])
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
    settings.state = SimpleNamespace(fsdp_plugin=copy.copy(getattr(accelerator.state, "fsdp_plugin", None)))
    remember_sharding(model, lambda second: shard(settings, second))


def device_of(accelerator: Accelerator) -> torch.device | str:
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        return "cpu"
    device: torch.device = accelerator.device
    return device


# ----------------------------------------------------------------------------------------------------
# Works around two things that ``accelerator.prepare`` gets wrong for sharded models: wrapped classes, empty shards.

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
