"""The families of formats, and what each must find in a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..catalog.records import Coded, StoredTensor
from ..objects import frozen

__all__ = ["Family", "Found", "Source"]


@frozen
class Source:
    """A source, as a family looks at it."""

    tensors: Mapping[str, StoredTensor]
    settings: Mapping[str, Any]
    """``quantization_config`` of the model's config; empty if there is none."""
    content: Callable[[str], bytes]
    """Reads a small tensor that describes others, by name: bitsandbytes' ``quant_state``, compressed-tensors' ``weight_shape``."""


@dataclass(slots=True)
class Found:
    """What a family found: the tensors that are stored as codes, by name, and everything that is wrong."""

    coded: dict[str, Coded] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """One sentence each, which names the stored tensor: missing, surplus, of a wrong shape or dtype, contradicting settings."""
    unused: set[str] = field(default_factory=set)
    """Stored tensors that say how to run the model in codes, and not what its weights are (input scales)."""

    def add(self, one: Coded) -> None:
        self.coded[one.tensor.name] = one

    def parts(self) -> Iterable[str]:
        """Names of the stored tensors that are parts."""
        return (part.name for one in self.coded.values() for part in one.parts.values())


class Family(Protocol):
    """Formats of one library. One module each."""

    def __call__(self, source: Source) -> Found:
        """Find every tensor that is stored in this family's codes. Pure, but for ``content``; raises nothing."""
