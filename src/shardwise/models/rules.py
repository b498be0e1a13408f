"""The model's own rules for initial values, found by watching them write on meta.

A rule is a call: a module's ``reset_parameters()``, or ``_init_weights(module)`` of the nearest model around it
that has one. Names do not tell which parameters a call writes. So all calls run once on an unsharded meta copy of the
model, in the order of ordinary construction, under a dispatch mode that records every write. This also finds GPT-2's
scaling of ``c_proj``, which happens in the call for the *whole model*.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..internals.torch import (
    TorchDispatchMode,
    meta_tree,
    original_class,
    reset_methods,
    storage_key,
    written_tensors,
)
from ..internals.transformers import initializer_of
from ..names import exchange_parameter
from ..objects import frozen
from .meta_init import meta_init

__all__ = ["Rule", "Template", "build_template", "copy_template", "rules_of", "run_rules"]

# Operations that set every element without reading it: earlier writes no longer matter.
_OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in (
        "bernoulli",
        "copy",
        "exponential",
        "fill",
        "geometric",
        "normal",
        "random",
        "uniform",
        "zero",
    )
)


@frozen
class Template:
    """An unsharded meta copy of a model (or of a part of it), on which rules can run."""

    root: nn.Module
    path: str
    """Its path in the live model, as in ``named_modules``."""


@dataclass(eq=False, slots=True)
class Rule:
    """One call, and its writes to each parameter of the template, by id."""

    module: nn.Module
    call: Callable[[], object]
    written: dict[int, int] = field(default_factory=dict)
    """Elements written, counting repeats."""
    overwrites: set[int] = field(default_factory=set)
    """Parameters of which it first sets every element."""
    failure: str | None = None


def build_template(live: nn.Module, path: str) -> Template:
    """A fresh transformers model of the original class, from the live one's config, without wrappers."""
    with meta_init():
        root: nn.Module = original_class(live)(copy.deepcopy(live.config))
    _untie(root)
    return Template(root, path)


def copy_template(live: nn.Module) -> Template:
    """A copy of any module's tree, with the original classes and without hooks."""
    root = meta_tree(live)
    _untie(root)
    return Template(root, "")


def _untie(root: nn.Module) -> None:
    """Give every slot its own parameter: construction ties parameters only after each module was initialized."""
    seen: set[int] = set()
    for module in root.modules():
        for attribute, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(parameter) in seen:
                parameter = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
                exchange_parameter(module, attribute, parameter)
            seen.add(id(parameter))


def rules_of(template: Template, calls: Iterable[Rule] | None = None) -> list[Rule]:
    """Every call that ordinary construction makes, in its order, with its writes. Draws no random numbers.

    ``calls``: calls to watch instead.
    """
    recorder = _Recorder(p for p in template.root.parameters() if p.is_meta)
    rules = [*_resets(template.root), *_init_weights(template.root)] if calls is None else [*calls]
    for rule in rules:
        recorder.watch(rule)
    return rules


def run_rules(rules: Iterable[Rule], parameters: Collection[torch.Tensor]) -> bool:
    """Run calls on parameters with memory. Returns whether they wrote to all of these."""
    recorder, written = _Recorder(parameters), set[int]()
    for rule in rules:
        run = Rule(rule.module, rule.call)
        recorder.call(run)
        written |= run.written.keys()
    return all(id(p) in written for p in parameters if p.numel())


def _resets(root: nn.Module) -> Iterator[Rule]:
    for module, _ in _children_first(root, None, set()):
        method = next(filter(_takes, reset_methods(module)), None)
        if method is not None:
            yield Rule(module, method)


def _init_weights(root: nn.Module) -> Iterator[Rule]:
    for module, giver in _children_first(root, None, set()):
        if giver is not None:
            yield Rule(module, partial(giver, module))


def _children_first(
    module: nn.Module, giver: Callable[[nn.Module], Any] | None, seen: set[int]
) -> Iterator[tuple[nn.Module, Callable[[nn.Module], Any] | None]]:
    """Every module once, children before parents, with the ``_init_weights`` of the nearest module around it that has one."""
    if id(module) in seen:
        return
    seen.add(id(module))
    method = initializer_of(module)
    if method is not None and _takes(method, module):
        giver = method
    for child in module.children():
        yield from _children_first(child, giver, seen)
    yield module, giver


def _takes(method: Callable[..., object], *arguments: object) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


class _Recorder(TorchDispatchMode):
    """Notes, for one call at a time, the parameters whose storages it writes, through any view."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_storage = {storage_key(p): p for p in parameters}
        self._rule: Rule | None = None

    def call(self, rule: Rule) -> None:
        self._rule = rule
        with self, torch.no_grad():
            rule.call()

    def watch(self, rule: Rule) -> None:
        try:
            self.call(rule)
        except Exception as error:
            rule.failure = f"{type(error).__name__}: {error}".splitlines()[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            self._note(tensor, func.name().partition(".")[0])
        return func(*args, **kwargs)

    def _note(self, tensor: torch.Tensor, operation: str) -> None:
        parameter = self._by_storage.get(storage_key(tensor))
        if parameter is None or self._rule is None:
            return
        key, written = id(parameter), self._rule.written
        if key not in written and operation in _OVERWRITES and tensor.numel() == parameter.numel():
            self._rule.overwrites.add(key)
        written[key] = written.get(key, 0) + tensor.numel()
