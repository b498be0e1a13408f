"""A case: a stored model, and how the ranks shard it. Peers get one and fill what it says."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.loading.models import model_on_meta, stored_parts

__all__ = [
    "LAYOUTS",
    "Case",
    "Range",
    "built_before",
    "local_ranges",
    "sharded_model",
    "unsharded_before_ranks",
]

#: By name: what the ranks hold.
LAYOUTS = {
    "dim 0": "FSDP2 as it is: rows",
    "dim 1": "FSDP2 with `shard_placement_fn`: columns of matrices",
    "FSDP × TP": "tensor parallelism over 2 ranks, FSDP2 over the others",
    "HSDP": "2 replicas, FSDP2 in each",
}


@dataclass(frozen=True)
class Case:
    """A model in ``directory``, sharded over ``ranks``."""

    model: str
    directory: str
    layout: str
    ranks: int
    device: str = "cpu"
    """Type of the device that each rank has."""
    shared: bool = False
    """Whether all ranks have the same device."""

    @property
    def files(self) -> list[Path]:
        return sorted(Path(self.directory).glob("*.safetensors"))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(span.nbytes for span in _stored(self).values())


#: By directory: the model on meta, unsharded, for the first rank function of a process that asks for it.
_built: dict[str, nn.Module] = {}


def unsharded_before_ranks(case: Case) -> None:
    """Build the model on meta here, in the parent of the ranks, so that each of them need not: they are forks."""
    if case.directory not in _built:
        _built.clear()
        _built[case.directory] = model_on_meta(case.directory)
        gc.collect()
        gc.freeze()  # else a collection in a rank would copy the pages of all these objects


def built_before(case: Case, model: nn.Module) -> None:
    """Take this model on meta, unsharded, for the next rank function of this process that asks for the case's."""
    _built[case.directory] = model


def _model_on_meta(case: Case) -> Any:
    return _built.pop(case.directory, None) or model_on_meta(case.directory)


def sharded_model(case: Case) -> Any:
    """The model on meta, sharded by torch's own functions. Every rank must call it."""
    model = _model_on_meta(case)
    options: dict[str, Any] = {}
    if case.layout == "FSDP × TP":
        mesh = init_device_mesh(case.device, (case.ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], _tensor_parallel(layer))
        options["mesh"] = mesh["dp"]
    elif case.layout == "HSDP":
        options["mesh"] = init_device_mesh(
            case.device, (2, case.ranks // 2), mesh_dim_names=("replica", "shard")
        )
    else:
        options["mesh"] = init_device_mesh(case.device, (case.ranks,))
    if case.layout == "dim 1":
        options["shard_placement_fn"] = _last_dim
    for block in (*model.get_submodule("model.layers"), model):
        fully_shard(block, **options)
    return model


def _last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


def _tensor_parallel(layer: nn.Module) -> dict[str, Any]:
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    styles: dict[str, Any] = {}
    for name, _ in layer.named_modules():
        if name.endswith(columns):
            styles[name] = ColwiseParallel()
        elif name.endswith(("o_proj", "down_proj")):
            styles[name] = RowwiseParallel()
    return styles


class Range(NamedTuple):
    """Bytes of a file."""

    path: str
    offset: int
    nbytes: int


def local_ranges(case: Case) -> dict[str, list[Range]]:
    """Where this rank's bytes of each parameter lie, in the order of the local tensor. For the layout ``dim 0``."""
    stored, rank = _stored(case), dist.get_rank()
    found: dict[str, list[Range]] = {}
    for name, parameter in _model_on_meta(case).named_parameters():
        parts = stored_parts(name, tuple(parameter.shape))
        rows = parameter.shape[0]
        each = -(-rows // case.ranks)
        start, stop = min(rank * each, rows), min((rank + 1) * each, rows)
        if parts[0].row is None:
            whole = stored[name]
            row = whole.nbytes // rows
            spans = [Range(whole.path, whole.offset + start * row, (stop - start) * row)]
        else:
            spans = [stored[part.stored] for part in parts if start <= (part.row or 0) < stop]
        found[name] = _joined(spans)
        nbytes = parameter.nbytes // rows * (stop - start)
        assert sum(span.nbytes for span in spans) == nbytes, f"{name}: not this rank's rows"
    return found


def _joined(spans: list[Range]) -> list[Range]:
    """The same bytes in the same order, with neighbors in a file as one range."""
    joined: list[Range] = []
    for span in spans:
        if joined and joined[-1].path == span.path and joined[-1].offset + joined[-1].nbytes == span.offset:
            joined[-1] = Range(span.path, joined[-1].offset, joined[-1].nbytes + span.nbytes)
        else:
            joined.append(span)
    return joined


def _stored(case: Case) -> dict[str, Range]:
    """Where each stored tensor lies, from the headers of the files."""
    found = {}
    for path in case.files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            found[name] = Range(str(path), 8 + length + start, stop - start)
    return found
