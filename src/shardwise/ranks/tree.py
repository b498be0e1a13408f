"""The tree in which payloads are combined on their way to rank 0, so that no rank receives one of each rank. Pure.

Rank 0 is the root; the ranks below rank r are 16·r + 1 … 16·r + 16. With 4,096 ranks a payload passes three ranks at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .verdicts import Request, Status

__all__ = ["FAN", "are_mergeable", "ranks_below"]

#: How many payloads one rank combines with its own.
FAN = 16


def ranks_below(rank: int, world_size: int) -> Sequence[int]:
    """The ranks whose payloads a rank combines with its own."""
    return range(FAN * rank + 1, min(FAN * rank + FAN + 1, world_size))


def are_mergeable(
    statuses: Mapping[int, tuple[Status, bytes]], below: Sequence[int], request: Request
) -> bool:
    """Whether all ranks below are in this round with a payload. If not, the round fails, and rank 0 says why."""
    return len(statuses) == len(below) and all(
        s.cause is None and (s.kind, s.label) == (request.kind, request.label) for s, _ in statuses.values()
    )
