"""What shardwise uses of Accelerate, the HF Trainer, TRL and transformers' parallel plans that is private. accelerate 1.11-1.15."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Literal

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.tensor import DTensor

from ..gates import require
from ..objects import frozen
from .torch import local_tensor

# ----------------------------------------------------------------------------------------------------
# What shardwise uses of an ``Accelerator`` that Accelerate keeps private. accelerate 1.11-1.15.
#
# Importing this does not import Accelerate.


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


def run_state_hooks(accelerator: Any, when: Literal["save", "load"], directory: str) -> None:
    """Call the hooks of ``register_save_state_pre_hook`` or ``register_load_state_pre_hook`` with what Accelerate would give them.

    accelerate 1.10-1.15: ``save_state`` gives the models and their state dicts, ``load_state`` the models; both without those that FSDP2 has
    sharded, except the models of a save. Without it, what such a hook writes would be left out of a checkpoint, silently.
    """
    models = [*accelerator._models]
    is_sharded = accelerator.is_fsdp2
    if when == "save":
        weights = [] if is_sharded else [model.state_dict() for model in models]
        for hook in [*accelerator._save_model_state_pre_hook.values()]:
            hook(models, weights, directory)
        return
    for hook in [*accelerator._load_model_state_pre_hook.values()]:
        hook([] if is_sharded else models, directory)


def has_state_hooks(accelerator: Any) -> bool:
    """Whether ``register_save_state_pre_hook`` or ``register_load_state_pre_hook`` was called.

    accelerate 1.10-1.15: two dicts of the accelerator. Without it, every save would make a directory for hooks.
    """
    return bool(accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook)


# ----------------------------------------------------------------------------------------------------
# transformers' tensor and expert parallelism, applied to models on meta. transformers 5.22-5.23; older ones are refused by name.


def tp_by_plan(model: Any, mesh: Any, plan: Mapping[str, str] | None = None) -> None:
    """Tensor parallelism as ``from_pretrained(distributed_config=DistributedConfig(tp_size=…))`` applies it, on meta.

    ``plan``: from :func:`parallel_plans`; None: the model's. transformers 5.22-5.23:
    ``distributed.tensor_parallel.apply_tensor_parallelism``, which does not find tied
    parameters under their second names; here they are cut too, and tied again afterwards. Without it, the user of
    Accelerate's ``tp_size`` would have to call ``parallelize_module`` before the load.
    """
    require("plans")
    from transformers import DistributedConfig
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    for name, style_name in (plan or model._expand_parallel_plan(model.tp_plan)).items():
        style = ALL_PARALLEL_STYLES[style_name]
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if last not in module._parameters:
            module = model.get_submodule(name)
            if style_name == "mla_kv_a_proj":
                module.config = model.config.get_text_config()
            style.install_forward(module, mesh)
        elif module._parameters[last] is not None:
            style.validate_param(module, last, mesh, parameter_name=name)
            style.shard_param(module, last, mesh)
        module._is_hooked = True
    model.tie_weights()
    model.config.distributed_config = DistributedConfig(tp_size=mesh.size())
    model._tp_size = mesh.size()


def ep_by_plan(model: Any, ep_mesh: Any, tp_mesh: Any, plan: Mapping[str, str]) -> None:
    """Expert parallelism as ``from_pretrained(distributed_config=DistributedConfig(ep_size=…))`` applies it, on meta.

    ``plan``: from :func:`parallel_plans`. transformers 5.22-5.23: ``distributed.expert_parallel.apply_expert_parallelism``.
    Without it, plans of runs with expert parallelism would guess how transformers cuts experts. Raises :class:`ValueError`
    where it can't.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    apply_expert_parallelism(model, ep_mesh, tp_mesh, dict(plan))


def parallel_plans(model: Any, *, tp: bool, ep: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The model's plans for tensor and for expert parallelism: a style for each module and parameter, by name.

    A module with a rule of the second has none of the first. Empty where it is not asked for, or the model has none.
    transformers 5.22-5.23: ``_resolve_parallel_plans``, which also wants a plan for FSDP, and ``_expand_parallel_plan``.
    Without it, see :func:`tp_by_plan`.
    """
    require("plans")
    by_rule = dict(getattr(model, "ep_plan", None) or {}) if ep else {}
    rules = dict(getattr(model, "tp_plan", None) or {}) if tp else {}
    rules = {
        name: style
        for name, style in rules.items()
        if not any(name == taken or name.startswith(f"{taken}.") for taken in by_rule)
    }
    return model._expand_parallel_plan(rules), model._expand_parallel_plan(by_rule)


def own_parts(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters that are DTensors: where each lies, and this rank's part of it, plain.

    torch's ``_parameters``; tied ones come once for each place, and their part is one object. Without it, a plan could not run a
    model of one rank's parts alone.
    """
    parts: dict[int, nn.Parameter] = {}
    found: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                part = parts.setdefault(id(parameter), _part(parameter))
                found.append((module, name, part))
    return found


def _part(parameter: nn.Parameter) -> nn.Parameter:
    local: torch.Tensor = local_tensor(parameter)
    return nn.Parameter(local.contiguous(), requires_grad=parameter.requires_grad)


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Register a parameter under a name that has one, and return that one.

    torch's ``_parameters``, as ``register_parameter`` sets it. Without it, hooks of registrations would see a parameter come and go.
    """
    before = module._parameters[name]
    assert before is not None
    module._parameters[name] = parameter
    return before


# ----------------------------------------------------------------------------------------------------
# What shardwise uses of the HF Trainer and its arguments that is private, or moves between releases. transformers 5.3-5.23.


def fsdp_settings(args: Any) -> dict[str, Any] | None:
    """The settings of the FSDP plugin that a Trainer with these arguments will have; None without FSDP.

    transformers before 5.10: Trainer sets two of them only after it has made the plugin. Without this function, a model that is
    sharded before would lack activation checkpointing.
    """
    if args.fsdp_plugin_args is None:
        return None
    late = ("limit_all_gathers", "activation_checkpointing")
    return {
        **{name: args.fsdp_config[name] for name in late if name in args.fsdp_config},
        **args.fsdp_plugin_args,
    }


def leaves_out_fsdp_version(args: Any) -> bool:
    """Whether arguments ask for FSDP and leave its version to transformers (before 5.10: FSDP1).

    Without it, the error would name FSDP1 to people who never asked for it.
    """
    return bool(args.fsdp) and "version" not in (args.fsdp_config or {})


def end_epoch(trainer: Any, epoch: int, given: Mapping[str, Any]) -> None:
    """What a Trainer does when an epoch has no more steps: callbacks, then a log, an evaluation and a save, as they say.

    ``given``: the arguments of its ``_run_epoch``. transformers 5.3-5.23: the last lines of ``Trainer._run_epoch``. Without it,
    a resume from a checkpoint that was saved after an epoch's last step would lose the evaluation at the epoch's end,
    and the numbers that its loader draws.
    """
    trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
    names = ("model", "trial", "ignore_keys_for_eval", "start_time")
    trainer._maybe_log_save_evaluate(
        trainer._tr_loss, None, epoch=epoch, **{name: given[name] for name in names}
    )


# ----------------------------------------------------------------------------------------------------
# What shardwise reads and writes of TRL's trainers that TRL keeps private. trl 0.29-1.16.
#
# Importing this does not import TRL. Without it, a checkpoint between the steps of one round of generation would resume
# with other completions than the round had.

_BUFFER = "_buffered_inputs"
_COUNTERS = ("_step", "_total_train_tokens")


@contextmanager
def copied_by(model: Any, copy: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``copy.deepcopy`` of this model use ``copy``, for the block.

    trl before 1.2: KTO's trainer copies the policy to have a reference, where later releases load it. Without this function, that
    fails, because FSDP2 models can't be copied.
    """
    model.__deepcopy__ = lambda memo: copy(model)
    try:
        yield
    finally:
        del model.__deepcopy__


def keeps_completions(trainer: Any) -> bool:
    """Whether a trainer keeps generated completions for later steps.

    Without it, the report of a resume would be silent about completions that no checkpoint holds.
    """
    return hasattr(trainer, _BUFFER)


def counts_as_grpo(trainer: Any) -> bool:
    """Whether it keeps completions, and counts rounds, as GRPO's and RLOO's trainers do. Others count in other ways.

    Without it, a save would ask other trainers for attributes that they don't have.
    """
    has_all = all(hasattr(trainer, name) for name in (_BUFFER, "num_iterations", *_COUNTERS))
    return has_all and hasattr(trainer.args, "steps_per_generation")


class Counters:
    """A trainer's place in a round of generation, in steps of accumulation, and its count of tokens; by the names of its attributes.

    Without it, a resumed trainer would begin a round of generation anew, and count tokens from zero.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._trainer, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self._trainer, name, value)


class Completions:
    """What a trainer generated and scored, and has not used up; empty if the next step generates.

    Without it, a resumed trainer would generate again, and go on with other completions.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        every = self._trainer.args.steps_per_generation * self._trainer.num_iterations
        return {"inputs": getattr(self._trainer, _BUFFER) if self._trainer._step % every else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from accelerate.utils import send_to_device

        setattr(self._trainer, _BUFFER, send_to_device(state["inputs"], self._trainer.args.device))
