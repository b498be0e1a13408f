"""Names of stored optimizer states: ``<parameter>.<state>``, in our slice files as in DCP and FSDP's full state. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

__all__ = ["StateKey", "by_name"]

_T = TypeVar("_T")


class StateKey(NamedTuple):
    """One state of one parameter."""

    parameter: str
    state: str

    @property
    def name(self) -> str:
        """The name of its tensor."""
        return f"{self.parameter}.{self.state}"

    @classmethod
    def of(cls, name: str) -> StateKey:
        """The key that a name stands for. No state has a dot in its own name: a manifest refuses it."""
        parameter, _, state = name.rpartition(".")
        return cls(parameter, state)


def by_name(states: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    """The values of a mapping parameter → state → value by the names of their tensors."""
    return {StateKey(p, s).name: value for p, of_one in states.items() for s, value in of_one.items()}
