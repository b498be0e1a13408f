"""Applies FSDP2 to a model: refuses models that can't be wrapped, then wraps the groups that :mod:`.groups` finds."""

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
from ..gates import require
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
    "shard_with_experts",
]

# The function that shards a second model alike. Keyed by the model object, not stored on it.
_SHARDED: weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], object]] = weakref.WeakKeyDictionary()

#: Replicated parameters cost memory on every rank, with gradients and optimizer state. More than this is an error.
MAX_REPLICATED_BYTES = 64 * 2**20


def shard(model: nn.Module, mesh: DeviceMesh, policy: ShardPolicy | None = None) -> nn.Module:
    """Apply FSDP2 to ``model`` in place, bottom-up, and return the same object.

    It wraps these groups: repeated blocks, the experts inside them, embeddings, the head, and the root with everything else
    (:func:`describe_groups` lists them). A parameter shared by two groups belongs to a group that contains both. Trainable parameters whose dtype
    differs from most of their group form a separate group. Works on meta (nothing is allocated) and on real models (each rank keeps its shard of
    its own values).

    Some parameters stay plain tensors and are moved to the mesh's device:

    * parameters that match ``policy.exclude``. You must reduce their gradients.
    * parameters without dims (CLIP's ``logit_scale``) or without elements, and parameters of a different dtype for which no module can
      be a group (held by the root, a block, or a single expert). They are *replicated*: at the end of each backward their gradients are
      averaged over the mesh, in fp32. ``set_requires_gradient_sync`` and similar settings of the root's group apply to them, too. A
      rank that didn't use a parameter contributes zero, so unused parameters never hang. Their ``requires_grad`` must be the same on all
      ranks. Every backward must go through the model's forward: if a backward reaches such a parameter only from outside, nothing is reduced.

    ``torch.nn.utils.clip_grad_norm_`` and foreach optimizers (the default on GPUs) accept 0-d tensors and DTensors together.
    ``clip_grad_norm_`` rejects other plain tensors, and so does a foreach optimizer that has DTensors of the same dtype: clip
    these separately, and give them their own optimizer or set ``foreach=False``.

    Args:
        mesh: one axis (FSDP), or two named axes (HSDP: replicate, shard).
        policy: how to wrap the model. None: the defaults of :class:`ShardPolicy`.

    Every rank of the mesh must call it, with the same model and policy.

    Raises:
        ShardError: the model can't be wrapped as requested; the error lists every obstacle. The model is unchanged.
    """
    policy = policy or ShardPolicy()
    _shard(model, mesh, mesh, policy)
    remember_sharding(model, lambda second: shard(second, mesh, policy))
    return model


def shard_with_experts(
    model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh, policy: ShardPolicy
) -> nn.Module:
    """As :func:`shard`, with the experts over ``expert_mesh``: where expert parallelism leaves them fewer ranks.

    For plans: it does not set by what FSDP2 divides the experts' gradients.
    """
    _shard(model, mesh, expert_mesh, policy)
    return model


def _shard(model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh, policy: ShardPolicy) -> None:
    _check_mesh(mesh)
    wrapping = find_wrapping(model, policy)
    _check_wrappable(model, wrapping)
    _check_replicated(wrapping)
    _check_placements(wrapping, mesh, policy)
    _move_plain(wrapping.plain, mesh)
    _wrap(wrapping, mesh, expert_mesh, policy)
    if wrapping.replicated:
        places = [tensor.owners[0] for tensor, _ in wrapping.replicated]
        reduce_after_backward(places, [c.module for c, _ in reversed(wrapping.groups)], mesh)


def remember_sharding(model: nn.Module, again: Callable[[nn.Module], object]) -> None:
    """Keep ``again``, which shards a second model like ``model``. It must not hold a reference to ``model``."""
    _SHARDED[model] = again


def shard_alike(model: nn.Module, sharded: nn.Module) -> bool:
    """Shard ``model`` like ``sharded``. Returns False, and does nothing, without a :func:`remember_sharding`."""
    again = _SHARDED.get(sharded)
    if again is not None:
        again(model)
    return again is not None


# ----------------------------------------------------------------------------------------------------
# Checks


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
            "Make them contiguous, or name them in ShardPolicy(exclude=…)."
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
            "FSDP2 needs one dtype per group. These parameters differ from their group's dtype, their module can't form "
            "its own group, and they are too large to stay whole on every rank: "
            f"{', '.join(f'{t.name} ({t.tensor.dtype}, {t.tensor.nbytes:,} bytes)' for t in large)}. Convert "
            "them to the dtype of the rest, put them into a module of their own, freeze them, or name them in "
            "ShardPolicy(exclude=…) and reduce their gradients yourself."
        )
    odd = [t.name for t in trainable if isinstance(t.tensor, DTensor) or t.tensor.is_complex()]
    if odd:
        raise ShardError(
            f"parameters that FSDP2 can't shard, and that are DTensors or complex: {', '.join(odd)}. Their gradients "
            "can't be reduced here: name them in ShardPolicy(exclude=…) and do it yourself, or freeze them."
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
# Wrapping


def _wrap(wrapping: Wrapping, mesh: DeviceMesh, expert_mesh: DeviceMesh, policy: ShardPolicy) -> None:
    """Wrap the groups bottom-up: ``fully_shard`` gives a module all its parameters that no group inside it has.

    Groups for a dtype take only some of their parameters, and the group around them takes the rest. So the outer group
    comes first, then these, from the outside in.
    """
    apart = {p for candidate, own in wrapping.groups if candidate.kind == "dtype" for p in own}
    managed = {p for _, own in wrapping.groups for p in own}
    if integers := [
        t.name
        for t in wrapping.tensors
        if t.tensor in managed and not (t.tensor.is_floating_point() or t.tensor.is_complex())
    ]:
        require("integers", where=integers[0] + (f" and {len(integers) - 1} more" if integers[1:] else ""))

    def in_order(group: tuple[Candidate, tuple[nn.Parameter, ...]]) -> int:
        return group[0].path.count(".") + 1 if group[0].kind == "dtype" else 0

    for candidate, own in sorted(wrapping.groups, key=in_order):
        others = set(candidate.module.parameters()) - set(own) if candidate.kind == "dtype" else apart
        ignored = {*wrapping.plain, *others}
        options = _options(candidate, policy)
        over = expert_mesh if candidate.kind == "experts" else mesh
        fully_shard(candidate.module, mesh=over, ignored_params=ignored or None, **options)


def _options(candidate: Candidate, policy: ShardPolicy) -> dict[str, Any]:
    precision = policy.mixed_precision or MixedPrecisionPolicy()
    if candidate.kind == "experts":
        # Routing weights are fp32 on purpose: this group must not add casts.
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
    """Move plain parameters to the mesh's device. FSDP2 moves its own parameters, and all buffers."""
    device = mesh_device(mesh)
    for parameter in plain:
        if not isinstance(parameter, DTensor) and not parameter.is_meta and parameter.device != device:
            parameter.data = parameter.data.to(device)
