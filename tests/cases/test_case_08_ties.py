"""Case 8: tied parameters stay tied, on meta and after training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases import _fns as fns
from tests.harness import models
from tests.harness.pool import RankPool


@pytest.mark.parametrize("how", ["shard", "one group", "not sharded"])
def test_a_plain_module(ranks: RankPool, tmp_path: Path, how: str) -> None:
    file = models.write_state(models.state_of(fns.finite_reference()), tmp_path)
    ranks.run_ranks(2, fns.ties_stay, str(file), how)


def test_a_transformers_model(ranks: RankPool, tmp_path: Path) -> None:
    models.write_hub_directory("qwen3-tied", tmp_path, torch.float32)
    ranks.run_ranks(2, fns.tied_transformers_model, str(tmp_path))
