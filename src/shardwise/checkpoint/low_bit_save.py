"""Saves optimizer states of few bits: as plain tensors spread like their parameter, or else by rank; and their document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import xxhash

from ..errors import StateError
from ..format.states import StateKey
from ..internals.torchao import may_keep_low_bits
from ..layout.model import local_tensor
from ..layout.placements import Geometry
from ..ranks.ranks import Ranks
from ..state.low_bit import Form, books_of, form_of, part_name, parts_by_rank, parts_of
from ..state.optimizer import AgreedForm, Drained
from ..state.train_state import TrainState

__all__ = ["agree_on_forms", "low_bit_document", "split_low_bit"]


def agree_on_forms(state: TrainState, ranks: Ranks) -> dict[int, dict[str, AgreedForm]]:
    """By id of a parameter and state: the form of states that some ranks hold in few bits. Collective.

    Empty if all ranks hold the same: then each knows it from its own. torchao keeps short shards, and empty ones, as plain
    tensors, so a rank alone can't tell. One small round, two if they differ; none with other optimizers. Raises
    :class:`StateError` on every rank for a state with two forms.
    """
    if ranks.world_size == 1 or not any(map(may_keep_low_bits, state.optimizers.values())):
        return {}
    held = {name: (parameter, key, value) for name, parameter, key, value in _states(state)}
    forms: dict[str, dict[str, Any] | None] = {}

    def summary() -> str:
        for name, (parameter, _, value) in held.items():
            form = form_of(value)
            if local_tensor(parameter).numel():
                forms[name] = None if form is None else form.to_json()
        return xxhash.xxh3_128_hexdigest(json.dumps(forms).encode())

    if ranks.combine("compare states of few bits", summary, lambda each: len(set(each)) == 1):
        return {}
    found = ranks.reduce("compare each state of few bits", lambda: _forms_of(forms), _merged, _of_few_bits)
    if two := [name for name, (each, _) in found.items() if len(each) > 1]:
        texts = " and ".join(Form(**form).text for form in found[two[0]][0])
        raise StateError(
            f"{two[0]} is {texts} on different ranks; expected one form. Make the optimizer with the same options on every rank"
        )
    agreed: dict[int, dict[str, AgreedForm]] = {}
    for name in held.keys() & found.keys():
        (parameter, key, _), ((form,), is_mixed) = held[name], found[name]
        agreed.setdefault(id(parameter), {})[key] = AgreedForm(Form(**form), is_mixed)
    return agreed


def _states(state: TrainState) -> Iterator[tuple[str, torch.Tensor, str, torch.Tensor]]:
    """The tensors that optimizers keep for their parameters, named by place: names of parameters cost a walk."""
    for name, optimizer in state.optimizers.items():
        for g, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.dim() and isinstance(key, str):
                        yield f"optimizer {name}, group {g}, parameter {k}, {key}", parameter, key, value


def _forms_of(held: Mapping[str, dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Of each state of this rank: its forms of few bits, and whether it is plain."""
    return {name: [[] if form is None else [form], form is None] for name, form in held.items()}


def _merged(of_ranks: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """:func:`_forms_of` of several ranks as one; two forms of a state suffice, the same two in any order of ranks."""
    found: dict[str, list[Any]] = {}
    for states in of_ranks:
        for name, (forms, is_plain) in states.items():
            before, was_plain = found.get(name, ([], False))
            every = sorted([*before, *(f for f in forms if f not in before)], key=json.dumps)
            found[name] = [every[:2], was_plain or is_plain]
    return found


def _of_few_bits(found: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The states that are of few bits on any rank."""
    return {name: [forms, is_plain] for name, (forms, is_plain) in found.items() if forms}


def split_low_bit(drained: Drained, geometries: Mapping[str, Geometry]) -> None:
    """Make ``tensors`` of the states of few bits; where a cut lies inside a block, or a rank keeps a plain shard, ``opaque`` ones."""
    for name, states in drained.low_bit.items():
        for key, state in states.items():
            grid = state.form.grid(state.parameter.shape)
            if state.by_rank or grid is None or not grid.falls_on(geometries[name]):
                states[key] = replace(state, by_rank=True)
                into, parts = drained.opaque, parts_by_rank(state.value)
            else:
                into, parts = drained.tensors, parts_of(state.value, state.parameter, state.form, grid)
            of_one = into.setdefault(name, {})
            for part, tensor in parts.items():
                stored = part_name(key, part)
                if stored in of_one:
                    raise StateError(
                        f"the optimizer has a state {StateKey(name, stored).name}, under which a part of the state {key} is "
                        f"stored; give the state another name"
                    )
                of_one[stored] = tensor


def low_bit_document(drained: Drained) -> dict[str, Any]:
    """The document that says what the stored parts are: code books, and the form of each state."""
    every = {StateKey(n, s).name: state for n, of in drained.low_bit.items() for s, state in of.items()}

    def forms(by_rank: bool) -> dict[str, dict[str, Any]]:
        found = {
            n: {s: state.form.to_json() for s, state in of.items() if state.by_rank is by_rank}
            for n, of in drained.low_bit.items()
        }
        return {n: of for n, of in found.items() if of}

    books = books_of({n: (state.value, state.form) for n, state in every.items()})
    return {"books": books, "states": forms(False), "by_rank": forms(True)}
