"""Carries a plan out on this rank: reads by the chosen strategy, copies into live tensors, compares second copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ..catalog.records import Coded
from ..layout.boxes import Box
from ..layout.live import LiveModel
from ..models.host_memory import HostMemory
from ..models.memory import default_device
from ..operations.operation import Operation
from ..planning import IOOptions
from ..planning.records import LEAST_STAGING_BYTES
from ..ranks.ranks import Ranks
from ..storage import counting
from ..transfer import SourceReader
from ..transfer.checked import boxes_of_conversions, boxes_of_spans, boxes_of_transfers
from ..transfer.converted import ConvertingReader
from ..transfer.copy import Destination, Staging, compare, execute
from ..transfer.decoded import DecodingReader
from ..transfer.lanes import execute_own
from ..transfer.page_cache import page_cache_for
from ..transfer.shared import NotShared, SharedReader
from .payload import payload_bytes
from .report import ReadCost
from .strategy import Choice, Planned, shared_reader

__all__ = ["carry_out"]


def carry_out(
    planned: Planned, choice: Choice, live: LiveModel, ranks: Ranks, memory: HostMemory, operation: Operation
) -> ReadCost:
    """Read into the shards of ``live``, and check second copies of ties.

    Rank-local if each rank reads its own ranges; else every rank must call it. ``memory``: where the shards lie. ``operation``
    counts the bytes.
    """
    plan, io = planned.plan, planned.io
    local = live.local_tensors()
    page_cache = page_cache_for(io, (t.device for t in local.values()))
    destination = Destination(local)
    fills: SharedReader | None = None
    checks: SharedReader | None = None
    with (
        counting() as asked,
        SourceReader(
            operation.counting(ranks.tick), files=planned.catalog.files, io=io, page_cache=page_cache
        ) as files,
    ):
        decoded = DecodingReader(files, planned.catalog.coded, io)
        reader = ConvertingReader(decoded, plan.conversions, planned.catalog.tensors)
        share = partial(shared_reader, planned, choice, reader, ranks, default_device(live.parameters))
        if choice.strategy != "own":
            try:
                fills = share(copies=False)
            except NotShared as error:
                if choice.asked:
                    raise
                choice = replace(choice, strategy="own", reason=f"ranks can't share memory ({error})")
        operation.expect(partial(payload_bytes, planned, choice, ranks.rank))
        if planned.catalog.coded:
            with ranks.agree("check scales"):
                decoded.check_scales(_scaled(planned, choice, fills))
                decoded.announce(_shared(planned, fills))
        staging = Staging(_beside(planned, _held_by(fills)), plan.staging_bytes)
        if choice.strategy == "own":
            execute_own(plan.transfers, files, reader, destination, staging, memory)
        elif fills is not None:
            execute(fills, fills, destination, staging, memory)
            fills.close()
        memory.settle()
        if choice.strategy != "once":
            compare(plan.checks, reader, destination, staging)
        elif (checks := share(copies=True)) is not None:
            decoded.announce(_shared(planned, checks))
            compare(checks, checks, destination, staging)
            checks.close()
    shared = [one for one in (fills, checks) if one is not None]
    return ReadCost(
        bytes_read=files.bytes_read,
        requests=asked.total,
        bytes_sent=sum(one.bytes_sent for one in shared),
        staging_peak_bytes=staging.peak_bytes
        + reader.peak_bytes
        + decoded.peak_bytes
        + max(map(_held_by, shared), default=0),
        page_cache=page_cache,
        pages=memory.describe(),
        reads=files.describe_reads(),
        strategy=choice.describe(),
    )


def _scaled(planned: Planned, choice: Choice, fills: SharedReader | None) -> Iterator[tuple[Coded, Box]]:
    """The boxes of tensors in parts that this rank is going to read."""
    plan, catalog = planned.plan, planned.catalog
    transfers = [
        *(plan.transfers if choice.strategy == "own" else ()),
        *(plan.checks if choice.strategy != "once" else ()),
    ]
    spans = [] if fills is None else list(fills.spans())
    paths = {t.path for t in transfers} | {path for path, _, _ in spans}
    hosts = [host for path, host in plan.conversions.items() if path in paths]
    yield from boxes_of_transfers(transfers, catalog.coded)
    yield from boxes_of_spans(spans, catalog.coded, planned.io.parts_bytes)
    yield from boxes_of_conversions(hosts, catalog.coded, catalog.tensors)


def _shared(planned: Planned, reader: SharedReader | None) -> Iterator[tuple[Coded, Box]]:
    """The boxes of tensors in parts that this rank reads for others, too."""
    spans = reader.spans() if reader is not None else ()
    return boxes_of_spans(spans, planned.catalog.coded, planned.io.parts_bytes)


def _held_by(shared: SharedReader | None) -> int:
    return 0 if shared is None else shared.memory_bytes


def _beside(planned: Planned, held_bytes: int) -> IOOptions:
    """The staging budget without the largest host conversion, and without what is held for buckets."""
    largest = max((host.staging_bytes for host in planned.plan.conversions.values()), default=0)
    left = planned.io.staging_bytes - largest - held_bytes
    return replace(planned.io, staging_bytes=max(left, LEAST_STAGING_BYTES))
