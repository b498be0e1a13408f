"""A Trainer that is stopped where an epoch ends: the evaluation that is due there is made up for, bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.pool import RankPool
from tests.integrations import _epoch_end_fns as fns
from tests.integrations.test_trainer import hub as hub

pytestmark = [pytest.mark.nightly, pytest.mark.needs("trainer")]


def test_a_stop_at_the_end_of_an_epoch(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    for found in ranks.run_ranks(
        2, fns.stopped_at_the_end_of_an_epoch, str(hub), str(tmp_path), timeout_s=200
    ):
        whole = found.pop("whole")
        assert found.pop("whole evaluated") == [6, 12]
        assert len(found) == 3
        for ask, life in found.items():
            assert life["stopped"][:2] == (75, 6), ask
            assert "checkpoint-6" in life["stopped"][2], ask
            assert life["resumed"] == (6, True, ()), ask
            assert life["losses"] == whole, f"{ask}: not bitwise"
            # An evaluation that has begun when its step is saved is not repeated: its draws are in the saved state.
            again = [12] if ask == "evaluation, no save due" else [6, 12]
            assert life["evaluated"] == ([], again), ask


def test_a_stop_keeps_the_newest_beside_the_best(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    for found in ranks.run_ranks(
        2, fns.stopped_beside_the_best, str(hub), str(tmp_path / "run"), timeout_s=100
    ):
        assert found == (75, ["checkpoint-2", "checkpoint-6"])


def test_a_stop_without_a_signal(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    """``request_stop`` of the Trainer and of the Accelerator, on one of two ranks."""
    for found in ranks.run_ranks(2, fns.stopped_by_request, str(hub), str(tmp_path), timeout_s=200):
        assert found["trainer"] in ((75, 6), (75, 7))
        assert found["saved"] == f"checkpoint-{found['trainer'][1]}"
        assert found["without a policy"][0] == "CheckpointError"
        assert found["accelerate"] == (75, True)
