"""Carries a plan out on this rank: reads by the chosen strategy, copies into live tensors, compares second copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..layout.live import LiveModel
from ..models.host_memory import HostMemory
from ..models.memory import default_device
from ..planning import IOOptions
from ..planning.records import LEAST_STAGING_BYTES
from ..ranks.ranks import Ranks
from ..transfer import FileReader
from ..transfer.converted import ConvertingReader
from ..transfer.copy import Destination, Staging, compare, execute
from ..transfer.page_cache import page_cache_for
from ..transfer.shared import NotShared, OnceReader, SharedReader
from .report import ReadCost
from .strategy import Choice, Planned, shared_reader

__all__ = ["carry_out"]


def carry_out(
    planned: Planned, choice: Choice, live: LiveModel, ranks: Ranks, memory: HostMemory
) -> ReadCost:
    """Read into the shards of ``live``, and check second copies of ties.

    Rank-local if each rank reads its own ranges; else every rank must call it. ``memory``: where the shards lie.
    """
    plan, io = planned.plan, planned.io
    local = live.local_tensors()
    page_cache = page_cache_for(io, (t.device for t in local.values()))
    destination = Destination(local)
    staging = Staging(_beside(planned, 0), plan.staging_bytes)
    shared: list[SharedReader] = []

    def share(*, copies: bool) -> Iterator[SharedReader]:
        nonlocal staging
        device = default_device(live.root)
        found = shared_reader(planned, choice, reader, ranks, device, copies=copies)
        if found is not None:
            shared.append(found)
            staging = Staging(_beside(planned, found.memory_bytes), plan.staging_bytes)
            yield found
            found.close()

    with FileReader(ranks.tick, page_cache=page_cache) as files:
        reader = ConvertingReader(files, plan.conversions, planned.catalog.tensors)
        try:
            for one in share(copies=False) if choice.strategy != "own" else ():
                execute(one, one, destination, staging, memory, held=one.elements)
        except NotShared as error:
            if choice.asked:
                raise
            choice = replace(choice, strategy="own", reason=f"ranks can't share memory ({error})")
        if choice.strategy == "own":
            execute(plan.transfers, reader, destination, staging, memory)
        if choice.strategy == "once":
            for one in share(copies=True):
                compare(one, one, destination, staging)
        else:
            compare(plan.checks, reader, destination, staging)
    return ReadCost(
        bytes_read=files.bytes_read,
        bytes_sent=sum(one.bytes_sent for one in shared if isinstance(one, OnceReader)),
        staging_peak_bytes=staging.peak_bytes + reader.peak_bytes + _most(shared),
        page_cache=page_cache,
        pages=memory.describe(),
        strategy=choice.describe(),
    )


def _most(shared: Sequence[SharedReader]) -> int:
    return max((one.memory_bytes for one in shared), default=0)


def _beside(planned: Planned, held_bytes: int) -> IOOptions:
    """The staging budget without the largest host conversion, and without what is held for buckets."""
    largest = max((host.staging_bytes for host in planned.plan.conversions.values()), default=0)
    left = planned.io.staging_bytes - largest - held_bytes
    return replace(planned.io, staging_bytes=max(left, LEAST_STAGING_BYTES))
