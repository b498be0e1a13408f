"""Gives a meta model memory, in place, before a load reads into it.

Kept small and guarded, because it depends on how torch swaps parameters:

* DTensors (FSDP2): one ``model._apply`` that allocates only meta tensors. FSDP's own ``_apply`` then
  re-pads its shards and keeps its references; identity, ties and real buffers survive.
* Plain parameters: ``torch.utils.swap_tensors``, once per object, keeps identity and ties.
* Buffers are replaced in every module that registers them.

``to_empty`` would ruin real buffers and untie; ``load_state_dict(assign=True)`` would lose identity;
setting ``_local_tensor`` leaves a meta wrapper.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..internals.fsdp import allocate_dtensors
from ..internals.torch import local_tensor, parameter_like, swappable_rnns
from ..layout.live import LiveModel
from ..names import NamedTensor
from .host_memory import HostMemory, Pages

__all__ = ["default_device", "give_addresses", "materialize"]


def materialize(live: LiveModel, device: torch.device | str, pages: Pages = "auto") -> HostMemory:
    """Allocate memory on ``device`` for all meta tensors of a model; other tensors stay unchanged.

    Returns the memory of those on the CPU, to be told of the reads that fill it. ``pages``: as ``IOOptions.pages``.

    Memory: this rank's shards; one uneven FSDP parameter's shard may briefly exist twice. New values are undefined.
    Rank-local, idempotent. Buffers are replaced: :meth:`.LiveModel.refreshed` describes the model afterwards.
    """
    device, memory = torch.device(device), HostMemory(pages)

    def empty_like(tensor: torch.Tensor) -> torch.Tensor:
        if device.type == "cpu":
            return memory.empty(tensor.size(), tensor.stride(), tensor.dtype)
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    parameters = [cast(nn.Parameter, t.tensor) for t in live.parameters]  # they keep their identity
    waiting = [p for p in parameters if p.is_meta]
    if sharded := [p for p in waiting if isinstance(p, DTensor)]:
        allocate_dtensors([module for _, module in live.modules], sharded, empty_like)
    plain = [p for p in waiting if p.is_meta]
    with swappable_rnns([module for _, module in live.modules] if plain else ()):
        for parameter in plain:
            torch.utils.swap_tensors(parameter, parameter_like(parameter, empty_like(parameter.data)))
    _materialize_buffers(live.tensors, device)
    give_addresses(parameters)
    return memory


def give_addresses(parameters: Iterable[nn.Parameter]) -> None:
    """Make ``data_ptr()`` of each empty shard among ``parameters`` return a unique number.

    torch returns 0 for all of them, but ``accelerator.prepare`` identifies an optimizer's parameters by this number: if
    a rank has no rows of two parameters, it would add one of them twice and never the other. Nothing reads memory at
    the number, and no other memory has the address of a living Python object. Rank-local, idempotent; FSDP2 keeps the
    tensors, so it lasts during training.
    """
    for parameter in parameters:
        if (
            isinstance(parameter, DTensor)
            and not (local := local_tensor(parameter)).numel()
            and not local.is_meta
        ):
            local.data_ptr = functools.partial(int, id(parameter))  # type: ignore[method-assign]


def default_device(parameters: Iterable[NamedTensor]) -> torch.device:
    """The default device for meta tensors: that of the mesh of a model's parameters, otherwise the CPU."""
    for parameter in parameters:
        if isinstance(parameter.tensor, DTensor):
            kind = parameter.tensor.device_mesh.device_type
            if kind != "cpu":
                return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


def _materialize_buffers(tensors: Iterable[NamedTensor], device: torch.device) -> None:
    """Allocate persistent meta buffers; a buffer that several modules register stays one tensor."""
    for found in tensors:
        if found.kind == "buffer" and found.persistent and found.tensor.is_meta:
            real = torch.empty_like(found.tensor, device=device)
            for module, attribute in found.owners:
                setattr(module, attribute, real)
