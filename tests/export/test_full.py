"""iter_full(): what an export would write, tensor by tensor, at every layout; errors alike, memory bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.export import _full_fns as fns
from tests.harness import models
from tests.harness.pool import RankPool

KINDS = ("qwen3-moe", "mixtral", "qwen3-tied", "llava")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("full")
    for kind in KINDS:
        models.write_hub_directory(kind, found / kind, torch.bfloat16)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_hub_names_are_what_the_export_writes(ranks: RankPool, root: Path, world_size: int) -> None:
    orders = ranks.run_ranks(world_size, fns.as_exported, KINDS, str(root))
    assert all(order == orders[0] for order in orders), "ranks must give tensors in one order"
    moe, _, tied, _ = orders[0]
    assert any("experts.2." in name for name in moe), "stacked experts come apart again"
    assert "lm_head.weight" not in tied


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_any_module_in_any_layout(ranks: RankPool, world_size: int) -> None:
    ranks.run_ranks(world_size, fns.odd_layouts)


def test_all_ranks_may_stop_early(ranks: RankPool, root: Path) -> None:
    ranks.run_ranks(2, fns.stop_early, str(root / "qwen3-moe"))


def test_failures_are_everybodys(ranks: RankPool, root: Path) -> None:
    results = ranks.run_ranks(2, fns.fails, str(root / "qwen3-tied"), str(root))
    assert results[0] == results[1]
    broken, unlike, meta, alone = results[0]
    assert broken[0] == "RankError"
    assert "rank 1: MemoryError: no room" in broken[1]
    assert unlike[0] == "RankError"
    assert "rank 1: differs from rank 0" in unlike[1]
    assert meta[0] == "StateError"
    assert "load the model first" in meta[1]
    assert alone[0] == "RankError"
    assert "rank 1: no progress for 2 s" in alone[1]


def test_adapters(ranks: RankPool, root: Path, tmp_path: Path) -> None:
    for kind, text in ranks.run_ranks(
        2, fns.hand_over_adapter, str(root / "qwen3-tied"), str(tmp_path / "a")
    ):
        assert kind == "CheckpointError"
        assert "naming='adapter'" in text


def test_memory_is_the_bucket_and_a_tensor(ranks: RankPool) -> None:
    results = ranks.run_ranks(2, fns.memory)
    assert results[0]["digest"] == results[1]["digest"]
    for result in results:
        if result["added"] is not None:
            assert result["added"] <= (8 + 1 + 6) * 2**20, "bucket, largest tensor, and what gloo takes"
