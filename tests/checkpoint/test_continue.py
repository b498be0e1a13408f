"""Continue against resume: 20 steps past the save, bitwise, in the middle of an epoch and of an accumulation."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.checkpoint import _continue_fns as fns
from tests.checkpoint._continue_fns import Recipe
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but

RECIPES = {
    "adamw, workers": Recipe("adamw", workers=2),
    "sgd, workers": Recipe("sgd", workers=2),
    "adagrad, workers": Recipe("adagrad", workers=2),
    "no workers": Recipe("adamw"),
    "adamw, scaler": Recipe("adamw", scaled=True),
    "sgd, scaler, in a cycle": Recipe("sgd", scaled=True, accumulate=3),
    "adamw, in a cycle, behind": Recipe("adamw", accumulate=2, mode="async"),
    "adagrad, in a cycle, workers": Recipe("adagrad", workers=2, accumulate=4, saved_after=7),
    "elastic": Recipe("adamw", loader="elastic", saved_after=3),
    "elastic, workers, in a cycle": Recipe("adamw", loader="elastic", workers=2, accumulate=3, saved_after=4),
    "torchdata": Recipe("sgd", loader="stateful"),
    "torchdata, workers": Recipe("adamw", loader="stateful", workers=2),
}


@pytest.mark.parametrize(
    "name",
    nightly_but(
        RECIPES,
        "sgd, scaler, in a cycle",
    ),
)
def test_a_restored_copy_matches_the_run_that_went_on(ranks: RankPool, tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    by_rank = ranks.run_ranks(2, fns.continued_equals_resumed, str(tmp_path), recipe)
    for found in by_rank:
        assert len(found["losses"]) == fns.STEPS * recipe.accumulate
        assert len(set(found["losses"])) > fns.STEPS / 2, "it trains"
        assert found["gradients"] == ((10, 10) if recipe.in_cycle else (0, 0))
        assert bool(found["caveats"]) is (recipe.loader != "replayed" and recipe.workers > 0)
        if recipe.scaled:
            scales = [scale for scale, _ in found["scales"]]
            assert min(scales) < 2.0**17, "a step was skipped"
            assert any(b > a for a, b in pairwise(scales)), "the scale grew"
    if recipe.loader == "elastic":
        rows = list(zip(*(found["ids"] for found in by_rank), strict=True))
        epoch = [index for row in rows[:5] for part in row for index in part]
        assert sorted(epoch[:34]) == list(range(34))  # then it fills up with the first
    else:
        assert by_rank[0]["ids"] != by_rank[1]["ids"], "each rank shuffles by its own stream"
        for found in by_rank:
            epoch = [index for part in found["ids"][:9] for index in part]
            assert sorted(epoch) == list(range(34)), "a sample was repeated or skipped"


@pytest.mark.slow
def test_samples_and_gradients_go_on_at_other_world_sizes(ranks: RankPool, tmp_path: Path) -> None:
    """Twelve batches of twelve, three a step, saved in cycles and epochs: 2 → 3 → 1 → 4 ranks, against one run."""
    (whole,) = ranks.run_ranks(1, fns.stage, str(tmp_path / "whole"), 12, 0)
    reference = sw.ElasticSampler(range(fns.SAMPLES), global_batch_size=1, seed=4)
    expected = []
    for epoch in range(3):
        reference.set_epoch(epoch)
        order = [index for (index,) in reference]
        expected += [(epoch, (order[b:] + order)[: fns.GLOBAL_BATCH]) for b in range(0, fns.SAMPLES, 12)]
    assert whole["taken"] == expected[:12]

    taken, before = [], 0
    for world_size, batches, waiting in ((2, 4, 10), (3, 1, 10), (1, 3, 10), (4, 4, 0)):
        by_rank = ranks.run_ranks(world_size, fns.stage, str(tmp_path / "run"), batches, 2)
        for parts in zip(*(found["taken"] for found in by_rank), strict=True):
            assert len({epoch for epoch, _ in parts}) == 1
            taken.append((parts[0][0], [index for _, part in parts for index in part]))
        for found in by_rank:
            assert found["gradients"] == (before, waiting)
            assert found["local"] == [], "the position is stored once"
        before = waiting
    assert taken == expected[:12], "a sample was repeated, skipped or moved"
    for name, tensor in whole["full"].items():
        torch.testing.assert_close(by_rank[0]["full"][name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_a_cycle_that_is_finished_by_another_process_is_bitwise_the_same(
    ranks: RankPool, tmp_path: Path
) -> None:
    whole = ranks.run_ranks(2, fns.stage, str(tmp_path / "whole"), 11, 0)
    ranks.run_ranks(2, fns.stage, str(tmp_path / "run"), 7, 0)
    rest = ranks.run_ranks(2, fns.stage, str(tmp_path / "run"), 4, 0)
    for once, resumed in zip(whole, rest, strict=True):
        assert resumed["gradients"] == (10, 10)
        assert any(name.startswith("gradient") for name in resumed["resumed"])
        assert resumed["hashes"] == once["hashes"]


def test_gradients_that_are_not_reduced_yet_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.unreduced, str(tmp_path)):
        for kind in ("FSDP", "HSDP"):
            for call in ("save", "restore"):
                text = found[f"{kind} {call}"]
                assert text.startswith(("StateError", "RankError")), text
                assert "has not reduced the gradients" in text
                assert "Save and resume after the optimizer's step" in text
                assert "blocks.0.up.weight" in text or "head.weight" in text
            assert found[f"{kind} without optimizer"] == "nothing", "no loop goes on from these gradients"
            assert [found[f"{kind} {when}"] for when in ("reduced", "used", "onto used")] == [10, 0, 10]
    for text in ranks.run_ranks(2, fns.not_synced_by_ddp, str(tmp_path / "ddp")):
        assert "weight.__grad__" in text
        assert "no_sync" in text


def test_accelerates_optimizer_is_watched_inside(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run_ranks(1, fns.accelerated, str(tmp_path))
    assert found == [2, 0, 2, 0]
