"""transformers' tensor and expert parallelism, applied to models on meta. transformers 5.22-5.23; older ones are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..gates import require
from .torch import local_tensor

__all__ = ["ep_by_plan", "own_parts", "parallel_plans", "put_parameter", "tp_by_plan"]


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
