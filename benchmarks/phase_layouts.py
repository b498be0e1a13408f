"""How the models of ``benchmarks/phases.py`` lie on their ranks: FSDP2 and HSDP by ``load_pretrained``; tensor and expert parallelism by
transformers' own functions, before FSDP2 and ``sw.load``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

import shardwise as sw
from benchmarks.phase_cases import Case
from shardwise.fit.network import Spread, Step, step_of
from shardwise.fit.plan import _fake_ranks
from shardwise.fit.records import Variant
from shardwise.sharding.fsdp import shard_with_experts

__all__ = ["Layout", "planned_step"]


@dataclass
class Layout:
    """The meshes of a case. Each rank of it must make one."""

    case: Case
    mesh: DeviceMesh = field(init=False)
    """What FSDP2 gets, with the axis of tensor parallelism."""
    experts: DeviceMesh | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        case = self.case
        shape: tuple[int, ...] = (case.ranks,)
        names: tuple[str, ...] = ("shard",)
        if case.replicas > 1:
            shape, names = (case.replicas, case.ranks // case.replicas), ("replicate", "shard")
        if case.is_parallel:
            shape, names = (case.ranks // case.tp, case.tp), ("shard", "tp")
            self.experts = init_device_mesh(
                "cpu", (case.ranks // case.ep, case.ep), mesh_dim_names=("shard", "ep")
            )
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        # Ranks of tensor parallelism see the same tokens, all others see their own.
        torch.manual_seed(dist.get_rank() // case.tp)

    def loaded(self, path: str, case: Case) -> Any:
        """The model of ``case``, sharded and filled."""
        if not case.is_parallel:
            model = sw.load_pretrained(
                path, self.mesh, policy=case.sharding(), dtype=case.dtype, adapter=case.adapter()
            )
            return model
        model = self.cut(self.built(path, case.dtype))
        self._shard(model, case)
        sw.load(model, path)
        return model

    def built(self, path: str, dtype: str) -> Any:
        """The model on meta."""
        config = transformers.AutoConfig.from_pretrained(path)
        with sw.meta_init():
            return getattr(transformers, config.architectures[0])._from_config(
                config, dtype=getattr(torch, dtype)
            )

    def cut(self, model: Any) -> Any:
        """Tensor and expert parallelism, as ``maybe_distribute_model`` of transformers."""
        tp_plan = model._expand_parallel_plan(model.tp_plan) if self.case.tp > 1 else {}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name in tied - {name for name, _ in model.named_parameters()}:
            tp_plan.pop(
                name, None
            )  # a second name, which transformers does not find, and ties again afterwards
        apply_tensor_parallelism(model, self.mesh["tp"], tp_plan)
        model.tie_weights()
        if self.case.ep > 1:
            assert self.experts is not None
            ep_plan = model._expand_parallel_plan(model.ep_plan)
            apply_expert_parallelism(model, self.experts["ep"], self.mesh["tp"], ep_plan)
        return model

    def _shard(self, model: Any, case: Case) -> None:
        """FSDP2, as ``apply_fully_sharded_data_parallelism`` of transformers, but in the groups of ``sw.shard``."""
        shards = self.mesh["shard"].size()
        if shards == 1:
            return
        if self.experts is None or case.ep == 1:
            sw.shard(model, self.mesh["shard"], case.sharding())
            return
        shard_with_experts(model, self.mesh["shard"], self.experts["shard"], case.sharding())
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.set_gradient_divide_factor(float(shards))
                if self.experts["shard"].size() > 1:
                    module.set_force_sum_reduction_for_comms(True)


def planned_step(model: Any, case: Case) -> Step:
    """The step that a plan of ``case`` has for ``model``, which is on meta."""
    variant = Variant(
        case.ranks, case.replicas, case.ranks, case.sharding(), case.training(), None, case.tp, case.ep
    )
    with _fake_ranks(case.ranks), ExitStack() as stack:
        spread = Spread.cut(model, variant)
        whole = spread.whole_gradients()
        stack.enter_context(spread.as_one_rank())
        return step_of(
            model,
            variant.policy,
            variant.shards,
            variant.training,
            variant.expert_shards,
            replicas=case.replicas,
            is_wrapped=variant.is_wrapped,
            whole_gradients=whole,
        )
