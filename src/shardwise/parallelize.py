"""Applying FSDP2 to a model: refuse what can't be wrapped, then wrap the groups that :mod:`.groups` finds."""

from __future__ import annotations

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

from .errors import ShardError
from .groups import (
    Candidate,
    Group,
    ShardPolicy,
    Wrapping,
    can_be_group,
    describe_groups,
    find_wrapping,
    largest_group,
    named_by,
    parameter_of,
)
from .names import canonical_name, named_tensors

__all__ = ["Group", "ShardPolicy", "describe_groups", "largest_group", "shard"]


def shard(model: nn.Module, mesh: DeviceMesh, policy: ShardPolicy = ShardPolicy()) -> nn.Module:  # noqa: B008
    """Apply FSDP2 to ``model`` in place, bottom-up, and return the same object.

    Groups: repeated blocks, the experts inside them, embeddings, head, and the rest as the root's
    (:func:`describe_groups` lists them). A parameter that two groups would share is left to a group around
    both. Parameters without dims or elements and those named by ``policy.ignored`` stay plain tensors, moved to
    the mesh's device.
    Works on meta (nothing is allocated) and on real models (each rank keeps its shard of what it has).

    Args:
        mesh: one axis (FSDP), or two named axes (HSDP: replicate, shard).

    Every rank of the mesh must call it, with the same model and policy.

    Raises:
        ShardError: the model can't be wrapped as asked; names everything that is in the way. The model is
            as it was.
    """
    _check_mesh(mesh)
    wrapping = find_wrapping(model, policy)
    _check_wrappable(model, wrapping, policy)
    _check_placements(model, wrapping, mesh, policy)
    _move_ignored(wrapping.ignored, mesh)
    for candidate, _ in wrapping.groups:
        fully_shard(candidate.module, **_wrap_options(candidate, wrapping, mesh, policy))
    return model


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


def _check_wrappable(model: nn.Module, wrapping: Wrapping, policy: ShardPolicy) -> None:
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
    entries = [t for t in named_tensors(model) if t.kind == "parameter"]
    tensors = {parameter_of(t): t.name for t in entries}
    named = named_by(entries, policy)
    left_over = [
        n
        for p, n in tensors.items()
        if p in wrapping.ignored and p not in named and p.requires_grad and p.numel()
    ]
    if left_over:
        raise ShardError(
            "trainable parameters without a dim (0-d), which nobody can shard and whose gradients FSDP2 "
            f"would not reduce: {', '.join(left_over)}. Name them in ShardPolicy(ignored=…) and reduce their "
            "gradients over the mesh yourself, freeze them, or give them the shape (1,)."
        )
    strided = [n for p, n in tensors.items() if p not in wrapping.ignored and not p.is_contiguous()]
    if strided:
        raise ShardError(
            f"FSDP2 takes contiguous parameters only; not contiguous: {', '.join(strided)}. "
            "Make them contiguous, or name them in ShardPolicy(ignored=…)."
        )

    mixed = []
    for candidate, parameters in wrapping.groups:
        by_dtype: dict[torch.dtype, list[str]] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(tensors[parameter])
        if len(by_dtype) > 1:
            kinds = "; ".join(f"{dtype}: {', '.join(names[:8])}" for dtype, names in by_dtype.items())
            mixed.append(f"{canonical_name(candidate.path) or '(root)'} ({kinds})")
    if mixed:
        raise ShardError(
            "FSDP2 takes groups whose trainable parameters have one dtype; several in: "
            + "; ".join(mixed)
            + ". Convert them to one dtype, put those of each dtype into a module of their own, freeze them, or "
            "name them in ShardPolicy(ignored=…)."
        )


def _check_placements(model: nn.Module, wrapping: Wrapping, mesh: DeviceMesh, policy: ShardPolicy) -> None:
    if policy.placement is None:
        return
    shards = mesh.size(mesh.ndim - 1)
    problems = []
    for tensor in named_tensors(model):
        parameter = tensor.tensor
        if tensor.kind != "parameter" or parameter in wrapping.ignored or isinstance(parameter, DTensor):
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


def _wrap_options(
    candidate: Candidate, wrapping: Wrapping, mesh: DeviceMesh, policy: ShardPolicy
) -> dict[str, Any]:
    precision = policy.mixed_precision or MixedPrecisionPolicy()
    if candidate.kind == "experts":
        # Routing weights come in fp32 on purpose: nothing is cast that would not be without this group.
        precision = replace(precision, cast_forward_inputs=False, output_dtype=None)
    offload = OffloadPolicy()
    if policy.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    return {
        "mesh": mesh,
        "reshard_after_forward": policy.reshard_after_forward,
        "shard_placement_fn": policy.placement,
        "mp_policy": precision,
        "offload_policy": offload,
        "ignored_params": set(wrapping.ignored) or None,
    }


def _move_ignored(ignored: frozenset[nn.Parameter], mesh: DeviceMesh) -> None:
    """FSDP2 moves what it manages, and all buffers, to the mesh's device; the rest has to be there too."""
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    for parameter in ignored:
        if not isinstance(parameter, DTensor) and not parameter.is_meta and parameter.device != device:
            parameter.data = parameter.data.to(device)
