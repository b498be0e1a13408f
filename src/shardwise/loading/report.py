"""The report of a load: counts, bytes, seconds, and everything that was skipped, with its declaration."""

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
    """Number of wanted tensors filled from the source."""
    model_bytes: int
    """Bytes of the whole model, every distinct tensor once."""
    local_bytes: int
    """Bytes of this rank's shards."""
    bytes_read: int
    """Bytes that this rank requested from storage."""
    staging_peak_bytes: int
    """Host memory used besides the destination."""
    seconds_plan: float
    seconds_read: float
    unused: tuple[Declaration, ...]
    """Stored tensors that were skipped, with the author of the declaration."""
    initialized: tuple[Declaration, ...]
    """Wanted tensors initialised by the model's own rule, with the author of the declaration."""
    converted: tuple[Converted, ...]
    """Conversions that could not be compiled to byte ranges. Each rank with a part of a result ran them whole."""
    ignored_files: tuple[str, ...]
    verified: str
    """How the load was proved: "digest" if every tensor's content was compared, else "cover"."""
    digests_compared: int
    """Number of filled tensors whose digest was compared with the recorded one."""
    page_cache: str
    """Whether the kernel kept the pages of the files: "keep" or "release"; see ``IOOptions.page_cache``."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)
