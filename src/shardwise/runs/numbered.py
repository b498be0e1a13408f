"""Which parameter has which number in a stored optimizer, as the model and the usual ways to build an optimizer say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from .third_party import StoredOptimizer

__all__ = ["members_of"]


def members_of(
    stored: StoredOptimizer, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[list[str]], str] | None:
    """The parameters' names in the groups of a numbered optimizer, and the rule by which they were found; None if no rule fits.

    A rule fits if its groups have the sizes of the stored ones, and each parameter the shape of its state. ``model``: on meta;
    ``shapes``: of its parameters as they are stored.
    """
    numbers = [[str(n) for n in group["params"]] for group in stored.groups or ()]
    of_states: dict[str, list[tuple[int, ...]]] = {}
    for short, key in stored.keys.items():
        of_states.setdefault(key.parameter, []).append(tuple(stored.catalog.tensors[short].shape))
    for members, rule in _rules(model):
        if [len(names) for names in members] == [len(group) for group in numbers] and all(
            shape in ((), shapes.get(name))
            for group, names in zip(numbers, members, strict=True)
            for number, name in zip(group, names, strict=True)
            for shape in of_states.get(number, ())
        ):
            return members, rule
    return None


def _rules(model: nn.Module) -> Iterator[tuple[list[list[str]], str]]:
    names = [name for name, _ in model.named_parameters()]
    yield [names], "the order of model.parameters()"
    decayed = _decayed(model)
    yield (
        [[n for n in names if n in decayed], [n for n in names if n not in decayed]],
        "the HF Trainer's groups, with and without weight decay",
    )


def _decayed(model: nn.Module) -> Sequence[str]:
    """Names of the parameters that the HF Trainer's optimizer decays, by its own rule."""
    from transformers import Trainer

    rule: Any = Trainer.get_decay_parameter_names  # of the model alone
    found: list[str] = rule(None, model)
    return found
