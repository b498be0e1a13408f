"""Applies FSDP2 to a model: refuses models that can't be wrapped, and chooses the groups that are."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from ..errors import ShardError
from ..gates import require
from ..internals.fsdp import fsdp_groups, fsdp_parameter_ids, has_run, settings_of
from ..internals.peft import adapted_modules, cut_adapter, is_adapted
from ..internals.torch import original_class
from ..internals.transformers import blocks_not_to_split
from ..names import NamedTensor, canonical_name, children, named_tensors, patterns_of
from ..objects import frozen
from ..tensors.live import mesh_device, reduce_after_backward

# ----------------------------------------------------------------------------------------------------
# Finds the modules of a model that could be FSDP2 groups. Pure: no mesh, no payload, no collectives.

GroupKind = Literal["block", "experts", "embedding", "head", "dtype", "root"]

_EXPERTS_CLASS = re.compile(r"Experts$")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@frozen
class Candidate:
    """A module that could be a group, its path in the model, and the reason."""

    module: nn.Module
    path: str
    kind: GroupKind


def find_candidates(model: nn.Module, block_classes: Sequence[str] | None) -> dict[int, Candidate]:
    """Modules that should be groups, by id, in module order; the first reason found for a module counts.

    Raises :class:`ShardError` for ``block_classes`` that the model lacks.
    """
    reasons: dict[int, GroupKind] = {id(model): "root"}
    blocks = _blocks(model) if block_classes is None else _blocks_by_name(model, block_classes)
    for module in blocks:
        reasons.setdefault(id(module), "block")
    adapted = adapted_modules(model)
    for module in _experts(model, set(reasons)):
        # PEFT's layer around experts reads their parameters before it runs them.
        reasons.setdefault(id(adapted.get(id(module), module)), "experts")
    for module, kind in _embeddings_and_head(model):
        reasons.setdefault(id(module), kind)
    return {
        id(module): Candidate(module, path, reasons[id(module)])
        for path, module in model.named_modules()
        if id(module) in reasons and (module is model or can_be_group(module))
    }


def can_be_group(module: nn.Module) -> bool:
    """Whether a module has parameters, and a forward for FSDP2 to hook into."""
    if next(module.parameters(), None) is None:
        return False
    is_bare_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not (is_bare_container and original_class(module).forward is nn.Module.forward)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks, then ``_no_split_modules`` that neither lie in one nor hold one."""
    repeated: list[nn.Module] = []
    _collect_repeated(model, "", repeated, set())
    names = {name for m in model.modules() for name in blocks_not_to_split(m)}
    held = {id(m) for block in repeated for m in block.modules()}
    starts = {id(block) for block in repeated}
    whole: list[nn.Module] = []
    for module in model.modules():
        if module is model or id(module) in held or original_class(module).__name__ not in names:
            continue
        inside = {id(m) for m in module.modules()}
        if can_be_group(module) and not inside & starts:
            whole.append(module)
            held |= inside  # outermost only: modules() visits parents first
    return repeated + whole


def _collect_repeated(module: nn.Module, attribute: str, found: list[nn.Module], seen: set[int]) -> None:
    """Children of containers with at least two children of one class; nothing inside them."""
    if id(module) in seen:
        return
    seen.add(id(module))
    is_container = isinstance(module, _CONTAINERS) and not _holds_experts(module, attribute)
    inside = children(module)
    classes = [original_class(child) for _, child in inside if next(child.parameters(), None) is not None]
    repeats = is_container and len(classes) > len(set(classes))
    for name, child in inside:
        if repeats and can_be_group(child):
            found.append(child)
        elif not _holds_experts(child, name) and not is_adapted(child):
            _collect_repeated(child, name, found, seen)


def _holds_experts(module: nn.Module, attribute: str) -> bool:
    return attribute == "experts" or _EXPERTS_CLASS.search(original_class(module).__name__) is not None


def _blocks_by_name(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    found = [m for m in model.modules() if m is not model and original_class(m).__name__ in names]
    present = {original_class(m).__name__ for m in found}
    missing = [name for name in names if name not in present]
    if missing:
        there = sorted({original_class(m).__name__ for m in model.modules() if m is not model})
        raise ShardError(
            f"ShardPolicy(block_classes=…) names classes that the model does not have: {', '.join(missing)}. "
            f"It has: {', '.join(there)}."
        )
    unfit = sorted({original_class(m).__name__ for m in found if not can_be_group(m)} - {"ModuleList"})
    if unfit and not any(can_be_group(m) for m in found):
        raise ShardError(
            f"ShardPolicy(block_classes=…): {', '.join(unfit)} have no parameters or no forward to hook into."
        )
    return found


def _experts(model: nn.Module, taken: set[int]) -> list[nn.Module]:
    """Modules that hold all experts of a layer: classes named ``…Experts``; the owner of a list ``experts``.

    Never a single expert of a list: it runs only on ranks whose tokens reach it, and FSDP2's collective would wait for
    the other ranks.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside:
            continue
        listed = dict(children(module)).get("experts")
        is_owner = (
            listed is not None and not can_be_group(listed) and next(listed.parameters(), None) is not None
        )
        is_named = _EXPERTS_CLASS.search(original_class(module).__name__) is not None
        if (is_named or is_owner) and id(module) not in taken and can_be_group(module):
            found.append(module)
            inside |= {id(m) for m in module.modules()}
    return found


def _embeddings_and_head(model: nn.Module) -> Iterator[tuple[nn.Module, GroupKind]]:
    """The input embeddings and head of the outermost modules that have methods for them."""
    known = {id(m) for m in model.modules()} - {id(model)}
    asked: set[int] = set()
    for module in model.modules():
        if id(module) in asked or not hasattr(module, "get_input_embeddings"):
            continue
        asked |= {id(m) for m in module.modules()}
        kinds: tuple[tuple[str, GroupKind], ...] = (
            ("get_input_embeddings", "embedding"),
            ("get_output_embeddings", "head"),
        )
        for method, kind in kinds:
            answer = _ask(module, method)
            if isinstance(answer, nn.Module) and id(answer) in known and can_be_group(answer):
                yield answer, kind


def _ask(module: nn.Module, method: str) -> object:
    # Models without embeddings or a head raise here, with any type of error; it only means "none".
    try:
        return getattr(module, method)()
    except Exception:
        return None


def _listed_experts(model: nn.Module) -> set[int]:
    """All modules inside lists of experts, by id: they do not run on every rank."""
    return {
        id(m)
        for module in model.modules()
        for name, child in children(module)
        if _holds_experts(child, name)
        for m in child.modules()
        if m is not child
    }


class SplitPoints:
    """Modules of a model that are not groups and run on every rank: they could take some of a group's parameters."""

    def __init__(self, model: nn.Module, groups: Collection[int]) -> None:
        """``groups``: ids of the modules that are groups already."""
        self._paths = {id(m): path for path, m in model.named_modules()}
        self._unfit = {*groups, *_listed_experts(model)}

    def around(self, tensor: NamedTensor, group: Candidate) -> Iterator[Candidate]:
        """Modules between a group and one of its parameters, the outermost first; none if several modules hold it.

        The outermost runs whenever the parameter is used, also by code that reads the parameter without calling its
        module (``F.conv1d(x, self.conv.weight)``). If several paths lead to the module that holds the parameter, only
        that module is sure to run.
        """
        if len(tensor.owners) > 1:
            return
        parts = self._paths[id(tensor.owners[0][0])][len(group.path) :].strip(".").split(".")
        for end in range(1 if len(tensor.names) == 1 else len(parts), len(parts) + 1):
            path = ".".join(parts[:end])
            module = group.module.get_submodule(path)
            # Containers are often iterated, not called.
            if id(module) not in self._unfit and can_be_group(module) and not isinstance(module, _CONTAINERS):
                yield Candidate(module, f"{group.path}.{path}".strip("."), "dtype")


# ----------------------------------------------------------------------------------------------------
# Decides which modules of a model become FSDP2 groups, with which parameters. Pure: no mesh, no payload.


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
            f"Names are module paths without wrapper prefixes, e.g. {tensors[0].name if tensors else ''!r}."
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


# ----------------------------------------------------------------------------------------------------
# Applies FSDP2 to a model: refuses models that can't be wrapped, then wraps the groups that :mod:`.groups` finds.

# The function that shards a second model alike. Keyed by the model object, not stored on it.
_SHARDED: weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], object]] = weakref.WeakKeyDictionary()
#: Where the parameters are that the sharding left plain: a load may exchange the objects.
_PLAIN: weakref.WeakKeyDictionary[nn.Module, list[tuple[weakref.ref[nn.Module], str]]] = (
    weakref.WeakKeyDictionary()
)

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
      ranks. Every backward pass must go through the model's forward: if it only reaches such a parameter from outside, nothing is reduced.

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
    _PLAIN[model] = [
        (weakref.ref(module), name)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if not isinstance(p, DTensor)
    ]


def shard_added(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Shard the modules that were added to a model since it was sharded, such as those of PEFT's adapters, like the modules around them.

    All ranks get the values that the first rank of the mesh has. Returns the new parameters, by those that they replace; empty if
    :func:`remember_sharding` doesn't know the model. Every rank of the mesh must call it.

    Raises :class:`ShardError` if the model was called already, for adapters that PEFT made for a shard, and for added parameters that FSDP2
    can't shard.
    """
    around = {path: m for path, m in model.named_modules() if isinstance(m, FSDPModule) and fsdp_groups(m)}
    sharded = next((module for module in model.modules() if module in _PLAIN), None)  # inside a PeftModel
    if sharded is None or not around:
        return {}
    plain = {id(getattr(module(), name, None)) for module, name in _PLAIN[sharded]}
    known = plain | fsdp_parameter_ids(around.values())
    if all(id(p) in known for p in model.parameters()):
        return {}
    if sharded is not model:
        raise ShardError(
            f"the {type(model).__name__} was wrapped around a sharded model, and FSDP2 can't shard what it added. Load the model with adapter=, or call "
            "its add_adapter"
        )
    if any(map(has_run, around.values())):
        raise ShardError(
            "modules were added to a sharded model after its first forward pass, and FSDP2 can't shard them then. Add them before it, or load "
            "the model with adapter="
        )
    if cut := cut_adapter(model):
        require("added-adapters", where=cut)
        raise ShardError(
            f"{cut}: PEFT gave the adapters the sizes of this rank's shard, because the mesh has named axes other than 'fsdp'. Load the model "
            "with adapter="
        )
    outer: dict[tuple[str, str], list[nn.Module]] = {}
    taken: set[int] = set()
    before: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        own = list(module.parameters())
        if id(module) in taken or not can_be_group(module) or any(id(p) in known for p in own):
            continue
        taken |= {id(m) for m in module.modules()}
        before |= {t.tensor: t.owners[0] for t in named_tensors(module) if isinstance(t.tensor, nn.Parameter)}
        names = path.split(".")
        outside = (p for k in range(len(names), -1, -1) if (p := ".".join(names[:k])) in around)
        place = next(outside, next(iter(around)))  # the root may have no parameters of its own
        outer.setdefault((place, names[-1]), []).append(module)
    left = [name for name, p in model.named_parameters() if id(p) not in known and p not in before]
    odd = [name for name, p in model.named_parameters() if p in before and isinstance(p, DTensor)]
    if left or odd:
        raise ShardError(
            f"parameters were added to a sharded model that FSDP2 can't shard now: {', '.join([*left, *odd][:8])}. Load the model with adapter="
        )
    with torch.no_grad():
        for (place, _), modules in outer.items():
            settings = settings_of(around[place])
            for parameter in dict.fromkeys(p for m in modules for p in m.parameters()):
                _same_everywhere(parameter, settings["mesh"])
            fully_shard(modules, **settings)
    return {p: getattr(module, name) for p, (module, name) in before.items()}


def _same_everywhere(parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    """Give all ranks of a mesh the first one's values."""
    parameter.data = parameter.data.to(mesh_device(mesh)).contiguous()
    for group in reversed(mesh.get_all_groups()):
        dist.broadcast(parameter.data, dist.get_global_rank(group, 0), group)


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
