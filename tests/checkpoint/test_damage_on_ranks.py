"""On several ranks: damage that one rank alone meets is damage for all, and all take the step before."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint import _damage_on_ranks_fns as fns
from tests.harness.pool import RankPool


def test_all_ranks_take_the_step_before(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.falls_back, str(tmp_path), timeout_s=120):
        for words, (step, damaged, label) in zip(fns.DAMAGE, found, strict=True):
            assert (step, label) == (1, "at 1"), words
            assert words in damaged[2]
