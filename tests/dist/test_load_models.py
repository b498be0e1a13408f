"""load_pretrained(): bit for bit what from_pretrained gives, only sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import models
from tests.dist import _load_fns as fns
from tests.harness.pool import RankPool

#: Every kind in fp32; the other dtypes where they make a difference (T5 keeps some modules in fp32).
DIRECTORIES = (
    *((kind, torch.float32) for kind in models.KINDS),
    ("qwen3", torch.bfloat16),
    ("qwen3", torch.float16),
    ("qwen3-tied", torch.bfloat16),
    ("gemma", torch.bfloat16),
    ("t5", torch.float16),
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("hub")
    found = []
    for kind, dtype in DIRECTORIES:
        found.append(str(root / f"{kind}-{str(dtype).removeprefix('torch.')}"))
        models.write_hub_directory(kind, Path(found[-1]), dtype)
    several = root / "qwen3-several-files"
    models.write_hub_directory("qwen3", several, torch.float32, max_shard_size="8KB")
    assert len(list(several.glob("*.safetensors"))) > 3
    return [*found, str(several)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_the_ordinary_load(ranks: RankPool, directories: list[str], world_size: int) -> None:
    ranks.run_ranks(world_size, fns.pretrained_equals_ordinary, directories, timeout_s=160)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_another_dtype(ranks: RankPool, directories: list[str], dtype: torch.dtype) -> None:
    chosen = [d for d in directories if Path(d).name in ("qwen3-bfloat16", "t5-float32", "gemma-float32")]
    assert len(chosen) == 3
    ranks.run_ranks(3, fns.pretrained_equals_ordinary, chosen, dtype=dtype)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_real_minilm(ranks: RankPool, world_size: int) -> None:
    ranks.run_ranks(world_size, fns.pretrained_equals_ordinary, [str(models.minilm_directory())])


def test_without_a_mesh(ranks: RankPool, directories: list[str]) -> None:
    ranks.run_ranks(2, fns.pretrained_on_every_rank_alone, directories[0])


def test_renames_of_a_model_that_is_already_sharded(ranks: RankPool, directories: list[str]) -> None:
    (llava,) = [d for d in directories if Path(d).name.startswith("llava")]
    ranks.run_ranks(2, fns.renames_of_a_sharded_class, llava)


# Turn over when the conversions of stored experts are supported: then it loads like the rest.
MOE_OUTCOME = "UnsupportedConversionError"


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_experts_stored_one_by_one(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    models.write_hub_directory(kind, tmp_path, torch.float32)
    outcomes = ranks.run_ranks(2, fns.moe_outcome, str(tmp_path))
    assert [kind for kind, _ in outcomes] == [MOE_OUTCOME] * 2
    assert len(set(outcomes)) == 1
    if MOE_OUTCOME != "loaded":
        text = outcomes[0][1]
        for expert in range(3):
            assert f".experts.{expert}." in text, text
        assert "mlp.experts.gate_up_proj" in text
