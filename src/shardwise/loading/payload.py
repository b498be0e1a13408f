"""The bytes that a rank will read of a source, by a plan and a strategy. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..dtypes import itemsize
from ..planning.buckets import Span
from ..planning.source_box import boxes_of_range
from ..transfer.shared import spans_in_turn
from .strategy import Choice, Planned, buckets_for

__all__ = ["payload_bytes"]


def payload_bytes(planned: Planned, choice: Choice, rank: int) -> int:
    """What :func:`.carry_out.carry_out` reads on a rank, which has this plan."""
    plan = planned.plan
    if choice.strategy == "own":
        return plan.bytes_to_read
    shared = _bytes_of(planned, _spans(planned, choice, rank))
    return shared + (replace(plan, transfers=()).bytes_to_read if choice.strategy == "node" else 0)


def _spans(planned: Planned, choice: Choice, rank: int) -> Iterator[Span]:
    """What the rank reads for others and itself: for the fill, and for second copies where these are shared, too."""
    readers = choice.readers or choice.peers_of(rank)
    for copies in (False, True) if choice.strategy == "once" else (False,):
        buckets = buckets_for(planned, choice, rank, copies=copies)
        if buckets is not None:
            yield from spans_in_turn(buckets.buckets, readers, rank)


def _bytes_of(planned: Planned, spans: Iterator[Span]) -> int:
    """Bytes of files for spans of tensors, which may be results of conversions, or stored in parts."""
    conversions, coded = planned.plan.conversions, planned.plan.coded
    nbytes, last = 0, None
    for path, start, stop in spans:
        if (host := conversions.get(path)) is not None:
            nbytes += 0 if host is last else host.source_bytes  # the reader keeps the results of the last one
            last = host
        elif (one := coded.get(path)) is not None:
            size = itemsize(one.tensor.dtype)
            boxes = boxes_of_range(start // size, -(-stop // size), one.tensor.shape)
            nbytes += sum(map(one.bytes_of, boxes))
        else:
            nbytes += stop - start
    return nbytes
