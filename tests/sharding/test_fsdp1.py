"""FSDP1 and pipeline stages are named as such, with the way out."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.harness.pool import RankPool
from tests.sharding import _fsdp1_fns as fns


def test_is_named(ranks: RankPool, tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4)}, tmp_path / "model.safetensors")
    for found in ranks.run_ranks(2, fns.attempts, str(tmp_path), str(tmp_path / "saved"), timeout_s=60):
        assert found.keys() == {"load True", "save True", "load False", "save False", "stage"}
        for name, error in found.items():
            if name == "stage":
                assert "sw.declare_part(model), for pipeline stages" in error
            else:
                assert "FSDP1" in error, name
                assert "fully_shard" in error, name
