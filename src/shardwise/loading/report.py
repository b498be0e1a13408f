"""What a load tells: counts, bytes, seconds, and everything that was left out and by whose word."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..recipe.host_convert import Converted
from ..recipe.match import Declaration

__all__ = ["LoadReport"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The outcome of a load on this rank."""

    source: str
    tensors: int
    """Wanted tensors filled from the source."""
    model_bytes: int
    """Bytes of the whole model, every distinct tensor once."""
    local_bytes: int
    """Bytes of this rank's shards."""
    bytes_read: int
    """Bytes that this rank asked of storage."""
    staging_peak_bytes: int
    """Host memory used besides the destination."""
    seconds_plan: float
    seconds_read: float
    unused: tuple[Declaration, ...]
    """Stored tensors that were left, with who declared that they may be."""
    initialized: tuple[Declaration, ...]
    """Wanted tensors that were made by the model's own rule, with who declared that they may be."""
    converted: tuple[Converted, ...]
    """What could not be compiled to byte ranges and was converted whole, by every rank that holds a part of it."""
    ignored_files: tuple[str, ...]
    verified: str
    """How the load was proved: "digest" if every tensor's content was compared, else "cover"."""
    digests_compared: int
    """Tensors filled whose content digest was compared with the one that the source records."""
    page_cache: str
    """What became of the kernel's pages of the files: "keep" or "release"; see ``IOOptions.page_cache``."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)
