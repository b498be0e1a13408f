"""The place that an export writes to: a local directory, or a URL of a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..operations.operation import Operation
from ..ranks.ranks import Ranks
from ..storage import is_url
from ..transfer.copy import Staging
from .files import HubFiles
from .job import Job
from .tensors import HubTensors
from .to_directory import ToDirectory
from .to_store import ToStore

__all__ = ["Place", "place_for"]


class Place(Protocol):
    """Where the files of one export appear: all of them, or none."""

    def prepare(self) -> None:
        """Refuse a place where something is, and make room. Collective. Raises :class:`CheckpointError`."""

    def write(self, job: Job, contents: HubTensors, staging: Staging) -> tuple[int, list[int]]:
        """Write the tensors. Collective. Returns the payload bytes and the shares of digest sums of this rank."""

    def publish(self, assets: Mapping[str, bytes]) -> None:
        """Write index and small files, and let all of them appear. For rank 0, after every rank has written.

        Raises :class:`CheckpointError`, also if a reader would refuse the headers.
        """

    def discard(self) -> None:
        """Delete what was written. For rank 0, after a failure since :meth:`prepare`."""


def place_for(final: str, output: HubFiles, ranks: Ranks, counted: Operation, *, overwrite: bool) -> Place:
    """The place of a path or a URL. ``counted`` counts the payload that is written. ``overwrite`` is for a local one."""
    if is_url(final):
        return ToStore(final, output, ranks, counted)
    return ToDirectory(final, output, ranks, counted, overwrite=overwrite)
