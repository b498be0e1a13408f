"""Runs that others began: each layout written by its own writer, restored here, and going on with the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch.optim.lr_scheduler import MultiStepLR

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.catalog.records import FULL_STATE_STEM
from tests.catalog import _dcp_fns
from tests.export import _export_fns
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.runs import _convert_fns
from tests.runs import _third_party_fns as fns


@pytest.fixture(scope="module")
def full_state(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """Accelerate's full state, saved by two ranks after three steps, and the losses of its next six."""
    root = tmp_path_factory.mktemp("foreign") / "state"
    return root, ranks.run_ranks(2, _dcp_fns.accelerate_trains, str(root), "FULL_STATE_DICT", 3, 6)


@pytest.mark.parametrize("now", [1, *nightly(2)])
def test_full_state_of_accelerate(
    ranks: RankPool, full_state: tuple[Path, list[list[float]]], now: int
) -> None:
    root, expected = full_state
    assert (root / "pytorch_model_fsdp.bin").is_file()
    assert (root / "optimizer.bin").is_file()
    found = ranks.run_ranks(now, _dcp_fns.goes_on_here, str(root), 3, 6)
    for rank in found:
        assert not rank["exact"]
        assert rank["documents"] == ("scheduler",)
        assert rank["tensors"] == (14, 14 * 3)
    if now == 2:
        assert [rank["losses"] for rank in found] == expected
    held = sum(p.numel() * 4 * 3 + 4 for p in _dcp_fns.Lines().parameters())
    assert sum(rank["read"] for rank in found) <= 1.05 * held


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_names_of_the_hf_trainer(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """It has Accelerate write model and optimizer, and the scheduler and its own state under names of its own."""
    from transformers import trainer

    assert trainer.FSDP_MODEL_NAME == FULL_STATE_STEM
    root = tmp_path / "checkpoint-3"
    expected = ranks.run_ranks(2, _dcp_fns.accelerate_trains, str(root), kind, 3, 6)
    (root / "scheduler.bin").rename(root / trainer.SCHEDULER_NAME)
    transformers.TrainerState(global_step=3).save_to_json(str(root / "trainer_state.json"))
    found = ranks.run_ranks(2, _dcp_fns.goes_on_here, str(root), 3, 6)
    assert [rank["losses"] for rank in found] == expected
    assert [rank["step"] for rank in found] == [3, 3]


def test_layout_of_torchtitan(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "step-3")
    expected = ranks.run_ranks(2, fns.titan_saves, folder)
    assert open_catalog(folder).tensors.keys() == _dcp_fns.Lines().state_dict().keys()
    found = ranks.run_ranks(2, fns.takes_over, folder)
    assert [rank["losses"] for rank in found] == expected
    for rank in found:
        assert (rank["step"], rank["documents"]) == (3, ("scheduler",))
        assert rank["tensors"] == (14, 14 * 3)
    assert sum(rank["read"] for rank in found) <= 1.05 * fns.state_bytes()
    # The last milestones lie behind the save, and DCP stores their numbers as text.
    again = sw.TrainState(model=_dcp_fns.Lines())
    optimizer = torch.optim.AdamW(again.models["model"].parameters())
    scheduler = MultiStepLR(optimizer, [2, 5, 5])
    sw.restore(sw.TrainState(model=again.models["model"], optimizer=optimizer, scheduler=scheduler), folder)
    assert type(scheduler.milestones).__name__ == "Counter"
    assert scheduler.milestones == {2: 1, 5: 2}


@pytest.mark.parametrize("beside", [True, False])
def test_transformers_own_distributed_save(ranks: RankPool, tmp_path: Path, beside: bool) -> None:
    source, folder = str(tmp_path / "source"), tmp_path / "saved"
    _convert_fns.save_qwen_moe(source)
    (expected, *_) = ranks.run_ranks(2, fns.transformers_saves, source, str(folder), beside)
    assert sorted(folder.glob("shard-*-model-*.safetensors"))
    out = tmp_path / "out"
    found = ranks.run_ranks(2, fns.restores_transformers, source, str(folder), str(out))
    hub, original = (_export_fns.stored_tensors(path) for path in (out, source))
    assert hub.keys() == original.keys(), "still the hub's names, as it was loaded from there"
    for rank in found:
        assert rank.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(rank[name], tensor), name


def test_a_load_finds_the_model_in_all_of_them(
    ranks: RankPool, full_state: tuple[Path, list[list[float]]]
) -> None:
    root, _ = full_state
    stored = torch.load(root / "pytorch_model_fsdp.bin", weights_only=True)
    for found in ranks.run_ranks(2, fns.loads_model_only, str(root)):
        for name, tensor in stored.items():
            assert torch.equal(found[name], tensor), name


def test_what_can_not_be_read_is_named(
    ranks: RankPool, full_state: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    root, _ = full_state
    ranks.run_ranks(2, fns.accelerate_saves_per_rank, str(root), str(tmp_path / "ranks"))
    (tmp_path / "nothing").mkdir()
    paths = [str(tmp_path / name) for name in ("ranks", "ranks-numbered", "nothing")]
    for per_rank, numbered, nothing in ranks.run_ranks(2, fns.errors_of, paths):
        assert (
            "isn't the same in pytorch_model_fsdp_0_rank0.bin and pytorch_model_fsdp_0_rank1.bin" in per_rank
        )
        assert "save with SHARDED_STATE_DICT" in per_rank
        assert "by parameter index, in groups of [1, 13]; this run's has groups of [14]" in numbered
        assert "not a checkpoint" in nothing


def test_a_dcp_directory_that_lacks_what_is_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    """``optimizer.state_dict()`` numbers parameters: matched by position, in the same groups. Errors speak of a state dict, not of
    Accelerate's files."""
    (found,) = ranks.run_ranks(1, fns.asks_too_much_of_dcp, str(tmp_path / "saved"))
    kind, text = found["optimizer"]
    assert kind == "StateError"
    assert "by parameter index" in text
    assert "TrainState(model=…)" in text
    assert "same groups, same order" in text
    assert len(found["same"]) == 14 * 3
    assert all(found["same"])
    assert found["rate"] == 1e-2
    assert any("matched by position" in line for line in found["said"])
    assert "no entry 'lr_scheduler' or 'scheduler' in the state dict" in found["scheduler"][1]
    assert ".bin" not in found["scheduler"][1]
    assert found["model"] == "restored"
    assert found["scaler"] == 1024.0
