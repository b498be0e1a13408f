"""The bytes that a rank will read of a source, by a plan and a strategy. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..planning.buckets import Span
from ..transfer.checked import boxes_of_spans
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
    nbytes, last, in_parts = 0, None, list[Span]()
    for path, start, stop in spans:
        if (host := conversions.get(path)) is not None:
            nbytes += 0 if host is last else host.source_bytes  # the reader keeps the results of the last one
            last = host
        elif path in coded:
            in_parts.append((path, start, stop))
        else:
            nbytes += stop - start
    return nbytes + sum(
        one.bytes_of(box) for one, box in boxes_of_spans(in_parts, coded, planned.io.parts_bytes)
    )
