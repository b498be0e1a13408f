"""Applying FSDP2 to a model: refuse what can't be wrapped, then wrap the groups that :mod:`.groups` finds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from ..errors import ShardError
from .groups import Group, ShardPolicy, Wrapping, describe_groups, find_wrapping, largest_group, parameter_of
from .replicated import mesh_device, reduce_after_backward
from .split_points import Candidate, can_be_group

__all__ = [
    "Group",
    "ShardPolicy",
    "describe_groups",
    "largest_group",
    "remember_sharding",
    "shard",
    "shard_alike",
]

# Keyed by the model object, not stored on it: what shards a second one like it.
_SHARDED: weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], object]] = weakref.WeakKeyDictionary()

#: What is replicated costs memory on every rank, gradient and optimizer state too: beyond this it is an error.
MAX_REPLICATED_BYTES = 64 * 2**20


def shard(model: nn.Module, mesh: DeviceMesh, policy: ShardPolicy = ShardPolicy()) -> nn.Module:  # noqa: B008
    """Apply FSDP2 to ``model`` in place, bottom-up, and return the same object.

    Groups: repeated blocks, the experts inside them, embeddings, head, and the rest as the root's
    (:func:`describe_groups` lists them). A parameter that two groups would share is left to a group around
    both. Trainable parameters of another dtype than most of their group become a group of their own. Works on
    meta (nothing is allocated) and on real models (each rank keeps its shard of what it has).

    Plain tensors stay, moved to the mesh's device:

    * parameters named by ``policy.ignored``: reducing their gradients is up to the caller;
    * parameters without dims (CLIP's ``logit_scale``) or elements, and those of another dtype that no module
      can be a group for (held by the root, a block, a single expert). They are *replicated*: their gradients are averaged
      over the mesh at the end of each backward, in fp32, with ``set_requires_gradient_sync`` and the like as for
      the root's group. A rank that did not use one counts as zero, so unused ones never hang. Their ``requires_grad``
      must be alike on all ranks, and every backward must go through the model's forward: one that reaches
      such a parameter only from outside reduces nothing.

    ``torch.nn.utils.clip_grad_norm_`` and foreach optimizers (the default on GPUs) take 0-d tensors and DTensors
    together. Other plain tensors ``clip_grad_norm_`` refuses, and a foreach optimizer does if it has DTensors of
    the same dtype: clip these apart, and give them an optimizer of their own or ``foreach=False``.

    Args:
        mesh: one axis (FSDP), or two named axes (HSDP: replicate, shard).

    Every rank of the mesh must call it, with the same model and policy.

    Raises:
        ShardError: the model can't be wrapped as asked; names everything that is in the way. The model is
            as it was.
    """
    _check_mesh(mesh)
    wrapping = find_wrapping(model, policy)
    _check_wrappable(model, wrapping)
    _check_replicated(wrapping)
    _check_placements(wrapping, mesh, policy)
    _move_plain(wrapping.plain, mesh)
    _wrap(wrapping, mesh, policy)
    if wrapping.replicated:
        places = [tensor.owners[0] for tensor, _ in wrapping.replicated]
        reduce_after_backward(places, [c.module for c, _ in reversed(wrapping.groups)], mesh)
    remember_sharding(model, lambda second: shard(second, mesh, policy))
    return model


def remember_sharding(model: nn.Module, again: Callable[[nn.Module], object]) -> None:
    """Note what shards a second model as ``model`` was. ``again`` must not hold on to ``model``."""
    _SHARDED[model] = again


def shard_alike(model: nn.Module, sharded: nn.Module) -> bool:
    """Shard ``model`` as ``sharded`` was. False, and nothing done, if that is not known (see :func:`remember_sharding`)."""
    again = _SHARDED.get(sharded)
    if again is not None:
        again(model)
    return again is not None


# ----------------------------------------------------------------------------------------------------
# Whether it can be done


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2):
        raise ShardError(
            f"the mesh has {mesh.ndim} axes; expected one (FSDP) or two (HSDP: replicate, shard). "
            "Pass the part of it that data parallelism uses, e.g. mesh['dp']."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ShardError(
            "a mesh of two axes needs names, e.g. "
            "init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard'))."
        )


def _check_wrappable(model: nn.Module, wrapping: Wrapping) -> None:
    already = [path or "(root)" for path, m in model.named_modules() if isinstance(m, FSDPModule)]
    if already:
        raise ShardError(
            f"already wrapped by fully_shard: {', '.join(already[:8])}. Pass the unwrapped model."
        )
    if not can_be_group(model):
        raise ShardError(
            f"the root is a {type(model).__name__}: it has no parameters, or no forward for FSDP2 to hook "
            "into. Put it into a module with a forward, and shard that."
        )
    strided = [
        t.name for t in wrapping.tensors if t.tensor not in wrapping.plain and not t.tensor.is_contiguous()
    ]
    if strided:
        raise ShardError(
            f"FSDP2 takes contiguous parameters only; not contiguous: {', '.join(strided)}. "
            "Make them contiguous, or name them in ShardPolicy(ignored=…)."
        )


def _check_replicated(wrapping: Wrapping) -> None:
    trainable = [t for t, _ in wrapping.replicated if t.tensor.requires_grad]
    if trainable and not any(parameters for _, parameters in wrapping.groups):
        raise ShardError(
            f"nothing to shard: all parameters stay whole on every rank, e.g. {trainable[0].name}. "
            "Use DistributedDataParallel."
        )
    large = [t for t in trainable if t.tensor.nbytes > MAX_REPLICATED_BYTES]
    if large:
        raise ShardError(
            "FSDP2 takes groups whose trainable parameters have one dtype. These have another than most of their "
            "group, are held by a module that can't be a group for them, and are too large to stay whole on every "
            f"rank: {', '.join(f'{t.name} ({t.tensor.dtype}, {t.tensor.nbytes:,} bytes)' for t in large)}. Convert "
            "them to the dtype of the rest, put them into a module of their own, freeze them, or name them in "
            "ShardPolicy(ignored=…) and reduce their gradients yourself."
        )
    odd = [t.name for t in trainable if isinstance(t.tensor, DTensor) or t.tensor.is_complex()]
    if odd:
        raise ShardError(
            f"parameters that FSDP2 can't shard, and that are DTensors or complex: {', '.join(odd)}. Their gradients "
            "can't be reduced here: name them in ShardPolicy(ignored=…) and do it yourself, or freeze them."
        )


def _check_placements(wrapping: Wrapping, mesh: DeviceMesh, policy: ShardPolicy) -> None:
    if policy.placement is None:
        return
    shards = mesh.size(mesh.ndim - 1)
    problems = []
    for tensor in wrapping.tensors:
        parameter = tensor.tensor
        if parameter in wrapping.plain or isinstance(parameter, DTensor):
            continue
        chosen = policy.placement(parameter_of(tensor))
        if chosen is None:
            continue
        dim = chosen.dim + parameter.ndim if chosen.dim < 0 else chosen.dim
        shape = tuple(parameter.shape)
        if not 0 <= dim < len(shape):
            problems.append(f"{tensor.name} {shape} has no dim {chosen.dim}")
        elif dim > 0 and shape[dim] % shards:
            problems.append(f"{tensor.name} {shape}: dim {dim} does not divide by {shards} shards")
    if problems:
        raise ShardError(
            "ShardPolicy(placement=…) chose dims that FSDP2 can't cut:\n"
            + "\n".join(f"  - {p}" for p in problems)
            + "\nReturn None (dim 0, which may be uneven) for these."
        )


# ----------------------------------------------------------------------------------------------------
# Doing it


def _wrap(wrapping: Wrapping, mesh: DeviceMesh, policy: ShardPolicy) -> None:
    """``fully_shard`` takes what is in a module and in no group inside it: bottom-up, each gets its own parameters.

    Groups for a dtype take only some of what is inside them, and the group around them takes the others: first
    that one, then they, from the outside in.
    """
    apart = {p for candidate, own in wrapping.groups if candidate.kind == "dtype" for p in own}

    def in_order(group: tuple[Candidate, tuple[nn.Parameter, ...]]) -> int:
        return group[0].path.count(".") + 1 if group[0].kind == "dtype" else 0

    for candidate, own in sorted(wrapping.groups, key=in_order):
        others = set(candidate.module.parameters()) - set(own) if candidate.kind == "dtype" else apart
        ignored = {*wrapping.plain, *others}
        options = _options(candidate, policy)
        fully_shard(candidate.module, mesh=mesh, ignored_params=ignored or None, **options)


def _options(candidate: Candidate, policy: ShardPolicy) -> dict[str, Any]:
    precision = policy.mixed_precision or MixedPrecisionPolicy()
    if candidate.kind == "experts":
        # Routing weights come in fp32 on purpose: nothing is cast that would not be without this group.
        precision = replace(precision, cast_forward_inputs=False, output_dtype=None)
    offload = OffloadPolicy()
    if policy.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    return {
        "reshard_after_forward": policy.reshard_after_forward,
        "shard_placement_fn": policy.placement,
        "mp_policy": precision,
        "offload_policy": offload,
    }


def _move_plain(plain: frozenset[nn.Parameter], mesh: DeviceMesh) -> None:
    """FSDP2 moves what it manages, and all buffers, to the mesh's device; the rest has to be there too."""
    device = mesh_device(mesh)
    for parameter in plain:
        if not isinstance(parameter, DTensor) and not parameter.is_meta and parameter.device != device:
            parameter.data = parameter.data.to(device)
