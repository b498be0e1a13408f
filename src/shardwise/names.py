"""Names: a tensor's module path without the parts that wrappers put into it.

Load, save, digest and optimizer all use this name, with any of ``torch.compile``, activation checkpointing, DDP and
FSDP1, applied in any order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import nn

from .errors import LayoutError
from .objects import frozen

# torch.compile; torch's activation checkpointing; FSDP1; DDP, DataParallel and most third-party wrappers.
_WRAPPER_PARTS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"))


def canonical_name(path: str) -> str:
    """``path`` without wrapper components, wherever they stand in it.

    >>> canonical_name("_orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight")
    'layers.0.mlp.weight'
    """
    if "module" not in path and "_orig_mod" not in path:  # every part of a wrapper has one of these
        return path
    return ".".join(part for part in path.split(".") if part not in _WRAPPER_PARTS)


def without_wrappers(path: str) -> str:
    """``path`` without wrapper components, but with ``module``, which may be a real attribute."""
    own = _WRAPPER_PARTS - {"module"}
    return ".".join(part for part in path.split(".") if part not in own)


def without_numbers(name: str) -> str:
    """A name with ``#`` for each part that is a number: that of all layers, or all experts."""
    return ".".join(["#" if part.isdecimal() else part for part in name.split(".")])


def merged_order(lists: Sequence[Sequence[str]]) -> list[str]:
    """All names in one order that keeps that of each list, as far as they agree; then names that differ only in numbers are in the order of these.

    Stages in any order, and experts of any ranks, give the order of the whole model.
    """
    order: list[str] = []
    for names in lists:
        waiting: list[str] = []
        known = {name: place for place, name in enumerate(order)}
        before: dict[int, list[str]] = {}
        for name in names:
            if name not in known:
                waiting.append(name)
            elif waiting:
                before.setdefault(known[name], []).extend(waiting)
                waiting = []
        order = [n for place, name in enumerate(order) for n in (*before.get(place, ()), name)] + waiting
    alike: dict[str, list[str]] = defaultdict(list)
    for name in order:
        alike[without_numbers(name)].append(name)
    sorted_names = {key: iter(sorted(names, key=_numbers_in)) for key, names in alike.items()}
    return [next(sorted_names[without_numbers(name)]) for name in order]


def _numbers_in(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"(?:^|(?<=\.))\d+(?=\.|$)", name)]


def patterns_of(option: str, given: Collection[str]) -> tuple[str, ...]:
    """The ``fnmatch`` patterns that a caller gave for ``option``. Rank-local.

    Raises :class:`TypeError` for a single string, and for anything that is not a collection of strings.
    """
    if isinstance(given, str):
        raise TypeError(
            f"{option} is the string {given!r}; expected a tuple of patterns: {option}=({given!r},)"
        )
    if isinstance(given, bytes | Mapping) or not isinstance(given, Collection):
        raise TypeError(
            f"{option} is a {type(given).__name__}; expected a tuple of patterns: {option}=('head.*',)"
        )
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"{option} holds {pattern!r}; expected patterns, which are strings")
    return tuple(given)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside wrappers around the root (``torch.compile``, DDP, …), which has the class, config and origin.

    A wrapper holds one module under a wrapper's name and no tensor of its own. Names and tensors are the same with
    and without it. Look for shards in the module that the caller gave: FSDP2 may have been applied to the wrapper.
    """
    while len(model._modules) == 1 and not model._parameters and not model._buffers:
        ((part, inner),) = model._modules.items()
        if part not in _WRAPPER_PARTS or inner is None:
            break
        model = inner
    return model


class Named(Protocol):
    """What has names: a tensor of a live model, or of a stored one."""

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical name, then those of ties."""


@frozen(kw_only=True, eq=False)
class NamedTensor:
    """One distinct parameter or buffer object of a model, with every place that holds it."""

    name: str
    """Canonical name; for a shared tensor, the first one in module order."""
    aliases: tuple[str, ...]
    """The other canonical names of a shared tensor, in module order; empty if it is not shared."""
    kind: Literal["parameter", "buffer", "state"]
    """How its first owner registered it; ``state``: an optimizer's state of a parameter, which no module owns."""
    persistent: bool
    """Whether ``state_dict`` has it under at least one of its names; always so for a parameter."""
    tensor: torch.Tensor
    """The live object (a DTensor once it is sharded), not a copy."""
    owners: tuple[tuple[nn.Module, str], ...]
    """The distinct (module, attribute) pairs that hold it, in module order."""

    @property
    def names(self) -> tuple[str, ...]:
        """``name`` and ``aliases``."""
        return (self.name, *self.aliases)

    def refreshed(self) -> NamedTensor:
        """The same entry with the object that its owner holds now: a meta tensor may be replaced when it gets memory."""
        if not self.owners:
            return self
        module, attribute = self.owners[0]
        held: torch.Tensor | None = module._parameters.get(attribute)
        held = module._buffers.get(attribute) if held is None else held
        assert held is not None, f"{self.name} is gone"
        return self if held is self.tensor else replace(self, tensor=held)


class _Entry:
    """The names and owners found so far for one tensor object."""

    __slots__ = ("kind", "names", "owners", "persistent", "tensor")

    def __init__(self, tensor: torch.Tensor, kind: Literal["parameter", "buffer"]) -> None:
        self.tensor = tensor
        self.kind = kind
        self.names: list[str] = []
        self.owners: list[tuple[nn.Module, str]] = []
        self.persistent = False


def named_tensors(model: nn.Module) -> tuple[NamedTensor, ...]:
    """Every distinct parameter and buffer of ``model``, in module order, parameters before buffers in each.

    Reads structure only: no payload, no collectives, works on meta and on sharded models.

    Raises:
        LayoutError: two different tensors have one canonical name; names all such cases.
    """
    return tensors_of(tuple(modules_by_path(model)))


def tensors_of(modules: Sequence[tuple[str, nn.Module]]) -> tuple[NamedTensor, ...]:
    """:func:`named_tensors` of a model whose tree was walked already; ``modules`` as :func:`modules_by_path` gives them."""
    entries: dict[int, _Entry] = {}
    of_name: dict[str, _Entry] = {}
    clashes: set[str] = set()
    for path, module in modules:
        if not module._parameters and not module._buffers:
            continue
        for attribute, tensor, kind, persistent in own_tensors(module):
            entry = entries.get(id(tensor))
            if entry is None:
                entry = entries[id(tensor)] = _Entry(tensor, kind)
            name = canonical_name(f"{path}.{attribute}" if path else attribute)
            if of_name.setdefault(name, entry) is not entry:
                clashes.add(name)
            if name not in entry.names:
                entry.names.append(name)
            # A module may stand at two places; its class may say itself which others are equal.
            if not entry.owners or not any(m is module and a == attribute for m, a in entry.owners):
                entry.owners.append((module, attribute))
            entry.persistent |= persistent
    if clashes:
        _refuse_collisions(clashes, modules)
    return tuple(
        NamedTensor(
            name=(names := tuple(entry.names))[0],
            aliases=names[1:],
            kind=entry.kind,
            persistent=entry.persistent,
            tensor=entry.tensor,
            owners=tuple(entry.owners),
        )
        for entry in entries.values()
    )


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module's own submodules by attribute, a second time where they stand twice; ``named_children`` leaves that out."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def own_parameter(module: nn.Module, attribute: str) -> nn.Parameter | None:
    """The parameter that a module registered under that name; None if it has none."""
    return module._parameters.get(attribute)


def exchange_parameter(module: nn.Module, attribute: str, parameter: nn.Parameter | None) -> None:
    """Put another parameter where a module has registered one, and nothing else.

    Setting the attribute of an ``nn.LSTM`` also writes to a list, which a copy of the module shares with it.
    """
    module._parameters[attribute] = parameter


def put_buffer(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a buffer into a module, under any name: ``register_buffer`` refuses those of attributes. Makes the modules on the way."""
    *parents, attribute = name.split(".")
    module = root
    for parent in parents:
        module = module._modules.setdefault(parent, nn.Module()) or module
    module._buffers[attribute] = tensor


def modules_by_path(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules(remove_duplicate=False)`` without its generator for each level of depth."""
    stack = [("", model)]
    while stack:
        path, module = stack.pop()
        yield path, module
        if module._modules:  # most modules have none
            stack += reversed([(f"{path}.{n}" if path else n, child) for n, child in children(module)])


def modules_once(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules()`` without its generator for each level of depth: each module at its first path."""
    seen: set[int] = set()
    for path, module in modules_by_path(model):
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


def own_tensors(
    module: nn.Module,
) -> Iterator[tuple[str, torch.Tensor, Literal["parameter", "buffer"], bool]]:
    """A module's own parameters and buffers: attribute, tensor, kind, and whether ``state_dict`` has it."""
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield attribute, parameter, "parameter", True
    for attribute, buffer in module._buffers.items():
        if buffer is not None:
            yield attribute, buffer, "buffer", attribute not in module._non_persistent_buffers_set


def _refuse_collisions(names: Set[str], modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise for ``names`` that several tensors have."""
    held: dict[str, list[str]] = {}
    for path, module in modules:
        for attribute, *_ in own_tensors(module):
            full_path = f"{path}.{attribute}" if path else attribute
            if (name := canonical_name(full_path)) in names:
                held.setdefault(name, []).append(full_path)
    lines = [f"  - {name}: held at {', '.join(paths)}" for name, paths in held.items()]
    raise LayoutError(
        "multiple tensors have the same name after wrapper prefixes "
        f"({', '.join(sorted(_WRAPPER_PARTS))}) are stripped:\n"
        + "\n".join(lines)
        + "\nRename one of the attributes, or unwrap the model before passing it on."
    )
