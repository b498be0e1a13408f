"""Averages, after backward, the gradients of parameters that FSDP2 can't shard and that stay whole on every rank.

FSDP2 ends every backward in one callback, on every rank that ran one. What is here goes after it: one reduction
over the mesh for all such parameters, zeros where this rank has no gradient. So it does not matter which of them
a rank's loss used, in what order, or how often forward ran before; and nothing hangs on the parameter objects,
which may be swapped, moved and loaded. One attribute of one of FSDP2's groups is assigned for it; its classes stay as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import ShardError
from ..internals.fsdp import FsdpGroup, fsdp_groups
from ..names import own_parameter

__all__ = ["mesh_device", "reduce_after_backward", "reduced_parameters"]


def reduce_after_backward(
    places: Sequence[tuple[nn.Module, str]], beside: Sequence[nn.Module], mesh: DeviceMesh
) -> None:
    """Average the gradients of the parameters at ``places`` over ``mesh`` at the end of each backward.

    The settings (gradient sync, divide factor) of one group apply: that of the first module in ``beside`` for which
    FSDP2 holds parameters. Call it after ``fully_shard``, on every rank, with the same places in the same order.
    """
    groups = [group for module in beside for group in fsdp_groups(module)]
    if groups:  # else nothing here is trainable
        groups[0].finalize_with(Reduction(groups[0], tuple(places), mesh))


def reduced_parameters(modules: Iterable[FSDPModule]) -> set[int]:
    """ids of the plain parameters whose gradients are averaged after each backward. ``modules``: all modules of a model
    that FSDP2 shards."""
    return {
        id(parameter)
        for module in modules
        for group in fsdp_groups(module)
        if isinstance(group.finalizer, Reduction)
        for parameter in group.finalizer.parameters()
    }


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank in ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


class Reduction:
    """Replaces a group's ``finalize_backward``: calls the original, then averages the gradients."""

    def __init__(self, group: FsdpGroup, places: tuple[tuple[nn.Module, str], ...], mesh: DeviceMesh) -> None:
        self._group = group
        self._finish = group.finalizer
        self._places = places
        self._mesh = mesh
        self._reduced: list[weakref.ref[torch.Tensor]] = []

    def __call__(self) -> None:
        self._finish()
        all_axes = self._mesh.ndim == 1 or self._group.all_reduces
        if self._group.reduces and all_axes:  # else gradients add up until they are: averaging is linear
            self._reduce([p for p in self.parameters() if p.requires_grad])

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are at the places now."""
        found = (own_parameter(module, attribute) for module, attribute in self._places)
        return [p for p in found if p is not None and not isinstance(p, DTensor)]

    @torch.no_grad()
    def _reduce(self, parameters: list[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the mesh; None only if no rank has one."""
        if not parameters:
            return
        factor = self._group.divide_factor or self._mesh.size()
        if factor != self._mesh.size():
            self._refuse_reduced(parameters)
        sizes = [p.numel() for p in parameters]
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
        sums = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=mesh_device(self._mesh))
        *parts, holders = sums.split([*sizes, len(sizes)])
        for parameter, part in zip(parameters, parts, strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad.reshape(-1))
        holders.copy_(torch.tensor([p.grad is not None for p in parameters]))
        _sum_over(self._mesh, sums)
        sums /= factor
        # Reading it waits for the device, so only a rank that lacks a gradient does.
        held = holders.tolist() if any(p.grad is None for p in parameters) else []
        for index, (parameter, part) in enumerate(zip(parameters, parts, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter))
            elif held[index]:
                parameter.grad = part.view_as(parameter).to(parameter, copy=True)
        self._reduced = [weakref.ref(p.grad) for p in parameters if p.grad is not None]

    def _refuse_reduced(self, parameters: list[nn.Parameter]) -> None:
        """Refuse gradients reduced before: they are averaged again, which is right only for a mean."""
        before = [grad for reference in self._reduced if (grad := reference()) is not None]
        if any(p.grad is grad for p in parameters for grad in before):
            raise ShardError(
                "with set_gradient_divide_factor, gradients of parameters that are whole on every rank can't add up over "
                "several reduced backwards. Call set_requires_gradient_sync(False) for all but the last one, and "
                "zero_grad(set_to_none=True) after the step"
            )


def _sum_over(mesh: DeviceMesh, tensor: torch.Tensor) -> None:
    """Sum in place over all ranks of the mesh, with the same bits on each."""
    for axis in reversed(range(mesh.ndim)):
        dist.all_reduce(tensor, group=mesh.get_group(axis))
    if mesh.ndim > 1:
        # Another slice of the last axis may have added the same values in another order.
        dist.broadcast(tensor, group=mesh.get_group(1), group_src=0)
