"""Case 19, save and resume: one rank raises. All raise, naming rank and cause; no rank waits for a timeout."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.checkpoint import _checkpointer_fns as fns
from tests.harness.pool import RankPool


@pytest.mark.parametrize("failing_rank", [0, 2])
def test_save(ranks: RankPool, tmp_path: Path, failing_rank: int) -> None:
    started = time.monotonic()
    found = ranks.run_ranks(3, fns.one_rank_raises_in_save, str(tmp_path), failing_rank)
    assert set(found) == {found[0]}
    assert found[0][0] == "RankError"
    assert f"rank {failing_rank}: RuntimeError: sensor is off" in found[0][1]
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("failing_rank", [0, 2])
def test_resume(ranks: RankPool, tmp_path: Path, failing_rank: int) -> None:
    found = ranks.run_ranks(3, fns.one_rank_raises_in_resume, str(tmp_path), failing_rank)
    assert set(found) == {found[0]}
    assert f"rank {failing_rank}: StateError: extra.sensor: " in found[0][1]
    assert "(RuntimeError: sensor is gone)" in found[0][1]
