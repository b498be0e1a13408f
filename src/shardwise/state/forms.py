"""What torch's own classes take as a state, told from the live object before it gets one. Changes nothing.

torch checks nothing: its schedulers take every entry as an attribute, its optimizers every setting, and the next step is
where it fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import FormatError, StateError
from ..limits import brief

__all__ = ["attribute_of_class", "check_scaler", "check_scheduler", "check_settings", "check_values"]

_SCHEDULERS = "torch.optim.lr_scheduler"
#: What every release of torch stores of a scheduler that has it.
_ALWAYS = ("last_epoch", "base_lrs", "_schedulers")
#: What every scheduler of torch has, whose subclasses may have attributes of any kind.
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
    """An entry of a scheduler's state that would hide a method of its class, or what it keeps out of its state."""
    live = getattr(target, "__dict__", {})
    for key in state:
        if not isinstance(key, str):
            continue
        of_class = getattr(type(target), key, None)
        if callable(of_class) or hasattr(of_class, "__set__") or isinstance(live.get(key), Optimizer):
            return key
    return None


def check_scheduler(target: LRScheduler, state: Mapping[Any, Any], name: str) -> None:
    """Raise :class:`FormatError` for a state that a scheduler of torch, or one that loads as these do, can't have."""
    if type(target).load_state_dict.__module__ != _SCHEDULERS:
        return  # what it takes is its own
    if hidden := attribute_of_class(target, state):
        raise FormatError(f"{name}: {brief(hidden)} is no state of a {type(target).__qualname__}")
    live = target.state_dict()
    if type(target).__module__ != _SCHEDULERS:
        for key in _OF_EVERY_SCHEDULER:
            if key in state and key in live:
                _check_kind(live[key], state[key], f"{name}.{key}")
        return
    # Releases of torch differ in the rest, and a program may have given the saved one harmless attributes of its own.
    lost = [key for key in _ALWAYS if key in live and key not in state]
    if lost:
        raise FormatError(f"{name}: lacks {brief(lost[0])} of the state of a {type(target).__qualname__}")
    inner = getattr(target, "_schedulers", ())
    for key in live.keys() & state.keys() - {"_schedulers"}:
        _check_kind(live[key], state[key], f"{name}.{key}")
    states = state.get("_schedulers", [])
    if not isinstance(states, list | tuple) or not all(isinstance(one, dict) for one in states):
        raise FormatError(f"{name}._schedulers: expected states of schedulers, got {brief(states)}")
    if len(states) != len(inner):
        raise StateError(f"{name}: was saved of {len(states)} schedulers in it, this run has {len(inner)}")
    for k, (one, of_one) in enumerate(zip(inner, states, strict=True)):
        check_scheduler(one, of_one, f"{name}._schedulers[{k}]")


def check_scaler(target: torch.amp.GradScaler, state: Mapping[str, Any], name: str) -> None:
    """Raise :class:`FormatError` for what no GradScaler saves, :class:`StateError` for that of a disabled one."""
    kind = type(target)
    if kind.load_state_dict is not torch.amp.GradScaler.load_state_dict:
        return
    if not state:
        if target.is_enabled():
            raise StateError(
                f"{name}: {kind.__qualname__}.load_state_dict does not take the state of a disabled instance, which was "
                f"saved; disable it, or leave it out of the state"
            )
        return
    for key in _OF_SCALERS:
        if not _is_number(state.get(key)) or isinstance(state[key], bool):
            raise FormatError(f"{name}.{key} is {brief(state.get(key))}, expected a number")


def check_settings(optimizer: Optimizer, groups: list[dict[str, Any]], name: str) -> None:
    """Raise :class:`FormatError` for a setting of another kind than the live one has, where the kind is certain."""
    for k, (live, stored) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        for key, value in stored["options"].items():
            where = f"{name}.groups[{k}].options.{brief(key)}"
            now = live.get(key, 0.0 if key in _RATES else None)
            if value is not None or (key == "lr" and _is_number(now)):
                _check_kind(now, value, where)


def check_values(optimizer: Optimizer, values: Mapping[str, Mapping[Any, Any]], name: str) -> None:
    """Raise :class:`FormatError` where a state of an optimizer of torch is a tensor, and something else is stored."""
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
    """Numbers and tensors of one are a kind; texts; lists and tuples, of a kind; mappings, of a kind. Others fit all."""
    if isinstance(live, torch.Tensor):
        fits, expected = _is_number(stored) or isinstance(stored, torch.Tensor), "a tensor or a number"
    elif _is_number(live):
        fits, expected = _is_number(stored), "a number"
    elif isinstance(live, str):
        fits, expected = isinstance(stored, str), "text"
    elif isinstance(live, list | tuple):
        fits, expected = isinstance(stored, list | tuple), "a list"
    elif isinstance(live, Mapping):
        fits, expected = stored is None or isinstance(stored, Mapping), "a mapping"
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
