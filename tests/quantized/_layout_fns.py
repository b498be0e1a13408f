"""On ranks: a quantized directory and its dequantized twin, filled into the same shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw

__all__ = ["different"]

_COLUMNS, _ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def _mesh(*sizes: int) -> DeviceMesh:
    names = ("outer", "inner")[: len(sizes)]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _fsdp(model: nn.Module, **options: Any) -> None:
    for block in (*model.get_submodule("model.layers"), model):
        fully_shard(block, **options)  # type: ignore[call-overload]


def _last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


def _rows(model: nn.Module) -> None:
    _fsdp(model, mesh=_mesh(dist.get_world_size()))


def _columns(model: nn.Module) -> None:
    _fsdp(model, mesh=_mesh(dist.get_world_size()), shard_placement_fn=_last_dim)


def _uneven_columns(model: nn.Module) -> None:
    """Matrices by columns that the ranks do not divide, which FSDP2 refuses: plain DTensors."""
    mesh, spread = _mesh(dist.get_world_size()), {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in spread:  # tied ones stay tied
                cut = distribute_tensor(parameter.data, mesh, [_last_dim(parameter)])
                spread[parameter] = nn.Parameter(cut)
            setattr(module, name, spread[parameter])


def _hsdp(model: nn.Module) -> None:
    _fsdp(model, mesh=_mesh(2, dist.get_world_size() // 2))


def _fsdp_tp(model: nn.Module) -> None:
    mesh = _mesh(dist.get_world_size() // 2, 2)
    for layer in model.get_submodule("model.layers").children():
        styles: dict[str, Any] = {}
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and name.endswith(_COLUMNS):
                styles[name] = ColwiseParallel()
            elif isinstance(module, nn.Linear) and name.endswith(_ROWS):
                styles[name] = RowwiseParallel()
        parallelize_module(layer, mesh["inner"], styles)
    _fsdp(model, mesh=mesh["outer"])


def _experts(model: nn.Module) -> None:
    """Experts over all ranks, by dim 0; the rest in FSDP2's shards."""
    mesh = _mesh(dist.get_world_size())
    ignored = set()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 3:
                spread = nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)]))
                setattr(module, name, spread)
                ignored.add(spread)
    _fsdp(model, mesh=mesh, ignored_params=ignored)


def _whole(model: nn.Module) -> None:
    """Every rank holds all of it."""


#: By number of ranks: the layouts, and the strategies that read them.
_LAYOUTS: dict[int, Sequence[tuple[Callable[[nn.Module], None], str]]] = {
    1: [(_whole, "own"), (_rows, "own")],
    2: [(_rows, "own"), (_columns, "own"), (_columns, "node"), (_rows, "once"), (_experts, "own")],
    3: [(_rows, "node"), (_uneven_columns, "own"), (_uneven_columns, "once"), (_experts, "own")],
    4: [(_hsdp, "own"), (_fsdp_tp, "own"), (_fsdp_tp, "node")],
    5: [(_rows, "own"), (_uneven_columns, "own"), (_rows, "node")],
}


def different(pairs: Sequence[tuple[str, str]], dtypes: Sequence[str]) -> tuple[int, list[str]]:
    """Load each quantized directory and its twin in all layouts of this number of ranks; the cases, and those that differ."""
    wrong, cases = [], 0
    for quantized, plain in pairs:
        for lay_out, strategy in _LAYOUTS[dist.get_world_size()]:
            for dtype in dtypes:
                io = sw.IOOptions(strategy=strategy, staging_bytes=1024**2)  # type: ignore[arg-type]
                found, expected = (
                    _loaded(quantized, lay_out, io, dtype),
                    _loaded(plain, lay_out, sw.IOOptions(), dtype),
                )
                label = f"{quantized} {lay_out.__name__} {strategy} {dtype}"
                cases += 1
                wrong += [f"{label}: {name}" for name in _unlike(found, expected)]
    return cases, wrong


def _loaded(directory: str, lay_out: Callable[[nn.Module], None], io: sw.IOOptions, dtype: str) -> nn.Module:
    model: nn.Module = build_meta_of(directory, dtype)
    lay_out(model)
    sw.load(model, directory, io=io)
    return model


def build_meta_of(directory: str, dtype: str) -> Any:
    import json
    from pathlib import Path

    import transformers

    config = json.loads((Path(directory) / "config.json").read_text())
    config.pop("quantization_config", None)
    cls = getattr(transformers, config["architectures"][0])
    with sw.meta_init():
        return cls._from_config(cls.config_class(**config), dtype=getattr(torch, dtype))


def _unlike(found: nn.Module, expected: nn.Module) -> Iterator[str]:
    mine, theirs = dict(found.named_parameters()), dict(expected.named_parameters())
    if mine.keys() != theirs.keys():
        yield f"names differ: {mine.keys() ^ theirs.keys()}"
        return
    for name, parameter in mine.items():
        a, b = (p.to_local() if isinstance(p, DTensor) else p for p in (parameter, theirs[name]))
        if a.shape != b.shape or not torch.equal(a, b):
            yield name
