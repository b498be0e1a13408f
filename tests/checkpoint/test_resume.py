"""Resume: the next steps are bitwise those of the run that never stopped; at other world sizes, the same tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwise as sw
from tests.checkpoint import _resume_fns as fns
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly, nightly_but


@pytest.fixture(scope="module")
def gpt2(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("gpt2"))
    ranks.run_ranks(2, fns.save_tiny_model, directory, "gpt2")
    return directory


def test_transformers_model_goes_on_bitwise(ranks: RankPool, tmp_path: Path, gpt2: str) -> None:
    found = ranks.run_ranks(2, fns.resumed_equals_uninterrupted, str(tmp_path), "adamw", gpt2)
    assert found[0]["tensors"] == 28  # the tied head is one tensor with the embedding
    assert found[0]["loss"] != found[1]["loss"], "ranks train on their own data"


@pytest.mark.parametrize("optimizer", nightly_but(fns.OPTIMIZERS, "adamw", "eight bits"))
def test_every_kind_of_optimizer_goes_on_bitwise(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    ranks.run_ranks(2, fns.resumed_equals_uninterrupted, str(tmp_path), optimizer)


@on_ranks(2)
def test_stale_state_is_overwritten_or_cleared(tmp_path: Path) -> None:
    """State that the new run already has is overwritten in place, or cleared where nothing is stored."""
    root = str(tmp_path)
    fns.scramble(5)
    first = fns.build("adamw")
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(first, 0)  # nothing was stepped: no state at all
        fns.train(first, 3)
        checkpoints.save(first, 3)
        at_save = fns.bits(first)
        second = fns.build("adamw", seed=8)
        fns.train(second, 1)
        assert second.optimizer is not None
        held = {id(v) for s in second.optimizer.state.values() for v in s.values()}
        assert checkpoints.resume(second, 3) is not None
        assert held == {id(v) for s in second.optimizer.state.values() for v in s.values()}
        fns.assert_same_bits(fns.bits(second), at_save)
        assert checkpoints.resume(second, 0) is not None
        assert not any(second.optimizer.state.values())


def mesh_of(world_size: int) -> str:
    return f"mesh of {world_size}"


@pytest.mark.parametrize("optimizer", ["adamw", *nightly("adagrad", "master")])
def test_tensors_survive_other_world_sizes(
    ranks: RankPool, tmp_path: Path, gpt2: str, optimizer: str
) -> None:
    model_dir = gpt2 if optimizer == "adamw" else None
    saved, settings, before, digest = None, None, 0, ""
    for step, world_size in enumerate((2, 3, 1, 2, 2), 1):
        by_rank = ranks.run_ranks(
            world_size, fns.next_stage, str(tmp_path), step, model_dir, optimizer, train_on=step < 4
        )
        report, resumed, now, found = by_rank[0]
        assert all(r[1:3] == (resumed, now) for r in by_rank)
        if saved is not None:
            assert resumed == saved, [k for k in saved if resumed.get(k) != saved[k]]
            assert settings is None or str(found) == str(settings)
            assert (report["saved_world_size"], report["world_size"]) == (before, world_size)
            assert report["exact"] is (before == world_size)
            assert (report["saved_mesh"], report["mesh"]) == (mesh_of(before), mesh_of(world_size))
            assert step != 5 or report["digest"] == digest, "nothing was trained between"
            digest = report["digest"]
            if before != world_size:
                assert report["differences"][0] == f"world size: {before} when saved, {world_size} now"
                assert f"step {step - 1}, rank 0" in report["rng"]
        saved, before = now, world_size
        settings = found if step >= 4 else None  # where nothing was trained, the schedule stood still
    assert len(saved) > 20
