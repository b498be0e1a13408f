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

from ..internals.torch import empty_dtensor
from ..layout.model import local_tensor

__all__ = ["default_device", "give_addresses", "materialize"]


def materialize(model: nn.Module, device: torch.device | str) -> None:
    """Allocate memory on ``device`` for all meta tensors of ``model``; other tensors stay unchanged.

    Memory: this rank's shards; one uneven FSDP parameter's shard may briefly exist twice. New values are undefined.
    Rank-local, idempotent.
    """
    device = torch.device(device)
    if any(isinstance(p, DTensor) and p.is_meta for p in model.parameters()):

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, DTensor) and tensor.is_meta:
                return empty_dtensor(tensor, device)
            return tensor

        model._apply(allocate)
    rnns = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    for rnn in rnns:
        rnn._flat_weight_refs = []  # weak references to its weights, which swap_tensors refuses
    seen: set[int] = set()
    for parameter in model.parameters():
        if parameter.is_meta and id(parameter) not in seen:
            seen.add(id(parameter))
            real = _real_parameter(parameter, device)
            torch.utils.swap_tensors(parameter, real)
            seen.add(id(real))
    for rnn in rnns:
        rnn._init_flat_weights()
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


def _real_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter with uninitialised memory, of the same class and with the same attributes."""
    empty = torch.empty_like(parameter.data, device=device)
    if type(empty) is torch.Tensor:
        # A subclass of Parameter may take other arguments in __new__; this bypasses it and keeps the class.
        real: nn.Parameter = torch.Tensor._make_subclass(type(parameter), empty, parameter.requires_grad)
    else:  # a tensor subclass that is itself marked as a parameter
        real = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    return real


def _materialize_buffers(model: nn.Module, device: torch.device) -> None:
    """Allocate persistent meta buffers; a buffer that several modules register stays one tensor."""
    real: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta or name in module._non_persistent_buffers_set:
                continue
            if id(buffer) not in real:
                real[id(buffer)] = torch.empty_like(buffer, device=device)
            module._buffers[name] = real[id(buffer)]
