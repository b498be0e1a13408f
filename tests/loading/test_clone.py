"""clone(): a second, frozen model beside a sharded one, copied shard by shard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.export import _full_fns as fns
from tests.harness import models
from tests.harness.pool import RankPool

KINDS = ("qwen3-tied", "llava", "qwen3-moe")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("clone")
    for kind in KINDS:
        models.write_hub_directory(kind, found / kind, torch.bfloat16)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_as_the_first_is_now(ranks: RankPool, root: Path, world_size: int) -> None:
    ranks.run_ranks(world_size, fns.clone_of, KINDS if world_size == 2 else KINDS[:1], str(root))


def test_any_module_with_build(ranks: RankPool, root: Path) -> None:
    results = ranks.run_ranks(2, fns.clone_with_build, str(root / "qwen3-tied"))
    assert results[0] == results[1]
    unknown, unlike, own_way, peft = results[0]
    assert unknown[0] == "StateError"
    assert "Net is not a transformers model" in unknown[1]
    assert unlike[0] == "LayoutError"
    assert "extra.weight: in one of the two only" in unlike[1]
    assert own_way[0] == "ShardError"
    assert "Give build=" in own_way[1]
    assert peft[0] == "StateError"
    assert "disable_adapter()" in peft[1]


def test_as_an_accelerator_shards(ranks: RankPool, root: Path) -> None:
    ranks.run_ranks(2, fns.clone_of_accelerates, str(root / "qwen3-tied"))
