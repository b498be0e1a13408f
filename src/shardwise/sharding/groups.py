"""Decides which modules of a model become FSDP2 groups, with which parameters. Pure: no mesh, no payload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.nn.parameter import is_lazy

from ..errors import ShardError
from ..names import NamedTensor, canonical_name, children, named_tensors, patterns_of
from ..objects import frozen
from .split_points import Candidate, GroupKind, SplitPoints, find_candidates

__all__ = [
    "Group",
    "ShardPolicy",
    "Wrapping",
    "describe_groups",
    "find_wrapping",
    "largest_group",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPolicy:
    """How :func:`shard` splits a model into FSDP2 groups."""

    block_classes: tuple[str, ...] | None = None
    """Names of the classes to wrap, wherever they occur. None: repeated children of containers, and the model's ``_no_split_modules``. Experts,
    embeddings, head and root are groups in either case."""
    mixed_precision: MixedPrecisionPolicy | None = None
    """Compute and reduce dtypes, as for ``fully_shard``. None: the stored dtypes."""
    reshard_after_forward: bool | int | None = None
    """As for ``fully_shard``. None: free gathered parameters after forward, except at the root."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory, pinned if there is an accelerator."""
    placement: Callable[[nn.Parameter], Shard | None] | None = None
    """Returns the dim along which to shard a parameter. None, or a result of None: dim 0. Other dims must divide evenly."""
    exclude: tuple[str, ...] = ()
    """``fnmatch`` patterns of parameters to leave plain (FSDP2's ``ignored_params``): complete on every rank, and you must reduce their
    gradients. Don't list parameters that FSDP2 can't shard; their gradients are reduced automatically."""

    def __post_init__(self) -> None:
        patterns_of("exclude", self.exclude)
        if isinstance(self.block_classes, str):
            raise TypeError(
                f"block_classes is a string; expected a tuple: block_classes=({self.block_classes!r},)"
            )


@frozen(kw_only=True)
class Group:
    """The parameters that FSDP2 gathers together: a module's, without those of groups inside it."""

    name: str
    """Canonical module name; empty for the root."""
    kind: GroupKind
    """Why the module is a group. ``dtype``: it takes only its parameters of one dtype, out of a surrounding group of
    another dtype."""
    parameter_count: int
    """Elements, over all ranks."""
    stored_bytes: int
    """Bytes in the dtype of the parameters, over all ranks."""
    gathered_bytes: int
    """Bytes on each rank while the group is gathered, in the compute dtype."""
    replicated_bytes: int = 0
    """Bytes, on each rank, of parameters that FSDP2 can't shard: they stay whole beside the group."""


@frozen
class Wrapping:
    """Assigns every parameter to one group, or leaves it plain."""

    tensors: tuple[NamedTensor, ...]
    """Every parameter, with its names."""
    groups: tuple[tuple[Candidate, tuple[nn.Parameter, ...]], ...]
    """Groups bottom-up, the root last, each with its own parameters."""
    plain: frozenset[nn.Parameter]
    """Parameters that are not sharded."""
    replicated: tuple[tuple[NamedTensor, nn.Module], ...]
    """Plain parameters whose gradients :func:`shard` reduces, each with the module of the group around it."""


def describe_groups(model: nn.Module, policy: ShardPolicy = ShardPolicy()) -> tuple[Group, ...]:
    """The groups that :func:`shard` makes of ``model``, bottom-up, the root last. Pure: no mesh, no payload.

    Works on meta, real and already sharded models. Raises :class:`ShardError` for names that match nothing.
    """
    wrapping = find_wrapping(model, policy)
    compute = policy.mixed_precision.param_dtype if policy.mixed_precision is not None else None
    beside: dict[nn.Module, int] = {}
    for tensor, module in wrapping.replicated:
        beside[module] = beside.get(module, 0) + tensor.tensor.nbytes
    return tuple(
        Group(
            name=canonical_name(candidate.path),
            kind=candidate.kind,
            parameter_count=sum(p.numel() for p in parameters),
            stored_bytes=sum(p.numel() * p.dtype.itemsize for p in parameters),
            gathered_bytes=sum(p.numel() * _compute_dtype(p, compute).itemsize for p in parameters),
            replicated_bytes=beside.get(candidate.module, 0),
        )
        for candidate, parameters in wrapping.groups
    )


def largest_group(groups: tuple[Group, ...]) -> Group:
    """The group that takes the most memory while gathered; the first of equals."""
    return max(groups, key=lambda group: group.gathered_bytes)


def _compute_dtype(parameter: nn.Parameter, compute: torch.dtype | None) -> torch.dtype:
    # FSDP2 casts only floating-point parameters.
    return compute if compute is not None and parameter.dtype.is_floating_point else parameter.dtype


# ----------------------------------------------------------------------------------------------------
# Modules and their parameters


def find_wrapping(model: nn.Module, policy: ShardPolicy) -> Wrapping:
    """The groups and plain parameters of :func:`shard`. Every parameter that is not plain has one group."""
    tensors = [t for t in named_tensors(model) if t.kind == "parameter"]
    lazy = [t.name for t in tensors if is_lazy(t.tensor)]
    if lazy:
        raise ShardError(
            f"parameters without a shape yet: {', '.join(lazy)}. Run the model once before this."
        )
    named = named_by(tensors, policy)
    # torch 2.13 shards neither: it refuses 0-d parameters at once, empty ones only in the first backward.
    unfit = {parameter_of(t) for t in tensors if t.tensor.ndim == 0 or not t.tensor.numel()}
    sharded = [t for t in tensors if parameter_of(t) not in unfit | named]
    whole = [t for t in tensors if parameter_of(t) in unfit - named and t.tensor.numel()]
    candidates = find_candidates(model, policy.block_classes)
    candidates, owners, depth = _without_conflicts(model, candidates, {id(t.tensor) for t in sharded})
    own: dict[int, list[NamedTensor]] = {key: [] for key in candidates}
    for tensor in sharded:
        own[next(iter(owners[id(tensor.tensor)]))].append(tensor)
    split_points = SplitPoints(model, candidates)
    for key in list(own):
        own[key], apart, left = _by_dtype(own[key], candidates[key], split_points)
        for candidate, taken in apart.items():
            candidates[id(candidate.module)] = candidate
            own[id(candidate.module)], depth[id(candidate.module)] = taken, depth[key] + 1
        whole += left
    # The root is a group even if all its parameters lie in other groups: it starts FSDP2's iteration.
    kept = [key for key in candidates if own[key] or key == id(model)]
    kept.sort(key=lambda key: -depth[key])  # stable: module order among modules of one depth

    def beside(tensor: NamedTensor) -> nn.Module:
        (holder, *others) = owners[id(tensor.tensor)]
        return candidates[holder].module if holder in kept and not others else model

    return Wrapping(
        tuple(tensors),
        tuple((candidates[key], tuple(parameter_of(t) for t in own[key])) for key in kept),
        frozenset(unfit | named | {parameter_of(t) for t in whole}),
        tuple((t, beside(t)) for t in whole),
    )


def _without_conflicts(
    model: nn.Module, candidates: dict[int, Candidate], sharded: set[int]
) -> tuple[dict[int, Candidate], dict[int, set[int]], dict[int, int]]:
    """The candidates with which every sharded parameter has one owner; with the owners and each candidate's depth."""
    while True:
        owners, depth = _owners(model, candidates)
        dropped = _conflicting([holders for key, holders in owners.items() if key in sharded], depth)
        if not dropped:
            return candidates, owners, depth
        candidates = {key: c for key, c in candidates.items() if key not in dropped}


def parameter_of(tensor: NamedTensor) -> nn.Parameter:
    """The tensor of an entry of kind ``parameter``."""
    assert isinstance(tensor.tensor, nn.Parameter)
    return tensor.tensor


def named_by(tensors: list[NamedTensor], policy: ShardPolicy) -> frozenset[nn.Parameter]:
    """Parameters that the ``exclude`` patterns name."""
    found: set[nn.Parameter] = set()
    without_match = []
    for pattern in policy.exclude:
        matched = {parameter_of(t) for t in tensors if any(fnmatchcase(name, pattern) for name in t.names)}
        found |= matched
        if not matched:
            without_match.append(pattern)
    if without_match:
        raise ShardError(
            f"ShardPolicy(exclude=…) matches no parameter: {', '.join(map(repr, without_match))}. "
            f"Names are module paths without wrapper parts, e.g. {tensors[0].name if tensors else ''!r}."
        )
    return frozenset(found)


def _by_dtype(
    tensors: list[NamedTensor], group: Candidate, split_points: SplitPoints
) -> tuple[list[NamedTensor], dict[Candidate, list[NamedTensor]], list[NamedTensor]]:
    """Split a group by dtype: parameters that stay, new groups for trainable ones of a rarer dtype, and the rest.

    FSDP2 refuses, at the first forward, a group whose trainable parameters have several dtypes (torch 2.13). Some
    classes keep parameters in fp32: T5 its ``wo``, Zamba ``A_log`` beside bf16 weights of the same module. A module
    inside the group becomes a group for them; parameters without such a module are the rest.
    """
    by_dtype: dict[torch.dtype, list[NamedTensor]] = {}
    for tensor in tensors:
        if tensor.tensor.requires_grad:
            by_dtype.setdefault(tensor.tensor.dtype, []).append(tensor)
    most_first = sorted(by_dtype, key=lambda dtype: -sum(t.tensor.numel() for t in by_dtype[dtype]))
    apart: dict[Candidate, list[NamedTensor]] = {}
    left = []
    for tensor in (t for dtype in most_first[1:] for t in by_dtype[dtype]):
        for candidate in split_points.around(tensor, group):
            if candidate not in apart or apart[candidate][0].tensor.dtype == tensor.tensor.dtype:
                apart.setdefault(candidate, []).append(tensor)
                break
        else:
            left.append(tensor)
    gone = {id(t) for t in (*left, *chain.from_iterable(apart.values()))}
    return [t for t in tensors if id(t) not in gone], apart, left


# ----------------------------------------------------------------------------------------------------
# Ties: every parameter gets one owner


def _owners(model: nn.Module, candidates: dict[int, Candidate]) -> tuple[dict[int, set[int]], dict[int, int]]:
    """For every parameter (by id) the candidates that would own it, and for every candidate its depth."""
    owners: dict[int, set[int]] = {}
    depth: dict[int, int] = {id(model): 0}
    visited: set[tuple[int, int]] = set()

    def visit(module: nn.Module, owner: int) -> None:
        if id(module) in candidates and id(module) != owner:
            depth[id(module)] = max(depth.get(id(module), 0), depth[owner] + 1)
            owner = id(module)
        if (id(module), owner) in visited:
            return
        visited.add((id(module), owner))
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(owner)
        for _, child in children(module):
            visit(child, owner)

    visit(model, id(model))
    return owners, depth


def _conflicting(owners: Iterable[set[int]], depth: dict[int, int]) -> set[int]:
    """Candidates to drop: the deepest owners of every parameter with several owners.

    Dropping the deepest first means that a tie inside one block costs only the inner group. Embedding and head are
    dropped together.
    """
    dropped: set[int] = set()
    for holders in owners:
        if len(holders) > 1:
            deepest = max(depth[h] for h in holders)
            dropped |= {h for h in holders if depth[h] == deepest}
    return dropped
