"""Sums of all ranks added up: the digests' totals, and replicas that differ, against a comparison of every replica."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise.digests import _STREAM, ReplicaTotals, added_sums, random_odd
from shardwise.format.slices import replicas
from shardwise.tensors.placements import Cut, Geometry

RANKS = 12
EVERY = tuple(range(RANKS))
SHARD, REPLICATE = Cut("shard"), Cut("replicate")
GEOMETRIES = {
    "sharded": Geometry((RANKS,), ("s",), (SHARD,), EVERY),
    "replicated": Geometry((RANKS,), ("r",), (REPLICATE,), EVERY),
    "HSDP": Geometry((3, 4), ("r", "s"), (REPLICATE, SHARD), EVERY),
    "replicas inside": Geometry((4, 3), ("s", "r"), (SHARD, REPLICATE), EVERY),
    "some ranks": Geometry((2, 2), ("r", "s"), (REPLICATE, SHARD), (9, 1, 4, 6)),
}
NAMES = [name for name in GEOMETRIES for _ in range(3)]
OWNERS = [k % len(replicas(GEOMETRIES[name])) for k, name in enumerate(NAMES)]
SPREAD = [GEOMETRIES[name] for name in NAMES]


def sums_of_equal_replicas(seed: int) -> Any:
    """By rank, then tensor: each replica adds up to the same total, by other parts."""
    random = np.random.default_rng(seed)
    found = random.integers(0, 2**64, (RANKS, len(NAMES)), dtype=np.uint64)
    for t, geometry in enumerate(SPREAD):
        for rank in set(EVERY) - set(geometry.ranks):
            found[rank, t] = 0
        total = random.integers(0, 2**64, dtype=np.uint64)
        for ranks in replicas(geometry):
            found[ranks[:1], t] += total - found[ranks, t].sum(keepdims=True)  # arrays wrap around silently
    return found


def read(sums: Any) -> tuple[list[int], set[int]]:
    totals = ReplicaTotals(SPREAD, OWNERS)
    shares = [totals.share(sums[rank], rank) for rank in EVERY]
    halves = [added_sums(shares[: RANKS // 3]), added_sums(shares[RANKS // 3 :])]  # merged in any groups
    found, unequal = totals.read(added_sums(halves[::-1]))
    return found.tolist(), set(unequal.tolist())


def all_compared(sums: Any) -> tuple[list[int], set[int]]:
    """Every replica beside every other."""
    totals, unequal = [], set()
    for t, geometry in enumerate(SPREAD):
        each = [int(sums[ranks, t].sum(dtype=np.uint64)) for ranks in replicas(geometry)]
        totals.append(each[OWNERS[t]])
        unequal |= {t} if len(set(each)) > 1 else set()
    return totals, unequal


def test_equal_replicas() -> None:
    for seed in range(20):
        sums = sums_of_equal_replicas(seed)
        found = read(sums)
        assert found == all_compared(sums)
        assert not found[1]


@pytest.mark.parametrize("shift", [0, 17, 31])
def test_an_element_that_differs_in_one_replica_is_never_missed(shift: int) -> None:
    """Of each tensor with replicas, by each rank, in the lowest bit and in the highest of an element."""
    for t, geometry in enumerate(SPREAD):
        for rank in geometry.ranks:
            sums = sums_of_equal_replicas(t)
            sums[[rank], t] += np.uint64(1 << shift)
            assert read(sums) == all_compared(sums)


def test_changes_in_several_replicas_do_not_cancel() -> None:
    """One adds what another loses; all but the owner change alike."""
    random = np.random.default_rng(1)
    for t, geometry in enumerate(SPREAD):
        each = replicas(geometry)
        for change in random.integers(1, 2**64, 50, dtype=np.uint64):
            sums = sums_of_equal_replicas(2)
            if len(each) > 2:
                a, b = (each[(OWNERS[t] + k) % len(each)][:1] for k in (1, 2))
                sums[a, t] += change
                sums[b, t] -= change
                assert read(sums) == all_compared(sums)
            sums = sums_of_equal_replicas(3)
            for k, ranks in enumerate(each):
                sums[ranks[-1:], t] += change if k != OWNERS[t] else np.uint64(0)
            assert read(sums) == all_compared(sums)


def test_tensors_without_replicas_send_one_number() -> None:
    sharded, replicated = GEOMETRIES["sharded"], GEOMETRIES["replicated"]
    sums = np.ones(3, np.uint64)
    assert len(ReplicaTotals([sharded] * 3, [0] * 3).share(sums, 0)) == 3
    assert len(ReplicaTotals([sharded, replicated, sharded], [0] * 3).share(sums, 0)) == 4


def test_sums_of_other_tensors_are_refused() -> None:
    totals = ReplicaTotals(SPREAD, OWNERS)
    with pytest.raises(ValueError, match="expected sums of 15 tensors, got 1 numbers"):
        totals.read(np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="ranks have other tensors"):
        added_sums([np.zeros(1, np.uint64), np.zeros(2, np.uint64)])


def test_weights_of_replicas_leave_the_bits_of_an_element() -> None:
    """However many replicas there are, and whichever counts: if it alone differs, the others' weights add up to its own change."""
    weights = random_odd(_STREAM, 0, 4096)
    for count in range(2, 4097):
        others = weights[:count].sum(dtype=np.uint64) - weights[:count]
        assert np.all(others & np.uint64(2**32 - 1)), count
