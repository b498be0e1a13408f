"""What a training step is made of: FSDP2's groups, and the events of a forward and backward. See :mod:`.step`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from ..objects import frozen
from ..sharding.groups import ShardPolicy, find_wrapping

__all__ = ["Event", "StepGroup", "groups_of"]


@frozen
class Event:
    """Something that happened in a forward or backward, and the memory of activations around it."""

    kind: str
    """``enter`` and ``exit``: the forward of a group. ``back``: its backward begins. ``grad``: a gradient of it is whole.
    ``done``: the gradient of its input is. ``loss``: the forward is over. ``end``: the backward is."""
    group: int
    nbytes: int
    """Of the gradient."""
    live: int
    """Bytes of activations now, without parameters and whole gradients."""
    peak: int
    """The most bytes of them since the event before."""
    products: int = 0
    """Different dense products in two bytes an element that ran until now."""


@frozen(eq=False)
class StepGroup:
    """A group of parameters that FSDP2 gathers together, with the sizes of its buffers."""

    index: int
    path: str
    kind: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    gathered_bytes: int
    """The gathered parameters, padded, in the dtype of the forward: what FSDP2 allocates once for the all-gather, and once
    more for the parameters that it copies out."""
    cast_bytes: int
    """This rank's part of them, if it has to be cast before the all-gather; else 0."""
    reduced_bytes: int
    """Input of the reduce-scatter: padded gradients in the dtype of the reduction."""
    gradient_bytes: int
    """This rank's part of the gradients, padded, in the dtype of the parameters."""
    last_gradient_bytes: int
    """The whole gradient of its last trained parameter: FSDP2 holds it until the group's reduction is over."""
    is_reduced_apart: bool
    """Whether the reduction has another dtype than the parameters: its output is cast."""
    own_shards: int | None = None
    """Ranks over which FSDP2 cuts this group; None: those of the step. Experts under expert parallelism have their own."""

    @property
    def is_trained(self) -> bool:
        return self.reduced_bytes > 0


def groups_of(
    model: nn.Module, policy: ShardPolicy, shards: int, expert_shards: int | None = None
) -> tuple[StepGroup, ...]:
    """The groups that ``shard`` makes of an unsharded model over ``shards`` ranks, the root last.

    ``expert_shards``: the ranks over which FSDP2 cuts experts; None: ``shards``.
    """
    precision = policy.mixed_precision
    compute = precision.param_dtype if precision is not None else None
    reduce = precision.reduce_dtype if precision is not None else None
    found, of_all = [], shards
    for index, (candidate, parameters) in enumerate(find_wrapping(model, policy).groups):
        is_apart = candidate.kind == "experts" and expert_shards not in (None, of_all)
        shards = expert_shards if is_apart and expert_shards else of_all
        dtypes = {id(p): _dtype(p, compute) for p in parameters}
        padded = {id(p): _padded(p, policy, shards) for p in parameters}
        trained = [p for p in parameters if p.requires_grad]
        reduced = [(padded[id(p)], reduce or dtypes[id(p)]) for p in trained]
        found.append(
            StepGroup(
                index=index,
                path=candidate.path,
                kind=candidate.kind,
                module=candidate.module,
                parameters=tuple(parameters),
                gathered_bytes=sum(padded[id(p)] * dtypes[id(p)].itemsize for p in parameters),
                cast_bytes=sum(
                    padded[id(p)] * dtypes[id(p)].itemsize // shards
                    for p in parameters
                    if dtypes[id(p)] != p.dtype
                ),
                reduced_bytes=sum(numel * dtype.itemsize for numel, dtype in reduced),
                gradient_bytes=sum(padded[id(p)] // shards * p.dtype.itemsize for p in trained),
                last_gradient_bytes=trained[-1].numel() * dtypes[id(trained[-1])].itemsize if trained else 0,
                is_reduced_apart=any(
                    dtype != p.dtype for p, (_, dtype) in zip(trained, reduced, strict=True)
                ),
                own_shards=shards if is_apart else None,
            )
        )
    return tuple(found)


def _dtype(parameter: nn.Parameter, compute: torch.dtype | None) -> torch.dtype:
    return compute if compute is not None and parameter.is_floating_point() else parameter.dtype


def _padded(parameter: nn.Parameter, policy: ShardPolicy, shards: int) -> int:
    """Elements over all ranks with FSDP2's padding: each rank holds as much as the first."""
    shape: Sequence[int] = parameter.shape
    placed = policy.placement(parameter) if policy.placement is not None else None
    dim = 0 if placed is None else placed.dim
    return math.prod((*shape[:dim], -(-shape[dim] // shards) * shards, *shape[dim + 1 :]))
