"""What ranks of a save say of their state, merged on the way: in any groups as if one rank compared all."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shardwise.checkpoint.snapshot import differing_in, differing_tensors, merged
from tests.harness.thread_ranks import ThreadRanks, on_threads

RANKS = 40


def said(rank: int) -> dict[str, Any]:
    hashes = {"same": "a", "rng": f"{rank:04x}", "one": "b" if rank == 23 else "a"}
    if rank % 7:
        hashes["of some"] = "a"
    return {"hashes": hashes, "held": {f"model {rank // 9}": rank}}


@pytest.mark.parametrize("seed", range(20))
def test_ranks_are_compared_in_any_groups(seed: int) -> None:
    parts = [said(rank) for rank in range(RANKS)]
    chance = random.Random(seed)
    while len(parts) > 1:
        chance.shuffle(parts)
        taken = chance.randint(2, min(17, len(parts)))
        parts = [merged(parts[:taken]), *parts[taken:]]
    names, held = differing_in(parts[0])
    assert names == ["of some", "one", "rng"]
    assert list(held.items()) == [("model 0", 0), ("model 1", 9), ("model 2", 18)]


def test_plain_tensors_that_differ_are_named_on_every_rank() -> None:
    def work(ranks: ThreadRanks) -> set[str]:
        sums = {"same": 2**64 - 1, "zero": 0, "on the last": 5 + (ranks.rank == 19), "on all": ranks.rank}
        return differing_tensors(sums, ranks)

    found, _ = on_threads(20, work)
    assert found == [{"on the last", "on all"}] * 20
