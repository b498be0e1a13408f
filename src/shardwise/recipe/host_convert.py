"""Host conversions: a conversion that tiles can't express runs whole, on the fewest stored tensors, in host memory.

Plain records, no torch; :mod:`.whole` makes them, ``transfer.converted`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from ..catalog.records import StoredTensor
from ..objects import frozen

if TYPE_CHECKING:
    import torch

__all__ = ["Converted", "HostConversion"]


@frozen
class Converted:
    """A conversion that runs whole, for reports: its name, tensors, reason and cost."""

    name: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    reason: str
    """Why it could not be compiled to tiles."""
    staging_bytes: int
    """Host memory that it takes while it runs: sources, results and intermediate tensors."""


@frozen(eq=False)
class HostConversion:
    """A conversion from a few stored tensors to a few results that runs on real data.

    A plan treats the results as stored tensors, in files that do not exist: a tile's source is ``outputs[…].name``, a
    transfer's path is that of its chunk.
    """

    name: str
    """The operations and their inputs, in words."""
    sources: tuple[str, ...]
    outputs: Mapping[str, StoredTensor]
    """By module name."""
    reason: str
    """Why it has no map."""
    source_bytes: int
    """Bytes that each rank with a part of a result reads for it."""
    staging_bytes: int
    """Peak host memory: sources, results and intermediate tensors."""
    run: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = field(repr=False)
    """From tensors by stored name to tensors by module name."""

    def describe(self) -> Converted:
        """The record for reports."""
        return Converted(self.name, self.sources, tuple(self.outputs), self.reason, self.staging_bytes)
