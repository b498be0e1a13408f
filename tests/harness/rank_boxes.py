"""The boxes of every rank at once. The package itself asks only for those of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from shardwise.tensors.boxes import LocalBox
from shardwise.tensors.placements import Geometry, cut_boxes

__all__ = ["every_rank_boxes"]


def every_rank_boxes(shape: Sequence[int], geometry: Geometry) -> dict[int, tuple[LocalBox, ...]]:
    """The boxes that each rank of the mesh holds, by global rank."""
    coordinates = product(*(range(n) for n in geometry.axis_sizes))
    return {
        rank: cut_boxes(shape, geometry, coordinate)
        for rank, coordinate in zip(geometry.ranks, coordinates, strict=True)
    }
