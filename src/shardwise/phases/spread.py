"""Cuts a model on meta as a run's ranks would hold it: tensor and expert parallelism by the model's own plans, then FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import ShardError
from ..internals.fsdp import lazy_chunks
from ..internals.parallel import ep_by_plan, own_parts, parallel_plans, put_parameter, tp_by_plan
from ..internals.transformers import is_transformers_model
from ..sharding.fsdp import shard, shard_with_experts
from .exchange import Exchange
from .variant import Variant

__all__ = ["Spread"]


@dataclass(slots=True)
class Spread:
    """The model of a run on meta, while it is cut: first by :meth:`cut`, then by :meth:`shard`. Needs the run's process group."""

    model: nn.Module
    variant: Variant
    tp_plan: dict[str, str]
    ep_plan: dict[str, str]
    forwards: dict[str, Callable[..., Any]]
    """The forward of each module that a plan changes, as it was before."""

    @classmethod
    def cut(cls, model: nn.Module, variant: Variant) -> Spread:
        """Apply tensor and expert parallelism, if the run has any. Raises :class:`ShardError` where that is impossible."""
        if not variant.is_parallel:
            return cls(model, variant, {}, {}, {})
        _check_model(model, variant)
        tp_plan, ep_plan = parallel_plans(model, tp=variant.tp > 1, ep=variant.ep > 1)
        _check_plans(model, variant, tp_plan, ep_plan)
        modules = dict(model.named_modules())
        changed = [name for name in (*tp_plan, *ep_plan) if name in modules]
        found = cls(model, variant, tp_plan, ep_plan, {name: modules[name].forward for name in changed})
        dense, experts = _meshes(variant)
        try:
            if tp_plan:
                tp_by_plan(model, dense["tp"], tp_plan)
            if ep_plan:
                ep_by_plan(model, experts["ep"], dense["tp"], ep_plan)
        except (ValueError, RuntimeError) as error:
            raise ShardError(f"{type(model).__name__} can't be cut by its own plan: {error}") from error
        return found

    @contextmanager
    def as_one_rank(self) -> Iterator[Exchange]:
        """The model as rank 0 computes with it: plain parts of parameters; collectives take memory, and are counted."""
        exchange = Exchange(self.model, tp=self.variant.tp, ep=self.variant.ep)
        if not self.variant.is_parallel:
            yield exchange
            return
        before = [
            (module, name, put_parameter(module, name, part)) for module, name, part in own_parts(self.model)
        ]
        installed = {}
        for path, forward in self.forwards.items():
            module = self.model.get_submodule(path)
            installed[path] = module.forward
            style = self.ep_plan.get(path) or self.tp_plan[path]
            module.forward = exchange.stand_in(path, style, forward)
        try:
            with exchange.counting():
                yield exchange
        finally:
            for path, forward in installed.items():
                self.model.get_submodule(path).forward = forward
            for module, name, parameter in before:
                put_parameter(module, name, parameter)

    def whole_gradients(self) -> dict[str, int]:
        """How many times as large as a rank's part of a parameter its gradient is, by name, where it is larger.

        torch (2.12-2.13) gives the gradient of an embedding whose rows are cut whole on each rank, where its output was summed
        (``embedding_dense_backward_strategy``); FSDP2 cuts it afterwards. Of a tied one autograd adds a cut gradient, which cuts
        the sum.
        """
        names = [name for name, _ in self.model.named_parameters()]
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}.difference(names)
        parameters = {id(self.model.get_parameter(name)) for name in tied}
        rows = [f"{path}.weight" for path, style in self.tp_plan.items() if style == "embedding_rowwise"]
        return {
            name: self.variant.tp
            for name in rows
            if name in names and id(self.model.get_parameter(name)) not in parameters
        }

    def shard(self) -> None:
        """Apply FSDP2 over the ranks that are left, if any are."""
        if not self.variant.is_wrapped:
            return
        with lazy_chunks():
            self._shard(self.variant)

    def _shard(self, variant: Variant) -> None:
        if not variant.is_parallel:
            shard(self.model, _plain_mesh(variant), variant.policy)
            return
        dense, experts = _meshes(variant)
        axes = ("shard",) if variant.replicas == 1 else ("replicate", "shard")
        over = dense[axes], experts[axes] if variant.ep > 1 else dense[axes]
        shard_with_experts(self.model, *over, variant.policy)


def _plain_mesh(variant: Variant) -> DeviceMesh:
    # Boxes depend only on the sizes of the axes: a CPU mesh gives the same ones as GPUs.
    if variant.replicas == 1:
        return init_device_mesh("cpu", (variant.ranks,), mesh_dim_names=("shard",))
    shape = (variant.replicas, variant.ranks // variant.replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _meshes(variant: Variant) -> tuple[DeviceMesh, DeviceMesh]:
    """The ranks as dense parameters see them, and as experts do."""
    dense = (variant.replicas, variant.shards, variant.tp)
    experts = (variant.replicas, variant.expert_shards, variant.ep)
    return (
        init_device_mesh("cpu", dense, mesh_dim_names=("replicate", "shard", "tp")),
        init_device_mesh("cpu", experts, mesh_dim_names=("replicate", "shard", "ep")),
    )


# ----------------------------------------------------------------------------------------------------
# Checks


def _check_model(model: nn.Module, variant: Variant) -> None:
    if variant.adapter is not None:
        raise ShardError("tp and ep are planned for models without adapter=; leave one of them out")
    if not is_transformers_model(model):
        raise ShardError(
            f"tp and ep need a transformers model, whose class says how it is cut; got {type(model).__name__}"
        )


def _check_plans(model: Any, variant: Variant, tp_plan: dict[str, str], ep_plan: dict[str, str]) -> None:
    for name, size, plan in (("tp", variant.tp, tp_plan), ("ep", variant.ep, ep_plan)):
        if size > 1 and not plan:
            raise ShardError(
                f"{type(model).__name__} has no plan for {name}={size} ({name}_plan of transformers); set {name} to 1"
            )
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    cuts_heads = any(name.endswith(".k_proj") and style == "colwise" for name, style in tp_plan.items())
    if cuts_heads and isinstance(heads, int) and heads % variant.tp:
        raise ShardError(
            f"tp={variant.tp} does not divide the {heads} key-value heads of {type(model).__name__}, and its forward needs "
            "whole heads; choose a divisor"
        )
