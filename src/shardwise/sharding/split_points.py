"""Finds the modules of a model that could be FSDP2 groups. Pure: no mesh, no payload, no collectives."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from torch import nn

from ..errors import ShardError
from ..internals.peft import adapted_modules, is_adapted
from ..internals.torch import original_class
from ..internals.transformers import blocks_not_to_split
from ..names import NamedTensor, children
from ..objects import frozen

__all__ = ["Candidate", "GroupKind", "SplitPoints", "can_be_group", "find_candidates"]

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
