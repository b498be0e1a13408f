"""Case 13: a parameter that never got a gradient (text-only training of a model that can see) resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.checkpoint import _resume_fns as fns
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_rows


def no_gradient(root: str, optimizer: str) -> dict[str, list[str]]:
    """Save without state for the vision tower, resume, then train the tower too."""
    fns.scramble(31)
    first = fns.build(optimizer)
    fns.train(first, 3)
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(first, 3)
        at_save = fns.bits(first)
        second = fns.build(optimizer, seed=5)
        report = checkpoints.resume(second)
    assert report is not None
    assert report.exact
    fns.assert_same_bits(fns.bits(second), at_save)
    with_state = sorted({name.split()[1] for name in at_save if name.startswith("optimizer")})
    # What had no state gets its first step like any other parameter, on both lines alike.
    losses = []
    for state in (first, second):
        torch.manual_seed(7)
        x, pixels = torch.randn(4, fns.WIDTH), torch.randn(4, 5)
        loss = state.model(x, pixels).square().mean()
        fns.advance(state, loss)
        losses.append(loss.item())
    assert losses[0] == losses[1]
    fns.assert_same_bits(fns.bits(second), fns.bits(first))
    assert sw.verify(Path(root, "step-00000003")).ok
    return {"with state": with_state}


@pytest.mark.parametrize(
    ("world_size", "optimizer"), [(2, "adamw"), *nightly_rows((1, "adamw"), (2, "sgd"), (2, "adagrad"))]
)
def test_resumes(ranks: RankPool, tmp_path: Path, world_size: int, optimizer: str) -> None:
    for found in ranks.run_ranks(world_size, no_gradient, str(tmp_path), optimizer):
        towers = [name for name in found["with state"] if name.startswith("vision")]
        if optimizer == "adagrad":  # its state is made with the optimizer, for every parameter
            assert len(towers) == 4
        else:
            assert towers == []
        assert "blocks.0.up.weight" in found["with state"]
