"""Accelerate: where checkpoints go, and which ones are taken up."""

from __future__ import annotations

from pathlib import Path

from tests.harness.pool import RankPool
from tests.integrations import _accelerate_folders_fns as fns

REPLACED = "optimizer.lr: this program's 0.5 was replaced by the checkpoint's 0.001"


def test_a_checkpoint_is_never_overwritten(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.folders, str(tmp_path), timeout_s=100):
        assert "automatic_checkpoint_naming is off" in found["nowhere"]
        assert "CheckpointError" in found["taken"]
        assert "a folder of its own" in found["taken"]
        assert "automatic_checkpoint_naming=True" in found["taken"]
        assert found["kept"]
        assert found["path"] == str(tmp_path / "checkpoints/checkpoint_0"), "as Accelerate does"
        assert "resume with load_state(accelerator) first" in found["counted anew"]
        assert found["exact"]
        assert found["replaced"] == (REPLACED,)
        assert found["next"] == str(tmp_path / "checkpoints/checkpoint_1")
    assert not (tmp_path / "ignored").exists()


def test_what_accelerate_wrote_is_taken_up(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.of_accelerate, str(tmp_path / "state"), timeout_s=100):
        assert found["changed"]
        assert found["same"]
        assert not found["exact"]
        assert any("data position" in line for line in found["skipped"])
        assert found["replaced"] == (REPLACED,)
        assert found["saved by"] == 2
