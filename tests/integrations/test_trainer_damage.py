"""HF Trainer resumes: the newest checkpoint is damaged, or holds less than a run needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.models import build_reference
from tests.harness.pool import RankPool
from tests.integrations import _trainer_damage_fns as fns

pytestmark = pytest.mark.needs("trainer")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub")
    build_reference("qwen3-tied").save_pretrained(path)
    return path


@pytest.mark.slow
def test_falls_back_to_the_newest_undamaged(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    found = ranks.run_ranks(2, fns.fall_back, str(hub), str(tmp_path), timeout_s=150)
    for rank in found:
        assert "checkpoint-6: lost: no manifest.json" in rank[6], (
            "one that is named is not replaced by another"
        )
        assert "differs" in rank[9]
        assert sorted(rank["damaged"]) == [6, 9]
        assert "manifest.json" in rank["damaged"][6]
        assert "differs" in rank["damaged"][9]
        assert rank["exact"]
        assert rank["resumed"] == rank["whole"], "it goes on bitwise from step 3"
        aside, valid = rank["left"][:2], rank["left"][2:]
        assert [name.rsplit("-", 1)[0] for name in aside] == [
            "_damaged-checkpoint-6",
            "_damaged-checkpoint-9",
        ]
        assert valid == ["checkpoint-12", "checkpoint-3", "checkpoint-6", "checkpoint-9"]
    for step in (6, 9):
        assert any(
            f"skipping damaged {tmp_path}/run/checkpoint-{step}" in line for line in found[0]["warned"]
        )


def test_falls_back_to_plain_trainers(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    found = ranks.run_ranks(1, fns.fall_back_to_plain, str(hub), str(tmp_path), timeout_s=100)[0]
    assert len(found["first"]) == 6
    assert found["second"] == found["first"], "weights, too, are those of step 3"
    first, second, lost = (found[f"{name} reported"] for name in ("first", "second", "lost"))
    for report in (first, second, lost):
        assert (report.step, report.saved_world_size, report.exact, report.digest) == (3, 1, False, "")
        assert report.tensors == found["parameters"]
        assert any("plain Trainer, which doesn't record digests" in line for line in report.differences)
    assert (first.optimizer_tensors, first.documents) == (3 * first.tensors, ("scheduler",))
    assert (lost.optimizer_tensors, lost.documents) == (0, ())
    assert first.damaged == {}
    assert "content differs from what was saved" in second.damaged[6]
    assert first.replaced == ()
    assert len(second.replaced) == 2
    for line in second.replaced:
        assert line.endswith("initial_lr: this program's 0.5 was replaced by the checkpoint's 0.01")
        assert any(line in warned for warned in found["second warned"])
    assert found["left"][0].startswith("_damaged-checkpoint-6-")
    assert found["left"][1:] == ["checkpoint-3", "checkpoint-6"]
    says = "it has no optimizer"
    told = {
        name: sum(says in line for line in found[f"{name} warned"]) for name in ("first", "second", "lost")
    }
    assert told == {"first": 0, "second": 0, "lost": 1}


def test_a_checkpoint_of_the_model_only(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    found = ranks.run_ranks(2, fns.model_only, str(hub), str(tmp_path / "run"), timeout_s=100)
    for rank in found:
        assert not rank["exact"]
        assert any("save_only_model" in line for line in rank["differences"])
        assert [step for step, *_ in rank["steps"]] == [1, 2, 3, 4, 5]
    assert any("save_only_model" in line for line in found[0]["warned"])


def test_a_malformed_place_in_the_data_is_damage(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    """Raw errors of Python ended train, also where an older checkpoint was there."""
    for rank in ranks.run_ranks(2, fns.malformed_places, str(hub), str(tmp_path / "run"), timeout_s=150):
        assert "checkpoint-9/state.json: extra.trainer: contains no global_batch_size" in rank[9]
        assert "checkpoint-6/rank/00001.json: extra.data: contains no epoch" in rank[6]
        assert sorted(rank["damaged"]) == [6, 9]
        assert rank["step"] == 3
