"""Digest sums of all ranks, added up on their way to rank 0: the digest of each tensor, and whether its replicas are equal.

A rank adds its sum of a tensor to two totals. One is that of the replica that counts. In the other the sums of replica k weigh
R(1024, k) of :mod:`.digest`, an odd number of 64 bits. If all replicas are equal, the second is the first times the sum of the
weights. With two replicas the comparison finds every difference of their sums, because the weights are odd. With more, the differences
of several replicas cancel with a chance of about 2^-32, as several changed elements of one tensor may in its digest. 8 bytes for each
tensor travel, 16 if it has replicas, whatever the number of ranks and replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..format.slices import replicas
from ..layout.placements import Geometry
from .digest import random_odd

__all__ = ["ReplicaTotals", "added_sums", "refuse_other_tensors"]

_Words = NDArray[np.uint64]
#: No dim has the weights of this stream: changes in two replicas can't cancel because rows and replicas weigh alike.
_STREAM = 1024


class _Alike(NamedTuple):
    """Tensors, by index, with one geometry and one replica that counts."""

    indices: NDArray[np.int64]
    weighted: NDArray[np.int64]
    """Their places in the second total; none without replicas."""
    geometry: Geometry
    owner: int


@lru_cache(maxsize=64)
def _replica_of(geometry: Geometry) -> tuple[dict[int, int], _Words]:
    """The replica of each rank of a geometry, and the weight of each replica."""
    found = replicas(geometry)
    return {rank: k for k, ranks in enumerate(found) for rank in ranks}, random_odd(_STREAM, 0, len(found))


class ReplicaTotals:
    """Adds up the sums of tensors over ranks. Every rank makes the same one. ``owners``: for each tensor, the replica that counts."""

    def __init__(self, geometries: Sequence[Geometry], owners: Sequence[int]) -> None:
        groups: dict[tuple[Geometry, int], list[int]] = {}
        for index, key in enumerate(zip(geometries, owners, strict=True)):
            groups.setdefault(key, []).append(index)
        self._tensors, self._weighted = len(geometries), 0
        self._groups: list[_Alike] = []
        for (geometry, owner), indices in groups.items():
            held = len(indices) if len(_replica_of(geometry)[1]) > 1 else 0
            places = np.arange(self._weighted, self._weighted + held)
            self._groups.append(_Alike(np.array(indices, np.int64), places, geometry, owner))
            self._weighted += held

    def share(self, sums: _Words, rank: int) -> _Words:
        """What a rank adds to the totals. ``sums``: of its copies of all tensors."""
        found = np.zeros(self._tensors + self._weighted, np.uint64)
        for one in self._groups:
            places, weights = _replica_of(one.geometry)
            replica = places.get(rank)
            if replica is None:  # the mesh leaves this rank out
                continue
            if replica == one.owner:
                found[one.indices] = sums[one.indices]
            if len(one.weighted):
                found[self._tensors + one.weighted] = sums[one.indices] * weights[replica]
        return found

    def read(self, totals: _Words) -> tuple[_Words, NDArray[np.int64]]:
        """From the added shares of all ranks: the sum of each tensor, and the indices of those whose replicas differ."""
        if totals.shape != (self._tensors + self._weighted,):
            raise ValueError(f"expected sums of {self._tensors} tensors, got {totals.shape[0]} numbers")
        sums, unequal = totals[: self._tensors], [np.zeros(0, np.int64)]
        for one in self._groups:
            if len(one.weighted):
                weight = _replica_of(one.geometry)[1].sum(dtype=np.uint64)
                expected = sums[one.indices] * weight
                unequal.append(one.indices[totals[self._tensors + one.weighted] != expected])
        return sums, np.sort(np.concatenate(unequal))


def added_sums(parts: Sequence[_Words]) -> _Words:
    """Shares of several ranks, added. Raises :class:`ValueError` if ranks have other tensors."""
    refuse_other_tensors(parts)
    found: _Words = np.sum(parts, axis=0, dtype=np.uint64)
    return found


def refuse_other_tensors(parts: Sequence[_Words]) -> None:
    """Raise :class:`ValueError` unless all ranks sent as many numbers."""
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"ranks have other tensors: they sent {sorted({len(p) for p in parts})} numbers")
