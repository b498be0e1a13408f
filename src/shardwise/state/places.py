"""Moves tensors of documents to the right devices of this process.

A checkpoint records only the device type: ``cuda``, not ``cuda:3``, because ranks hold equal state on different
devices.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..devices import own_device

__all__ = ["Places"]


class Places:
    """The tensors of documents already read. They lie on the CPU until :meth:`put`."""

    def __init__(self) -> None:
        self._met: dict[
            int, tuple[torch.Tensor, str, str]
        ] = {}  # by id; holds the tensor, which keeps its id unique
        self._moved: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._differences: dict[str, str] = {}

    def met(self, tensor: torch.Tensor, key: str, kind: str) -> None:
        """Note a tensor that was saved from a device of type ``kind``; ``key`` is its path for the report."""
        self._met[id(tensor)] = (tensor, key, kind)

    def put(self, value: Any, live: Callable[[], Any] = lambda: None) -> Any:
        """Move the tensors of ``value`` to the devices of the live ones, else to this process's device of their type,
        else to the CPU.

        ``live`` returns this run's counterpart of the value; it is called only if the value holds a tensor. Containers
        change in place, tuples are new; a tensor that occurs twice stays one tensor.
        """
        if not self._holds_tensors(value):
            return value
        return self._put(value, live())

    @property
    def differences(self) -> tuple[str, ...]:
        """One line for each tensor that is now on another device type."""
        return tuple(self._differences.values())

    def _holds_tensors(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return id(value) in self._met
        return any(self._holds_tensors(part) for _, part in _parts(value))

    def _put(self, value: Any, live: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._put_tensor(value, live)
        changed = {key: self._put(part, _counterpart(live, key)) for key, part in _parts(value)}
        if type(value) is tuple:
            return tuple(changed.values())
        for key, part in changed.items():
            value[key] = part
        return value

    def _put_tensor(self, tensor: torch.Tensor, live: Any) -> torch.Tensor:
        if id(tensor) not in self._met:
            return tensor
        _, key, kind = self._met[id(tensor)]
        follows = isinstance(live, torch.Tensor) and not live.is_meta
        device = live.device if follows else own_device(kind)
        place = (id(tensor), device)
        if place not in self._moved:
            self._moved[place] = _moved(tensor, device)
        found = self._moved[place]
        if found.device.type != kind:
            self._differences[key] = f"{key}: a tensor on {kind} when saved, on {found.device.type} now"
        return found


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    try:
        return tensor.to(device)
    except (NotImplementedError, RuntimeError):
        if not tensor.is_quantized:  # few devices support quantized tensors
            raise
        return tensor


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """The items of a container of typed JSON, by key. Skips sets, whose members have no keys."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, collections.deque)) or type(value) is tuple:
        return list(enumerate(value))
    return []


def _counterpart(live: Any, key: Any) -> Any:
    if isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, (list, tuple, collections.deque)) and isinstance(key, int) and key < len(live):
        return live[key]
    return None
