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

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..internals.torch import allocate_dtensors, local_tensor, parameter_like, swappable_rnns
from ..names import own_tensors

__all__ = ["default_device", "give_addresses", "materialize"]


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Allocate memory on ``device`` for all meta tensors of ``model``; other tensors stay unchanged.

    Memory: this rank's shards; one uneven FSDP parameter's shard may briefly exist twice. New values are undefined.
    Rank-local, idempotent.
    """
    device = torch.device(device)
    if any(isinstance(p, DTensor) and p.is_meta for p in model.parameters()):
        allocate_dtensors(model, device)
    seen: set[int] = set()
    with swappable_rnns(model):
        for parameter in model.parameters():
            if parameter.is_meta and id(parameter) not in seen:
                seen.add(id(parameter))
                real = parameter_like(parameter, torch.empty_like(parameter.data, device=device))
                torch.utils.swap_tensors(parameter, real)
                seen.add(id(real))
    _materialize_buffers(model, device)
    give_addresses(model)


def give_addresses(model: nn.Module) -> None:
    """Make ``data_ptr()`` of each empty shard of ``model`` return a unique number.

    torch returns 0 for all of them, but ``accelerator.prepare`` identifies an optimizer's parameters by this number: if
    a rank has no rows of two parameters, it would add one of them twice and never the other. Nothing reads memory at
    the number, and no other memory has the address of a living Python object. Rank-local, idempotent; FSDP2 keeps the
    tensors, so it lasts during training.
    """
    for parameter in model.parameters():
        if (
            isinstance(parameter, DTensor)
            and not (local := local_tensor(parameter)).numel()
            and not local.is_meta
        ):
            local.data_ptr = functools.partial(int, id(parameter))  # type: ignore[method-assign]


def default_device(model: nn.Module) -> torch.device:
    """The default device for meta tensors: the device of the model's mesh, otherwise the CPU."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            kind = parameter.device_mesh.device_type
            if kind != "cpu":
                return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


def _materialize_buffers(model: nn.Module, device: torch.device) -> None:
    """Allocate persistent meta buffers; a buffer that several modules register stays one tensor."""
    real: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer, kind, persistent in [*own_tensors(module)]:
            if kind == "parameter" or not buffer.is_meta or not persistent:
                continue
            if id(buffer) not in real:
                real[id(buffer)] = torch.empty_like(buffer, device=device)
            setattr(module, name, real[id(buffer)])
