"""Steps in memory: any hosts lost, any bit flipped, another number of ranks; the newest step that is held whole wins."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from tests.harness.tiers import long
from tests.memory import _memory_fns as fns

RANKS = 4


def lose(hosts: Path, killed: tuple[int, ...]) -> None:
    for rank in killed:
        shutil.rmtree(hosts / f"host-{rank}")


def is_held(killed: tuple[int, ...]) -> bool:
    """With two copies a slice is lost when its host and the next one are."""
    return not any(rank in killed and (rank + 1) % RANKS in killed for rank in range(RANKS))


SUBSETS = [c for n in range(RANKS + 1) for c in itertools.combinations(range(RANKS), n)]


@pytest.mark.parametrize("world_size", [RANKS, *long(3)])
def test_every_subset_of_hosts_lost(ranks, tmp_path, world_size):
    root, hosts = tmp_path / "run", tmp_path / "hosts"
    trained = ranks.run_ranks(RANKS, fns.train, str(root), str(hosts))
    assert [one["newest"] for one in trained] == [6] * RANKS
    for number, killed in enumerate(SUBSETS):
        again, left = tmp_path / f"run-{number}", tmp_path / f"hosts-{number}"
        shutil.copytree(root, again)
        shutil.copytree(hosts, left)
        lose(left, killed)
        found = ranks.run_ranks(world_size, fns.resume, str(again), str(left))
        held = is_held(killed + tuple(range(world_size, RANKS)))
        assert set(found) == {(6 if held else 3, held, True)}, killed
