"""Host conversions: what has no map is run whole, on the smallest set of stored tensors, in host memory.

Plain records, no torch; :mod:`.whole` makes them, ``transfer.converted`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..catalog.records import StoredTensor

if TYPE_CHECKING:
    import torch

__all__ = ["Converted", "HostConversion"]


@dataclass(frozen=True, slots=True)
class Converted:
    """A conversion that was run whole, for reports: which, on what, why, and what it cost."""

    name: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    reason: str
    """Why it could not be compiled to tiles."""
    staging_bytes: int
    """Host memory that it takes while it runs: sources, results and what lies between."""


@dataclass(frozen=True, slots=True, eq=False)
class HostConversion:
    """A conversion of a few stored tensors to a few others that runs on real data.

    To the plan its results are stored tensors like others, in files that do not exist: a tile's source is
    ``outputs[…].name``, a transfer's path that of its chunk.
    """

    name: str
    """The operations and what they take, in words."""
    sources: tuple[str, ...]
    outputs: Mapping[str, StoredTensor]
    """By module name."""
    reason: str
    """Why it has no map."""
    source_bytes: int
    """Bytes that are read for it, on every rank that holds a part of what it makes."""
    staging_bytes: int
    """Most host memory that it takes: sources, results, and what it allocates between them."""
    run: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = field(repr=False)
    """From tensors by stored name to tensors by module name."""

    def describe(self) -> Converted:
        """The record for reports."""
        return Converted(self.name, self.sources, tuple(self.outputs), self.reason, self.staging_bytes)
