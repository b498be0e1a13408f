"""Accelerate: models sharded as the accelerator's FSDP2 plugin says and loaded here; its state in our checkpoints.

A script keeps its accelerator, its YAML and its ``prepare``; lines change where weights or state go in and out::

    from shardwise.integrations import accelerate as swa

    model, report = swa.load_pretrained(accelerator, "path/to/model")   # for AutoModel….from_pretrained
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    swa.save_state(accelerator, "runs/a/step-100")                      # for accelerator.save_state
    swa.load_state(accelerator, "runs/a/step-100")                      # for accelerator.load_state

Nothing of Accelerate is patched: ``prepare`` takes a model that is sharded already as it is.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from .. import checkpoint
from ..dist import Ranks
from ..errors import CheckpointError, NoCheckpointError, ShardError, StateError
from ..loading import load as _load
from ..names import named_tensors
from ..plan import IOOptions
from ..pretrained import load_wrapped
from ..proof.report import LoadReport
from ..restoring import ResumeReport
from ..state.gradients import watch_steps
from ..state.train_state import TrainState
from ..store.save import SaveReport

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["load", "load_pretrained", "load_state", "prepare", "save_state", "shard", "train_state"]

_log = logging.getLogger(__name__)


def load_pretrained(
    accelerator: Accelerator,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    auto_class: Any = None,
    config: Any = None,
    trust_remote_code: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    unused: Sequence[str] = (),
    init: Mapping[str, str] | None = None,
    adapter: Any = None,
    seed: int = 0,
    io: IOOptions | None = None,
) -> tuple[Any, LoadReport]:
    """:func:`shardwise.load_pretrained`, sharded as the accelerator's FSDP plugin says, for ``accelerator.prepare``.

    Honoured are the wrap policy with its class names or size, reshard after forward, mixed precision (trainable
    parameters become fp32 masters, as Accelerate does), CPU offload, ignored modules and the mesh of
    ``parallelism_config`` (FSDP, HSDP). Activation checkpointing is applied
    here, before sharding, and switched off in the plugin so that ``prepare`` does not add it again; compiling it does.
    ``cpu_ram_efficient_loading`` has nothing left to do: no rank holds more than its shards. Without FSDP every rank
    loads the whole model onto the accelerator's device.

    Other arguments, memory, which ranks must call it and errors: as :func:`shardwise.load_pretrained`. Raises
    :class:`ShardError` for what can't be honoured.
    """
    return load_wrapped(
        path,
        lambda model: shard(accelerator, model),
        dtype=dtype,
        auto_class=auto_class,
        config=config,
        trust_remote_code=trust_remote_code,
        key_mapping=key_mapping,
        unused=unused,
        init=init,
        adapter=adapter,
        seed=seed,
        device=_device_of(accelerator),
        io=io,
    )


def load(
    accelerator: Accelerator,
    model: nn.Module,
    source: Any,
    *,
    names: Any = None,
    unused: Sequence[str] = (),
    init: Mapping[str, str] | None = None,
    io: IOOptions | None = None,
) -> LoadReport:
    """Shard any module in place as the accelerator's FSDP plugin says, and fill it from ``source``.

    ``model`` is best built inside ``sw.meta_init()``. It is taken by ``accelerator.prepare`` as it is.
    See :func:`load_pretrained` for what is honoured, :func:`shardwise.load` for the rest.
    """
    ranks = Ranks.current(timeout_s=(io or IOOptions()).timeout_s)
    with ranks.agree("shard as the accelerator says"):
        ignored = shard(accelerator, model)
    return _load(
        model,
        source,
        names=names,
        unused=unused,
        init=init,
        device=_device_of(accelerator),
        io=io,
        ignored=ignored,
    )


def shard(accelerator: Accelerator, model: nn.Module) -> tuple[str, ...]:
    """Apply FSDP2 to ``model`` in place as ``accelerator.prepare`` would, with nothing loaded; best on meta.

    Returns the names of the parameters that the plugin's ignored modules hold: those stay plain, and reducing
    their gradients is up to the caller, as with Accelerate. Does nothing without FSDP. Every rank must call it.
    Raises :class:`ShardError` for FSDP1, DeepSpeed, Megatron, tensor, context or sequence parallelism, 4-bit
    parameters, and for what ``fully_shard`` refuses.
    """
    _check_supported(accelerator)
    if not accelerator.is_fsdp2:
        return ()
    from accelerate.utils import fsdp2_apply_ac, fsdp2_prepare_model

    try:
        # Class names in the plugin are looked up now, as prepare() would: it can't find them in a sharded model.
        accelerator.state.fsdp_plugin.set_auto_wrap_policy(model)
    except ValueError as error:
        raise ShardError(f"the FSDP plugin does not fit {type(model).__name__}: {error}") from error
    settings = _Settings(accelerator, model)
    modules = settings.state.fsdp_plugin.ignored_modules or ()
    ignored = _names_in(model, modules)
    for module in modules:
        if not any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            module.to(accelerator.device)
    try:
        if _checkpoints_activations(accelerator.state.fsdp_plugin):
            fsdp2_apply_ac(settings, model)
        fsdp2_prepare_model(settings, model)
    except (NotImplementedError, ValueError, AssertionError) as error:
        raise ShardError(
            f"{type(model).__name__} can't be sharded as the FSDP plugin says: {str(error).splitlines()[0]} … Change the plugin, or shard "
            "the model yourself (shardwise.shard and shardwise.load): prepare() takes a sharded model as it is"
        ) from error
    _warn_of_empty_shards(model)
    return ignored


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """``accelerator.prepare(*objects)``, with the optimizers' parameters as they were. Every rank must call it.

    From here on each step notes which gradients it used, so that a save may come where gradients are still there: in the
    middle of an accumulation, or before a loop clears them. Without it the first :func:`save_state` there leaves them out,
    and says so.

    Accelerate finds an optimizer's parameters again by the address of their shards, and all empty shards have the address
    0: where a rank holds no rows of two parameters, one of them would be in its optimizer twice and the other one
    never, which :func:`save_state` refuses. In all else it is ``accelerator.prepare``.
    """
    optimizers = [found for found in objects if isinstance(found, torch.optim.Optimizer)]
    before = [[list(group["params"]) for group in o.param_groups] for o in optimizers]
    sharded = any(isinstance(p, DTensor) for groups in before for group in groups for p in group)
    prepared = accelerator.prepare(*objects)
    if sharded:
        for optimizer, groups in zip(optimizers, before, strict=True):
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
    for optimizer in optimizers:
        watch_steps(optimizer)
    return prepared


class _Settings:
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


def _checkpoints_activations(plugin: Any) -> bool:
    """Whether the user asked for it. Wrappers have to be there before sharding, and prepare() must not add them again."""
    wanted = plugin.activation_checkpointing or getattr(plugin, "_checkpoints_activations", False)
    plugin.activation_checkpointing, plugin._checkpoints_activations = False, wanted
    return bool(wanted)


def _check_supported(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type.value
    problem = ""
    if kind == "FSDP" and not accelerator.is_fsdp2:
        problem = "FSDP version 1; say fsdp_version: 2"
    elif kind not in ("FSDP", "NO", "MULTI_GPU", "MULTI_CPU"):
        problem = f"distributed_type {kind}"
    parallelism = accelerator.parallelism_config
    for name in ("tp", "cp", "sp"):
        if parallelism is not None and getattr(parallelism, f"{name}_enabled", False):
            problem = f"{name}_size > 1 in parallelism_config"
    if problem:
        raise ShardError(
            f"the accelerator is set to {problem}; expected FSDP2 (1-D or HSDP), DDP or one process. Shard the model "
            "yourself (shardwise.load fills any DTensors), or leave this out"
        )


def _names_in(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    held = {id(p) for module in modules for p in module.parameters()}
    return tuple(t.name for t in named_tensors(model) if id(t.tensor) in held)


def _warn_of_empty_shards(model: nn.Module) -> None:
    found = [
        t.name
        for t in named_tensors(model)
        if t.kind == "parameter" and t.tensor.requires_grad and _is_empty_somewhere(t.tensor)
    ]
    if len(found) > 1 and Ranks.current().rank == 0:
        _log.warning(
            "%s and %d more have too few rows for all ranks; call shardwise.integrations.accelerate.prepare(accelerator, …) "
            "instead of accelerator.prepare(…), which would mix them up in the optimizer of the ranks that hold none",
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


def _device_of(accelerator: Accelerator) -> torch.device | str:
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is not None and type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        return "cpu"
    device: torch.device = accelerator.device
    return device


# ----------------------------------------------------------------------------------------------------
# State


def save_state(
    accelerator: Accelerator, output_dir: str | os.PathLike[str] | None = None, *, step: int | None = None
) -> SaveReport:
    """``accelerator.save_state`` into a shardwise checkpoint: one directory, all of it or nothing.

    Everything that was prepared or registered: models, optimizers, schedulers, scaler, RNG, positions of the data
    loaders that have one, custom objects, and the accelerator's own counters. Without ``output_dir`` the directory
    follows from ``ProjectConfiguration(automatic_checkpoint_naming=True)``, whose ``total_limit`` applies to the
    oldest ones, after the new one is published.

    Args:
        output_dir: must not exist, or be empty.
        step: recorded in the checkpoint. Default: how many saves there were before.

    Every rank must call it. Raises as :func:`shardwise.save`; :class:`StateError` also for registered save hooks:
    they would add files to a checkpoint whose files are all listed and proved.
    """
    _refuse_hooks(accelerator, "_save_model_state_pre_hook", "register_save_state_pre_hook")
    project = accelerator.project_configuration
    folder = (
        _new_folder(accelerator) if output_dir is None else os.path.abspath(os.path.expanduser(output_dir))
    )

    def free() -> bytes:
        if os.path.isdir(folder) and not os.listdir(folder):
            os.rmdir(folder)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        return b""

    ranks = Ranks.current()
    ranks.on_first("make room for the checkpoint", free)
    number = accelerator.save_iteration if step is None else step
    with ranks.agree("collect what the accelerator holds"):
        state = train_state(accelerator)
    report = checkpoint.save(state, folder, step=number)
    project.iteration += 1
    if output_dir is None and project.total_limit is not None:
        ranks.on_first("delete oldest", lambda: _delete_oldest(os.path.dirname(folder), project.total_limit))
    return report


def load_state(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None = None) -> ResumeReport:
    """``accelerator.load_state`` from a shardwise checkpoint, or from one that ``accelerator.save_state`` wrote.

    Into what was prepared and registered, under whatever mesh this run has; proved by digests where the checkpoint
    is ours. Without ``input_dir`` the newest of ``automatic_checkpoint_naming``.

    Every rank must call it. Raises as :func:`shardwise.restore`; :class:`NoCheckpointError` if there is none.
    """
    _refuse_hooks(accelerator, "_load_model_state_pre_hook", "register_load_state_pre_hook")
    ranks = Ranks.current()
    if input_dir is None:
        found = ranks.on_first("find newest", lambda: _newest(accelerator).encode()).decode()
    else:
        found = os.path.abspath(os.path.expanduser(input_dir))
    with ranks.agree("collect what the accelerator holds"):
        state = train_state(accelerator)
    return checkpoint.restore(state, found)


def train_state(accelerator: Accelerator) -> TrainState:
    """Everything that the accelerator prepared or was told of, by reference; for a :class:`shardwise.Checkpointer`.

    Several models are called ``model_0``, ``model_1``, …, and so are optimizers and schedulers. Rank-local.
    """
    models, optimizers = accelerator._models, accelerator._optimizers
    if not models:
        raise StateError("the accelerator has no model; call accelerator.prepare(model, optimizer, …) first")
    for optimizer in optimizers:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        if len({id(p) for p in every}) < len(every):
            raise StateError(
                "an optimizer holds a parameter twice, because this rank's shards of several are empty; call "
                "shardwise.integrations.accelerate.prepare(accelerator, …) instead of accelerator.prepare(…)"
            )
    loaders = _Loaders(accelerator._dataloaders)
    return TrainState(
        model=models[0] if len(models) == 1 else _numbered("model", models),
        optimizer=_one_or_numbered("optimizer", optimizers),
        scheduler=_one_or_numbered("scheduler", accelerator._schedulers),
        dataloader=loaders if loaders.has_positions else None,
        scaler=accelerator.scaler,
        extra={"accelerate": _Counters(accelerator), **_numbered("custom", accelerator._custom_objects)},
    )


def _numbered(name: str, objects: Sequence[Any]) -> dict[str, Any]:
    return {f"{name}_{i}": found for i, found in enumerate(objects)}


def _one_or_numbered(name: str, objects: Sequence[Any]) -> Any:
    if not objects:
        return None
    return objects[0] if len(objects) == 1 else _numbered(name, objects)


class _Counters:
    """What the accelerator itself counts."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step, "save_iteration": self._accelerator.save_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]
        self._accelerator.project_configuration.iteration = state["save_iteration"] + 1


class _Loaders:
    """Positions of the prepared data loaders: whole states where they keep one, else their samplers' epochs.

    As with Accelerate, a loader that keeps no state begins its epoch again: ``accelerator.skip_first_batches``.
    """

    def __init__(self, loaders: Sequence[Any]) -> None:
        self._loaders = loaders

    @property
    def has_positions(self) -> bool:
        return any(found is not None for found in self.state_dict()["loaders"])

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": [_position(loader) for loader in self._loaders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        stored = state["loaders"]
        if len(stored) != len(self._loaders):
            raise StateError(
                f"the checkpoint holds {len(stored)} data loaders, {len(self._loaders)} are prepared; prepare the same ones"
            )
        for loader, position in zip(self._loaders, stored, strict=True):
            _set_position(loader, position)


def _position(loader: Any) -> dict[str, Any] | None:
    if getattr(loader, "use_stateful_dataloader", False):
        return {"state": loader.state_dict()}
    sampler = _seedable(loader)
    return None if sampler is None else {"epoch": sampler.epoch, "initial_seed": sampler.initial_seed}


def _set_position(loader: Any, position: Mapping[str, Any] | None) -> None:
    if position is None:
        return
    if "state" in position:
        if not getattr(loader, "use_stateful_dataloader", False):
            raise StateError(
                "the checkpoint holds a stateful data loader's position; use_stateful_dataloader is not set"
            )
        loader.load_state_dict(position["state"])
        return
    sampler = _seedable(loader)
    if sampler is not None:
        sampler.epoch, sampler.initial_seed = position["epoch"], position["initial_seed"]


def _seedable(loader: Any) -> Any:
    """The sampler that Accelerate keeps alike on all ranks (``use_seedable_sampler``), if there is one."""
    from accelerate.data_loader import SeedableRandomSampler

    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return sampler if isinstance(sampler, SeedableRandomSampler) else None


def _refuse_hooks(accelerator: Accelerator, attribute: str, register: str) -> None:
    if getattr(accelerator, attribute):
        raise StateError(
            f"hooks of {register} write and read files of their own beside Accelerate's state; a shardwise checkpoint holds "
            "listed files only. Remove the hooks, and register objects with state_dict (register_for_checkpointing)"
        )


# ----------------------------------------------------------------------------------------------------
# automatic_checkpoint_naming: <project>/checkpoints/checkpoint_<iteration>


def _folders(root: str) -> list[tuple[int, str]]:
    """Published ones, oldest first."""
    if not os.path.isdir(root):
        return []
    matches = ((re.fullmatch(r"checkpoint_(\d+)", name), name) for name in os.listdir(root))
    return sorted((int(m[1]), os.path.join(root, name)) for m, name in matches if m)


def _new_folder(accelerator: Accelerator) -> str:
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise CheckpointError(
            "no output_dir, and automatic_checkpoint_naming is off; give save_state(accelerator, output_dir)"
        )
    root = os.path.join(accelerator.project_dir, "checkpoints")
    return os.path.abspath(os.path.join(root, f"checkpoint_{accelerator.save_iteration}"))


def _newest(accelerator: Accelerator) -> str:
    root = os.path.join(accelerator.project_dir or "", "checkpoints")
    found = _folders(root) if accelerator.project_configuration.automatic_checkpoint_naming else []
    if not found:
        raise NoCheckpointError(f"{root}: no checkpoint_N in it, and no input_dir was given")
    return found[-1][1]


def _delete_oldest(root: str, limit: int) -> bytes:
    for _, folder in _folders(root)[:-limit]:
        shutil.rmtree(folder)
    return b""
