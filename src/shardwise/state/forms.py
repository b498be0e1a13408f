"""Checks states for torch's own classes against the live object, before it gets them. Changes nothing.

torch itself checks nothing: its schedulers set every entry as an attribute, its optimizers take every setting, and
only the next step fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import FormatError, StateError
from ..internals.optim import inner_by_torch
from ..limits import brief
from .beyond import path_text
from .data import ResumableLoader
from .documents import check_position
from .schedulers import inner_states
from .several import is_several

__all__ = [
    "attribute_of_class",
    "check_classes",
    "check_scaler",
    "check_scheduler",
    "check_settings",
    "check_state",
    "check_values",
    "refuse_other_kind",
    "unsaid_classes",
]

_SCHEDULERS = "torch.optim.lr_scheduler"
#: Attributes that every release of torch stores, for schedulers that have them.
_ALWAYS = ("last_epoch", "base_lrs", "_schedulers", "lr_lambdas", "_scale_fn_custom")
#: Lists with an entry for each group of the optimizer.
_BY_GROUP = frozenset({"base_lrs", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums"})
#: Attributes of every scheduler of torch. Its subclasses may have any further ones.
_OF_EVERY_SCHEDULER = ("last_epoch", "base_lrs", "_last_lr", "_step_count")
_OF_SCALERS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
#: States of torch's optimizers that are tensors.
_TENSORS = frozenset(
    (
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "square_avg",
        "grad_avg",
        "acc_delta",
    )
    + ("sum", "prev", "step_size", "ax", "row_var", "col_var", "variance")
)
#: Settings that schedulers put into the groups of an optimizer.
_RATES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})


def attribute_of_class(target: Any, state: Mapping[Any, Any]) -> str | None:
    """An entry of a scheduler's state that would hide a method of its class, or an attribute that it never stores."""
    live = getattr(target, "__dict__", {})
    for key in state:
        if not isinstance(key, str):
            continue
        of_class = getattr(type(target), key, None)
        if callable(of_class) or hasattr(of_class, "__set__") or isinstance(live.get(key), Optimizer):
            return key
    return None


def check_state(target: Any, stored: Any, name: str) -> None:
    """Raise :class:`StateError` or :class:`FormatError` for a state that the object can't take. Changes nothing."""
    if is_several(target):
        if not isinstance(stored, Mapping):
            raise FormatError(f"{name}: expected the states of several by name, got {brief(stored)}")
        lost = sorted(target.keys() - stored.keys())
        if lost:
            raise StateError(f"the checkpoint holds no {name} {lost}; leave it out of the state")
        for key, one in target.items():
            check_state(one, stored[key], f"{name}.{key}")
    elif isinstance(target, LRScheduler) or name.partition(".")[0] == "scheduler":
        check_scheduler(target, stored, name)
    elif isinstance(target, torch.amp.GradScaler | ResumableLoader):
        if not isinstance(stored, dict) or not all(isinstance(key, str) for key in stored):
            raise FormatError(
                f"{name}: expected the state of a {type(target).__qualname__}, got {brief(stored)}"
            )
        if isinstance(target, ResumableLoader):
            check_position(stored, name)
        else:
            check_scaler(target, stored, name)


def check_classes(saved: Any, now: Any, name: str = "scheduler") -> None:
    """Raise :class:`StateError` if the saved schedulers had other classes than those of this run."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in saved.keys() & now.keys():
            check_classes(saved[key], now[key], f"{name}.{key}")
    elif saved and now and saved not in (now, now.partition("(")[0]):
        raise StateError(
            f"{name}: the checkpoint contains the state of a {saved}, but this run has a {now}; use the same one, or leave "
            f"it out of the state"
        )


def unsaid_classes(saved: Any, now: Any, name: str = "scheduler") -> Iterator[str]:
    """One line for each scheduler whose inner classes (:func:`.schedulers.class_text`) were not recorded."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in saved.keys() & now.keys():
            yield from unsaid_classes(saved[key], now[key], f"{name}.{key}")
    elif saved and now and saved != now:  # an older checkpoint names the outermost only
        yield f"{name}: the checkpoint does not record the classes of the schedulers in it"


def check_scheduler(target: Any, state: Any, name: str) -> None:
    """Raise for a state that can't belong to a scheduler of torch, to one that loads alike, or to a wrapped one.

    :class:`FormatError` for a damaged state, :class:`StateError` for the state of other schedulers or groups.
    """
    if not isinstance(target, LRScheduler):
        return _check_inner(target, state, name)
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise FormatError(f"{name}: expected the state of a {type(target).__qualname__}, got {brief(state)}")
    if type(target).load_state_dict.__module__ != _SCHEDULERS:
        return _check_inner(target, state, name)  # its own entries can't be checked
    if hidden := attribute_of_class(target, state):
        raise FormatError(
            f"{name}: {brief(hidden)} is not part of the state of a {type(target).__qualname__}"
        )
    live = target.state_dict()
    if type(target).__module__ != _SCHEDULERS:
        for key in _OF_EVERY_SCHEDULER:
            if key in state and key in live:
                _check_kind(live[key], state[key], f"{name}.{key}")
        return _check_inner(target, state, name)
    # Releases of torch differ in the rest, and a program may have set harmless attributes on the saved scheduler.
    lost = [key for key in _ALWAYS if key in live and key not in state]
    if lost:
        raise FormatError(
            f"{name}: lacks {brief(lost[0])}, which the state of a {type(target).__qualname__} has"
        )
    for key in live.keys() & state.keys() - {"_schedulers"}:
        _check_kind(live[key], state[key], f"{name}.{key}")
        if key in _BY_GROUP and len(live[key]) != len(state[key]):
            raise StateError(
                f"{name}.{key}: was saved for {len(state[key])} groups, this run has {len(live[key])}"
            )
    _check_phases(live, state, name)
    states = state.get("_schedulers", [])
    if not isinstance(states, list | tuple) or not all(isinstance(one, dict) for one in states):
        raise FormatError(f"{name}._schedulers: expected states of schedulers, got {brief(states)}")
    inner = inner_by_torch(target)
    if len(states) != len(inner):
        raise StateError(f"{name}: was saved with {len(states)} schedulers in it, this run has {len(inner)}")
    for k, (one, of_one) in enumerate(zip(inner, states, strict=True)):
        check_scheduler(one, of_one, f"{name}._schedulers[{k}]")


def _check_inner(holder: Any, state: Any, name: str) -> None:
    """Check the stored states of schedulers inside an object. Missing ones show after the object has taken its state."""
    for path, inner in inner_states(holder):
        found = state
        try:
            for key in path:
                found = found[key]
        except (LookupError, TypeError):
            continue
        if isinstance(found, dict) or not path:
            check_scheduler(inner, found, f"{name}.{path_text(path)}" if path else name)


def _check_phases(live: Mapping[str, Any], state: Mapping[str, Any], name: str) -> None:
    """Check OneCycleLR's phases: each step looks up every entry of them."""
    phases, stored = live.get("_schedule_phases"), state.get("_schedule_phases")
    if not phases or stored is None:
        return
    if not stored:
        raise FormatError(f"{name}._schedule_phases: expected phases, got {brief(stored)}")
    for k, phase in enumerate(stored):
        lost = [key for key in phases[0] if key not in phase]
        if lost:
            raise FormatError(f"{name}._schedule_phases[{k}]: lacks {brief(lost[0])}")


def check_scaler(target: torch.amp.GradScaler, state: Mapping[str, Any], name: str) -> None:
    """Raise :class:`FormatError` for a state that no GradScaler saves, :class:`StateError` for a disabled one's."""
    cls = type(target)
    if cls.load_state_dict is not torch.amp.GradScaler.load_state_dict:
        return
    if not state:
        if target.is_enabled():
            raise StateError(
                f"{name}: the checkpoint contains the state of a disabled {cls.__qualname__}, which load_state_dict does "
                f"not take; disable it, or leave it out of the state"
            )
        return
    for key in _OF_SCALERS:
        if not _is_number(state.get(key)) or isinstance(state[key], bool):
            raise FormatError(f"{name}.{key} is {brief(state.get(key))}, expected a number")


def check_settings(optimizer: Optimizer, groups: list[dict[str, Any]], name: str) -> None:
    """Raise :class:`FormatError` for a setting of another kind than the live one, if its kind is certain."""
    for k, (live, stored) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        for key, value in stored["options"].items():
            where = f"{name}.groups[{k}].options.{brief(key)}"
            now = live.get(key, 0.0 if key in _RATES else None)
            if value is not None or (key == "lr" and _is_number(now)):
                _check_kind(now, value, where)
            of_torch = type(optimizer).__module__.startswith("torch.optim.")
            if not isinstance(now, list | tuple if of_torch else tuple) or not isinstance(
                value, list | tuple
            ):
                continue
            if len(value) != len(now):
                raise FormatError(f"{where}: expected {len(now)} values, got {len(value)}")


def check_values(optimizer: Optimizer, values: Mapping[str, Mapping[Any, Any]], name: str) -> None:
    """Raise :class:`FormatError` if a state that is a tensor in a torch optimizer is stored as another type."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    for parameter, states in values.items():
        for key, value in states.items():
            where = f"{name}.values[{brief(parameter)}].{brief(key)}"
            if key in _TENSORS and not (value is None or isinstance(value, torch.Tensor)):
                raise FormatError(f"{where}: expected a tensor, got {brief(value)}")
            if key == "step" and not _is_number(value):
                raise FormatError(f"{where}: expected a number, got {brief(value)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Number) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _check_kind(live: Any, stored: Any, where: str) -> None:
    """Check the kind of a value: number (also in a tensor), text, list or tuple, mapping. Skip other live values."""
    if isinstance(live, torch.Tensor):
        fits, expected = _is_number(stored) or isinstance(stored, torch.Tensor), "a tensor or a number"
    elif _is_number(live):
        fits, expected = _is_number(stored), "a number"
    elif isinstance(live, str):
        fits, expected = isinstance(stored, str), "text"
    elif isinstance(live, list | tuple):
        fits, expected = isinstance(stored, list | tuple), "a list"
    elif isinstance(live, Mapping):
        is_lambda = stored is None and where.endswith("]")  # LambdaLR saves None for a plain function
        fits, expected = is_lambda or isinstance(stored, Mapping), "a mapping"
    else:
        return
    if not fits:
        raise FormatError(f"{where}: expected {expected}, got {brief(stored)}")
    if isinstance(live, list | tuple) and live:
        for k, one in enumerate(stored):
            _check_kind(live[min(k, len(live) - 1)], one, f"{where}[{k}]")
    if isinstance(live, Mapping) and live and stored:
        key, value = next(iter(live.items()))
        for k, one in stored.items():
            _check_kind(key, k, f"{where}: a key")
            _check_kind(live.get(k, value), one, f"{where}[{brief(k)}]")


def refuse_other_kind(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`StateError` for settings that this optimizer lacks: third-party checkpoints don't store its class."""
    stored = {key for group in groups for key in group["options"]} - _RATES - {"swa_lr"}
    strange = sorted(stored - set(optimizer.defaults))
    if strange:
        raise StateError(
            f"the checkpoint's optimizer has settings that {type(optimizer).__qualname__} does not: "
            f"{', '.join(strange[:8])}; use the same optimizer as the saved run"
        )
