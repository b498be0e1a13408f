"""Layouts of trainers and engines, and what ranks do in the tests of handing weights over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

import shardwise as sw
from tests.loading._peft_fns import known_warnings

_runs = itertools.count()


def mesh(*sizes: int) -> DeviceMesh:
    """A new mesh over all ranks: one axis, or ``dp`` and ``tp``."""
    run = next(_runs)
    names = (f"dp{run}", f"tp{run}")[: max(1, len(sizes))]
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=names)


def built(source: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a directory on meta."""
    with sw.meta_init():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)


def by_tensors(model: Any, over: DeviceMesh) -> Any:
    """Attention and dense feed-forward layers, cut over a mesh."""
    plan = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            plan[name] = ColwiseParallel()
        elif isinstance(module, nn.Linear) and last in ("o_proj", "down_proj"):
            plan[name] = RowwiseParallel()
    parallelize_module(model, over, plan)
    return model


# ----------------------------------------------------------------------------------------------------
# Trainers: a model with values that no file holds, the names under which it is handed over, and the dtype.


def _loaded(source: Path, over: DeviceMesh, **options: Any) -> Any:
    with known_warnings():
        return sw.load_pretrained(source, over, **options)


def _by_caller(source: Path, shard: Callable[[Any], object], dtype: torch.dtype = torch.float32) -> Any:
    model = built(source, dtype)
    shard(model)
    sw.load(model, source)
    return model


def _blocks(model: Any, over: DeviceMesh, **options: Any) -> None:
    for block in model.model.layers:
        fully_shard(block, mesh=over, **options)
    fully_shard(model, mesh=over, **options)


def _tp_then_fsdp(model: Any) -> None:
    both = mesh(2, 2)
    by_tensors(model, both[both.mesh_dim_names[1]])
    _blocks(model, both[both.mesh_dim_names[0]])


def _columns(parameter: torch.Tensor) -> Shard:
    return Shard(parameter.ndim - 1)


def _experts(model: Any) -> None:
    """Experts over all ranks, each with a part of them; the rest by FSDP."""
    over = mesh()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 3:
                parts = distribute_tensor(parameter.detach(), over, [Shard(0)])
                module.register_parameter(name, nn.Parameter(parts))


TRAINERS: dict[str, tuple[str, str, torch.dtype | None, Callable[[Path], Any]]] = {
    "fsdp": ("qwen3", "hub", None, lambda s: _loaded(s, mesh())),
    "hsdp": ("qwen3", "hub", None, lambda s: _loaded(s, mesh(2, 2))),
    "cast": ("qwen3-moe", "hub", torch.bfloat16, lambda s: _loaded(s, mesh())),
    "stacked experts": ("mixtral", "hub", None, lambda s: _loaded(s, mesh())),
    "expert parallel": ("qwen3-moe", "hub", torch.bfloat16, lambda s: _by_caller(s, _experts)),
    "tied": ("qwen3-tied", "hub", torch.bfloat16, lambda s: _loaded(s, mesh())),
    "tensor parallel": ("qwen3", "hub", None, lambda s: _by_caller(s, lambda m: by_tensors(m, mesh()))),
    "fsdp x tp": ("qwen3", "hub", torch.bfloat16, lambda s: _by_caller(s, _tp_then_fsdp)),
    "plain": ("qwen3", "hub", None, lambda s: _by_caller(s, lambda m: None)),
    "columns": (
        "qwen3-moe",
        "hub",
        None,
        lambda s: _by_caller(s, lambda m: _blocks(m, mesh(), shard_placement_fn=_columns)),
    ),
    "module names": ("qwen3-moe", "module", None, lambda s: _loaded(s, mesh())),
    "adapters": (
        "qwen3",
        "adapter",
        None,
        lambda s: _loaded(s, mesh(), adapter=LoraConfig(r=4, target_modules=["q_proj", "v_proj"])),
    ),
}


def change(model: nn.Module, step: int, every: int = 1) -> None:
    """Other values, the same on every rank for the same element of an unsharded tensor; of each ``every``-th element."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.view(-1)[::every].mul_(1 + 2.0**-step) if local.is_contiguous() else local.mul_(
                1 + 2.0**-step
            )


# ----------------------------------------------------------------------------------------------------
# Engines: what a receiver fills, and its tensors whole.

Engine = tuple[Any, Callable[[], dict[str, torch.Tensor]]]


def _mapping(tensors: dict[str, torch.Tensor]) -> Engine:
    return tensors, lambda: {
        n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in tensors.items()
    }


def _whole(expected: dict[str, torch.Tensor]) -> Engine:
    return _mapping({n: torch.zeros_like(t) for n, t in expected.items()})


def _other_dtype(expected: dict[str, torch.Tensor]) -> Engine:
    return _mapping({n: torch.zeros_like(t, dtype=torch.float64) for n, t in expected.items()})


def _cut(dim: int) -> Callable[[dict[str, torch.Tensor]], Engine]:
    def engine(expected: dict[str, torch.Tensor]) -> Engine:
        over = mesh()
        return _mapping(
            {
                n: distribute_tensor(
                    torch.zeros_like(t), over, [Shard(dim % t.ndim) if t.ndim > dim else Replicate()]
                )
                for n, t in expected.items()
            }
        )

    return engine


def _both(expected: dict[str, torch.Tensor]) -> Engine:
    over = mesh(2, 2)
    return _mapping(
        {
            n: distribute_tensor(
                torch.zeros_like(t), over, [Shard(0), Shard(1)] if t.ndim > 1 else [Replicate(), Replicate()]
            )
            for n, t in expected.items()
        }
    )


def _fused(expected: dict[str, torch.Tensor]) -> Engine:
    """One tensor for all that has as many columns, as engines fuse Q, K and V; its parts are views."""
    found: dict[str, torch.Tensor] = {}
    for columns in {t.shape[1:] for t in expected.values()}:
        names = [n for n, t in expected.items() if t.shape[1:] == columns and t.ndim]
        dtype = {expected[n].dtype for n in names}
        assert len(dtype) == 1
        fused = torch.zeros(sum(expected[n].shape[0] for n in names), *columns, dtype=dtype.pop())
        parts = fused.split([expected[n].shape[0] for n in names])
        found |= dict(zip(names, parts, strict=True))
    return _mapping({n: found[n] for n in expected})


def _transposed(expected: dict[str, torch.Tensor]) -> Engine:
    """Weights that an engine keeps column by column."""
    return _mapping(
        {
            n: torch.zeros_like(t.t().contiguous()).t() if t.ndim == 2 else torch.zeros_like(t)
            for n, t in expected.items()
        }
    )


ENGINES: dict[str, Callable[[dict[str, torch.Tensor]], Engine]] = {
    "whole": _whole,
    "rows": _cut(0),
    "columns": _cut(1),
    "rows and columns": _both,
    "fused": _fused,
    "transposed": _transposed,
    "another dtype": _other_dtype,
}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, after a cast to the engine's dtype."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        own = found[name]
        assert torch.equal(own, tensor.to(own.dtype)), name
