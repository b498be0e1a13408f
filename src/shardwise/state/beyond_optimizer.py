"""Finds state of an optimizer beyond ``state`` and ``param_groups``.

``Optimizer.state_dict`` gives exactly these, unless a class overrides it, a hook changes it, or another optimizer
wraps this one. Only then each save calls the ``state_dict`` of the outermost optimizer, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ..digests.pending import partial_sums
from ..layout.model import local_tensor
from .beyond import (
    Beyond,
    Path,
    StoredOwn,
    differing_leaves,
    leaves_beyond,
    put_leaves,
    split_storable,
    with_leaves,
)
from .low_bit import contents_of
from .places import Places

__all__ = ["KeptOptimizer", "beyond_optimizer", "differences_of_optimizer", "give_back_to_optimizer"]

_SAVING = "state_dict", ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_LOADING = (
    "load_state_dict",
    ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)


def _differs_from_torch(optimizer: Optimizer, method: str, hooks: tuple[str, ...]) -> bool:
    return (
        getattr(type(optimizer), method) is not getattr(Optimizer, method)
        or method in vars(optimizer)
        or any(getattr(optimizer, hook, None) for hook in hooks)
    )


def _has_own_saving(outer: Optimizer, inner: Optimizer) -> bool:
    return outer is not inner or _differs_from_torch(inner, *_SAVING)


def beyond_optimizer(name: str, outer: Optimizer, inner: Optimizer) -> Beyond:
    """State that a checkpoint must hold besides ``state`` and ``param_groups`` of ``inner``. Rank-local.

    ``outer`` is the optimizer that the program steps: ``inner``, or its wrapper. Calls the ``state_dict`` of ``outer``
    if it may hold more than torch's.
    """
    if not _has_own_saving(outer, inner):
        return Beyond()
    try:
        leaves = _leaves(outer, inner)
    except Exception as error:
        why = f"{type(outer).__qualname__}.state_dict failed: {type(error).__name__}: {error}"
        return Beyond(not_stored={"": f"{name}: its own state is not known ({why})"})
    return split_storable(leaves, name)


def _leaves(outer: Optimizer, inner: Optimizer) -> list[tuple[Path, Any]]:
    own = outer.state_dict()
    if not isinstance(own, dict):
        raise TypeError(f"it gives a {type(own).__name__}, not a dict")
    known = {id(v) for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)}
    known |= {id(p) for group in inner.param_groups for p in group["params"]}
    return list(leaves_beyond(own, _plain(inner), known))


def _plain(optimizer: Optimizer) -> dict[str, Any]:
    """The result of ``Optimizer.state_dict`` without hooks: parameters by their number."""
    numbers: dict[int, int] = {}
    groups = []
    start = 0
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"], start):
            numbers.setdefault(id(parameter), number)
        groups.append(
            {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[id(p)] for p in group["params"]]}
        )  # fmt: skip
        start += len(group["params"])
    state = {numbers[id(k)]: v for k, v in optimizer.state.items() if id(k) in numbers}
    return {"state": state, "param_groups": groups}


def give_back_to_optimizer(own: StoredOwn, outer: Optimizer, inner: Optimizer, places: Places) -> list[str]:
    """Let ``outer`` take its stored state by its own ``load_state_dict``, beside the present state of ``inner``. Rank-local.

    Call it after restoring ``inner``. torch's own ``load_state_dict`` casts state and replaces groups, so both are put
    back afterwards. Tensors in ``own`` move to the devices of the live ones. Returns a line for each change that
    could not be undone, or for the failure.
    """
    if not (own.leaves or _differs_from_torch(inner, *_LOADING)):
        return []
    try:
        own.leaves[:] = put_leaves(own.leaves, dict(_leaves(outer, inner)), places)
        return _load(own, outer, inner)
    except Exception as error:
        return [f"{own.name}: its own load_state_dict failed ({type(error).__name__}: {error})"]


def differences_of_optimizer(own: StoredOwn, outer: Optimizer, inner: Optimizer) -> list[str]:
    """A line for each value in the optimizer's own state that differs from the stored one. Rank-local."""
    if not (own.leaves or _has_own_saving(outer, inner)):
        return []
    try:
        return list(differing_leaves(_leaves(outer, inner), own.leaves, own.not_stored.keys(), own.name))
    except Exception as error:
        return [f"{own.name}: its own state is not known ({type(error).__name__}: {error})"]


def _load(own: StoredOwn, outer: Optimizer, inner: Optimizer) -> list[str]:
    stale = own.stale(path for path, _ in _leaves(outer, inner))
    given = with_leaves(outer.state_dict(), own.leaves, stale)
    kept = KeptOptimizer(outer, inner)
    try:
        outer.load_state_dict(given)
    finally:
        changed = kept.put_back()
    return [f"{own.name}: its own load_state_dict changed {what}, which may differ now" for what in changed]


class KeptOptimizer:
    """Keeps state and groups of an optimizer, and puts them back after its ``load_state_dict``."""

    def __init__(self, outer: Optimizer, inner: Optimizer) -> None:
        self._inner = inner
        self._state, self._groups = inner.state, inner.param_groups
        self._states = {parameter: dict(state) for parameter, state in inner.state.items()}
        self._each = list(inner.param_groups)
        self._options = [dict(group) for group in self._each]
        self._rates = [
            (v, v.detach().clone()) for o in self._options for v in o.values() if isinstance(v, torch.Tensor)
        ]
        shared = (id(inner.state), id(inner.param_groups))
        self._shared = [(outer, k, v) for k, v in vars(outer).items() if id(v) in shared]
        self._sums = self._digests()

    def _digests(self) -> dict[tuple[int, str], int]:
        states = [
            ((number, key), content.detach())
            for number, state in enumerate(self._states.values())
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
            for content in contents_of(local_tensor(value))
        ]
        found: dict[tuple[int, str], int] = {}
        sums = partial_sums((t, (0,) * t.dim()) for _, t in states)
        for place, ((where, _), total) in enumerate(zip(states, sums, strict=True), 1):
            found[where] = found.get(where, 0) + place * total
        return found

    def put_back(self) -> list[str]:
        """Put state and groups back. Returns the tensors that were changed in place."""
        self._groups[:] = self._each
        for live, value in self._rates:
            live.detach().copy_(value)
        for group, options in zip(self._groups, self._options, strict=True):
            group.clear()
            group.update(options)
        self._state.clear()
        self._state.update(self._states)
        self._inner.state, self._inner.param_groups = self._state, self._groups
        for owner, attribute, value in self._shared:
            setattr(owner, attribute, value)
        now = self._digests()
        return [
            f"state[{number}].{key}"
            for (number, key), total in self._sums.items()
            if now[number, key] != total
        ]
