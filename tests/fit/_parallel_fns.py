"""On ranks: a model cut by transformers' own functions, filled, and a step of it, with what it really sends and takes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.internals.torch import local_tensor, storage_key
from tests.loading._load_fns import whole
from tests.quantized._layout_fns import build_meta_of

__all__ = ["measured"]


def cut(model: Any, tp: int, ep: int, *, shards: bool) -> None:
    """As ``maybe_distribute_model`` of transformers: tensor parallelism, experts, then FSDP2 over two meshes."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    world = dist.get_world_size()
    dense = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("fsdp", "tp"))
    experts = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    ep_plan = model._expand_parallel_plan(model.ep_plan) if ep > 1 else {}
    tp_plan = model._expand_parallel_plan(model.tp_plan) if tp > 1 else {}
    tp_plan = {name: style for name, style in tp_plan.items() if ep == 1 or ".experts" not in name}
    apply_tensor_parallelism(model, dense["tp"], tp_plan)
    apply_expert_parallelism(model, experts["ep"], dense["tp"], ep_plan)
    if not shards:
        return
    for name, style in ep_plan.items():
        if style == "ep_dispatch_experts":
            fully_shard(model.get_submodule(name), mesh=experts["efsdp"])
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=dense["fsdp"])


class Watched(TorchDispatchMode):
    """Bytes of live storages and of collectives' tensors, below DTensors."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sent: dict[str, int] = {}
        self.sizes = {storage_key(t): 0 for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if ("all_reduce" in name or "allreduce" in name) and "wait" not in name:
            self._add("all-reduce", args[0])
        elif "all_gather_into_tensor" in name:
            self._add("all-gather", result)
        elif "all_to_all_single" in name or "alltoall_base" in name:
            self._add("all-to-all", args[0])
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in self.sizes:
                self._see(leaf)
        return result

    def _add(self, kind: str, tensors: Any) -> None:
        nbytes = sum(
            t.nbytes for t in tree_leaves(tensors) if isinstance(t, torch.Tensor) and t.is_floating_point()
        )
        self.sent[kind] = self.sent.get(kind, 0) + nbytes

    def _see(self, tensor: torch.Tensor) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        self.sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: Any) -> None:
        self.live -= self.sizes.pop(key, 0)


def measured(
    directory: str, layouts: list[tuple[int, int]], batch: int, length: int, *, shards: bool
) -> list[dict[str, Any]]:
    """For each (tp, ep): bytes that this rank holds and read, bytes of collectives, and the peak of a step."""
    plain = sw.load_pretrained(directory)
    expected, found = dict(plain.named_parameters()), []
    for tp, ep in layouts:
        model = build_meta_of(directory, "bfloat16")
        cut(model, tp, ep, shards=shards)
        report = sw.load(model, directory)
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter.detach()), expected[name]), (tp, ep, name)
        held = sum(local_tensor(p).nbytes for p in model.parameters())
        if shards:
            found.append({"held": held, "read": report.bytes_read})
            continue
        torch.manual_seed(dist.get_rank() // tp)
        ids = torch.randint(0, 97, (batch, length))
        model.train()
        with Watched([local_tensor(p) for p in (*model.parameters(), *model.buffers())]) as watched:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients = sum(local_tensor(p.grad).nbytes for p in model.parameters())
        found.append(
            {
                "held": held,
                "read": report.bytes_read,
                "sent": watched.sent,
                "peak": watched.peak,
                "gradients": gradients,
            }
        )
    return found
