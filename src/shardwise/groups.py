"""Which modules of a model become FSDP2 groups. Pure: no mesh, no payload, no collectives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.nn.parameter import is_lazy

from ._compat import original_class
from .errors import ShardError
from .names import NamedTensor, canonical_name, named_tensors

__all__ = [
    "Candidate",
    "Group",
    "ShardPolicy",
    "Wrapping",
    "describe_groups",
    "find_wrapping",
    "largest_group",
]

GroupKind = Literal["block", "experts", "embedding", "head", "dtype", "root"]

_EXPERTS_CLASS = re.compile(r"Experts$")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPolicy:
    """How :func:`shard` cuts a model into FSDP2 groups."""

    block_classes: tuple[str, ...] | None = None
    """Class names to wrap, every occurrence; None: repeated children of containers, and the model's
    ``_no_split_modules``. Experts, embeddings, head and root are groups either way."""
    mixed_precision: MixedPrecisionPolicy | None = None
    """Compute and reduce dtypes, as for ``fully_shard``; None: as stored."""
    reshard_after_forward: bool | int | None = None
    """As for ``fully_shard``; None: free gathered parameters after forward everywhere but at the root."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory; pinned if an accelerator is there."""
    placement: Callable[[nn.Parameter], Shard | None] | None = None
    """The dim to cut for a parameter; None or a None result: dim 0. Other dims must divide evenly."""
    ignored: tuple[str, ...] = ()
    """Patterns (fnmatch) of parameter names that nobody shards: plain, whole on every rank, their gradients
    for the caller to reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What FSDP2 gathers at a time: a module's parameters without those of groups inside it."""

    name: str
    """Canonical module name; empty for the root."""
    kind: GroupKind
    """Why the module is a group of its own."""
    parameter_count: int
    """Elements, over all ranks."""
    stored_bytes: int
    """Bytes in the dtype of the parameters, over all ranks."""
    gathered_bytes: int
    """Bytes on each rank while the group is gathered, in the compute dtype."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A module that could be a group, its path in the model, and why."""

    module: nn.Module
    path: str
    kind: GroupKind


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Groups bottom-up, the root last, with their own parameters; and the parameters that nobody shards."""

    groups: tuple[tuple[Candidate, tuple[nn.Parameter, ...]], ...]
    ignored: frozenset[nn.Parameter]


def describe_groups(model: nn.Module, policy: ShardPolicy = ShardPolicy()) -> tuple[Group, ...]:
    """The groups that :func:`shard` makes of ``model``, bottom-up, the root last. Pure: no mesh, no payload.

    Works on meta, real and already sharded models. Raises :class:`ShardError` for names that match nothing.
    """
    wrapping = find_wrapping(model, policy)
    compute = policy.mixed_precision.param_dtype if policy.mixed_precision is not None else None
    return tuple(
        Group(
            name=canonical_name(candidate.path),
            kind=candidate.kind,
            parameter_count=sum(p.numel() for p in parameters),
            stored_bytes=sum(p.numel() * p.dtype.itemsize for p in parameters),
            gathered_bytes=sum(p.numel() * _compute_dtype(p, compute).itemsize for p in parameters),
        )
        for candidate, parameters in wrapping.groups
    )


def largest_group(groups: tuple[Group, ...]) -> Group:
    """The group that takes the most memory while it is gathered; the first one of equals."""
    return max(groups, key=lambda group: group.gathered_bytes)


def _compute_dtype(parameter: nn.Parameter, compute: torch.dtype | None) -> torch.dtype:
    # FSDP2 casts floating parameters only.
    return compute if compute is not None and parameter.dtype.is_floating_point else parameter.dtype


# ----------------------------------------------------------------------------------------------------
# Which modules


def find_wrapping(model: nn.Module, policy: ShardPolicy) -> Wrapping:
    """What :func:`shard` wraps and what it leaves plain. Every parameter that is not ignored has one group."""
    tensors = [t for t in named_tensors(model) if t.kind == "parameter"]
    lazy = [t.name for t in tensors if is_lazy(t.tensor)]
    if lazy:
        raise ShardError(
            f"parameters without a shape yet: {', '.join(lazy)}. Run the model once before this."
        )
    # torch 2.13 shards neither: of 0-d ones it says so, of empty ones only in the first backward.
    unfit = frozenset(parameter_of(t) for t in tensors if t.tensor.ndim == 0 or not t.tensor.numel())
    ignored = unfit | named_by(tensors, policy)
    candidates, owners, depth = _without_conflicts(model, _candidates(model, policy))
    odd = _of_another_dtype(model, [t for t in tensors if parameter_of(t) not in ignored], owners)
    if odd:
        candidates, owners, depth = _without_conflicts(model, odd | candidates)
    own: dict[int, list[nn.Parameter]] = {key: [] for key in candidates}
    for tensor in tensors:
        parameter = parameter_of(tensor)
        if parameter not in ignored:
            own[next(iter(owners[id(parameter)]))].append(parameter)
    # The root is a group even if all its parameters lie in others: it starts FSDP2's iteration.
    kept = [key for key in candidates if own[key] or key == id(model)]
    kept.sort(key=lambda key: -depth[key])  # stable: module order among modules of one depth
    return Wrapping(tuple((candidates[key], tuple(own[key])) for key in kept), ignored)


def _without_conflicts(
    model: nn.Module, candidates: dict[int, Candidate]
) -> tuple[dict[int, Candidate], dict[int, set[int]], dict[int, int]]:
    """The candidates that leave every parameter one owner; with the owners, and each candidate's depth."""
    while True:
        owners, depth = _owners(model, candidates)
        dropped = _conflicting(owners, depth)
        if not dropped:
            return candidates, owners, depth
        candidates = {key: c for key, c in candidates.items() if key not in dropped}


def parameter_of(tensor: NamedTensor) -> nn.Parameter:
    """The tensor of an entry of kind ``parameter``."""
    assert isinstance(tensor.tensor, nn.Parameter)
    return tensor.tensor


def named_by(tensors: list[NamedTensor], policy: ShardPolicy) -> frozenset[nn.Parameter]:
    """Parameters that the ``ignored`` patterns name."""
    found: set[nn.Parameter] = set()
    without_match = []
    for pattern in policy.ignored:
        matched = {parameter_of(t) for t in tensors if any(fnmatchcase(name, pattern) for name in t.names)}
        found |= matched
        if not matched:
            without_match.append(pattern)
    if without_match:
        raise ShardError(
            f"ShardPolicy(ignored=…) matches no parameter: {', '.join(map(repr, without_match))}. "
            f"Names are module paths without wrapper parts, e.g. {tensors[0].name if tensors else ''!r}."
        )
    return frozenset(found)


def _candidates(model: nn.Module, policy: ShardPolicy) -> dict[int, Candidate]:
    """Modules that should be groups, by id, in module order; the first reason found for a module counts."""
    reasons: dict[int, GroupKind] = {id(model): "root"}
    blocks = _blocks(model) if policy.block_classes is None else _blocks_by_name(model, policy.block_classes)
    for module in blocks:
        reasons.setdefault(id(module), "block")
    for module in _experts(model, set(reasons)):
        reasons.setdefault(id(module), "experts")
    for module, kind in _embeddings_and_head(model):
        reasons.setdefault(id(module), kind)
    return {
        id(module): Candidate(module, path, reasons[id(module)])
        for path, module in model.named_modules()
        if id(module) in reasons and (module is model or can_be_group(module))
    }


def can_be_group(module: nn.Module) -> bool:
    """Has parameters, and a forward for FSDP2 to hook into."""
    if next(module.parameters(), None) is None:
        return False
    is_bare_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not (is_bare_container and original_class(module).forward is nn.Module.forward)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks, then ``_no_split_modules`` that neither lie in one nor hold one."""
    repeated: list[nn.Module] = []
    _collect_repeated(model, "", repeated, set())
    names = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
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
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    classes = [original_class(child) for _, child in children if next(child.parameters(), None) is not None]
    repeats = is_container and len(classes) > len(set(classes))
    for name, child in children:
        if repeats and can_be_group(child):
            found.append(child)
        elif not _holds_experts(child, name):
            _collect_repeated(child, name, found, seen)


def _holds_experts(module: nn.Module, attribute: str) -> bool:
    return attribute == "experts" or _EXPERTS_CLASS.search(original_class(module).__name__) is not None


def _blocks_by_name(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
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

    Never a single expert of a list: it runs only on the ranks whose tokens reach it, and FSDP2's collective
    would wait for the others.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside:
            continue
        listed = module._modules.get("experts")
        is_owner = (
            listed is not None and not can_be_group(listed) and next(listed.parameters(), None) is not None
        )
        is_named = _EXPERTS_CLASS.search(original_class(module).__name__) is not None
        if (is_named or is_owner) and id(module) not in taken and can_be_group(module):
            found.append(module)
            inside |= {id(m) for m in module.modules()}
    return found


def _embeddings_and_head(model: nn.Module) -> Iterator[tuple[nn.Module, GroupKind]]:
    """What the outermost modules that can be asked call their input embeddings and their head."""
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
    # Models without embeddings or a head raise here, with whatever their author chose; it only means "none".
    try:
        return getattr(module, method)()
    except Exception:
        return None


def _of_another_dtype(
    model: nn.Module, tensors: list[NamedTensor], owners: dict[int, set[int]]
) -> dict[int, Candidate]:
    """Modules whose trainable parameters have another dtype than most of the group around them.

    FSDP2 refuses, at the first forward, a group whose trainable parameters have several dtypes (torch 2.13);
    models have them where a class keeps some layers in fp32, as T5 its ``wo``. A module that holds such a
    parameter itself, beside layers of the usual dtype (DeepSeek-V4's ``sinks``), keeps only that one: the
    layers become groups too.
    """
    groups: dict[int, dict[torch.dtype, list[NamedTensor]]] = {}
    for tensor in tensors:
        if tensor.tensor.requires_grad:
            (owner,) = owners[id(tensor.tensor)]
            groups.setdefault(owner, {}).setdefault(tensor.tensor.dtype, []).append(tensor)
    taken = {id(t.tensor) for t in tensors}
    paths = {id(m): path for path, m in model.named_modules()}
    never = {id(model)} | _listed_experts(model)
    found: dict[int, Candidate] = {}
    for by_dtype in groups.values():
        usual = max(by_dtype, key=lambda dtype: sum(t.tensor.numel() for t in by_dtype[dtype]))
        for module, _ in (o for d, odd in by_dtype.items() if d != usual for t in odd for o in t.owners):
            if id(module) in never or not can_be_group(module):
                continue
            own = {p.dtype for p in module.parameters() if p.requires_grad and id(p) in taken}
            direct = {p.dtype for p in module.parameters(recurse=False) if p.requires_grad and id(p) in taken}
            inside = () if len(own) == 1 else tuple(_groups_inside(module))
            if len(direct) == 1 and not any(id(m) in never for m in inside):
                found |= {id(m): Candidate(m, paths[id(m)], "dtype") for m in (module, *inside)}
    return found


def _groups_inside(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules inside ``module`` that can be groups and hold all that is not its own."""
    for child in module.children():
        if can_be_group(child):
            yield child
        else:
            yield from _groups_inside(child)


def _listed_experts(model: nn.Module) -> set[int]:
    """Everything inside lists of experts, by id: it does not run on every rank."""
    return {
        id(m)
        for module in model.modules()
        for name, child in module._modules.items()
        if child is not None and _holds_experts(child, name)
        for m in child.modules()
        if m is not child
    }


# ----------------------------------------------------------------------------------------------------
# Ties: every parameter gets one owner


def _owners(model: nn.Module, candidates: dict[int, Candidate]) -> tuple[dict[int, set[int]], dict[int, int]]:
    """For every parameter (by id) the candidates that would manage it, and for every candidate its depth."""
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
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(owner)
        for child in module._modules.values():
            if child is not None:
                visit(child, owner)

    visit(model, id(model))
    return owners, depth


def _conflicting(owners: dict[int, set[int]], depth: dict[int, int]) -> set[int]:
    """Candidates to drop: of every parameter with several owners the deepest ones.

    Deepest first, so that a tie inside one block costs the inner group only; embedding and head go together.
    """
    dropped: set[int] = set()
    for holders in owners.values():
        if len(holders) > 1:
            deepest = max(depth[h] for h in holders)
            dropped |= {h for h in holders if depth[h] == deepest}
    return dropped
