"""Several models and optimizers by name in one checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import _several_models_fns as fns
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("world_size", [2, *nightly(1)])
def test_actor_and_critic_go_on_exactly(ranks: RankPool, tmp_path: Path, world_size: int, mode: str) -> None:
    for found in ranks.run_ranks(world_size, fns.goes_on_exactly, str(tmp_path / "run"), mode):
        assert found["same"]
        step, exact, left, tensors, states = found["report"]
        assert (step, exact, left) == (3, True, ())
        assert tensors == 18 + 4
        assert states > 20
        assert found["note"] == 0
        assert found["folders"] == ["manifest.json", "models", "optimizers", "rank", "state.json"]
        assert found["verify"] == ()
        assert found["rates"][0] != found["rates"][1]


def test_other_world_sizes_hold_the_same(ranks: RankPool, tmp_path: Path) -> None:
    first = ranks.run_ranks(2, fns.digests_of, str(tmp_path / "a"), True)[0]
    second = ranks.run_ranks(3, fns.digests_of, str(tmp_path / "a-2"), True)[0]
    third = ranks.run_ranks(1, fns.digests_of, str(tmp_path / "a-2-3"), False)[0]
    assert first == second == third
    assert {name.split(" ")[0] for name in first} == {"actor", "critic"}


def test_what_does_not_fit_is_named(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run_ranks(2, fns.digests_of, str(tmp_path / "a"), False)
    for found in ranks.run_ranks(2, fns.errors, str(tmp_path / "a")):
        assert "model critic: not given to this run" in found["less"]
        assert "optimizers.value: not given to this run" in found["less"]
        assert "holds models ['actor', 'critic'], but this run also has judge" in found["more"]
        assert "this run also has model" in found["single"]
        assert found["name"].startswith("StateError: model={…}: names must be words")
        assert found["none"].startswith("StateError: model={}: holds none")


def test_an_average_of_the_weights_is_a_model_of_its_own(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.ema_as_a_model, str(tmp_path / "a")):
        assert "extra.ema.weights[1]: this torch.distributed.tensor.DTensor is sharded" in found["refused"]
        assert found["equal"] == {"model": True, "extra": True}


def test_an_optimizer_belongs_to_its_model(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run_ranks(1, fns.onto_another_model, str(tmp_path / "a"))
    assert found["other"].startswith("StateError: optimizer 'o' trained the model 'a'")
    assert found["shared"] == "saved"
