"""Every format in every layout: the shards are bitwise those of the tensors that the format's own library dequantizes, cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but
from tests.quantized import _expert_fns
from tests.quantized._layout_fns import different
from tests.quantized._made import (
    dequantized_twin,
    fp8_directory,
    gpt_oss_directory,
    quantized_directories,
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Quantized directories, each with a plain one that holds what the library makes of it."""
    root = tmp_path_factory.mktemp("quantized")
    found = quantized_directories(root)
    twins = [(quantized, root / "plain" / str(k)) for k, quantized in enumerate(found)]
    for quantized, plain in twins:
        dequantized_twin(quantized, plain)
    return [(str(quantized), str(plain)) for quantized, plain in twins]


@pytest.mark.parametrize("world_size", nightly_but((1, 2, 3, 4, 5), 3))
def test_every_layout(world_size: int, pairs: list[tuple[str, str]], ranks: RankPool) -> None:
    found = ranks.run_ranks(world_size, different, pairs, ["bfloat16"], timeout_s=500)
    for cases, wrong in found:
        assert cases >= len(pairs) * 2
        assert not wrong, wrong[:5]


@pytest.mark.needs("plans")
@pytest.mark.parametrize("world_size", nightly_but((2, 4), 2))
def test_experts_over_ranks(world_size: int, tmp_path: Path, ranks: RankPool) -> None:
    """transformers' expert parallelism: FP8 experts that are stored one by one, and gpt-oss' in MXFP4."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "moe")
    fp8_directory(tmp_path / "moe", tmp_path / "fp8", (8, 8))
    gpt_oss_directory(tmp_path / "gpt-oss", experts=4)
    pairs = []
    for name in ("fp8", "gpt-oss"):
        dequantized_twin(tmp_path / name, tmp_path / "plain" / name)
        pairs.append((str(tmp_path / name), str(tmp_path / "plain" / name)))
    for found in ranks.run_ranks(world_size, _expert_fns.like_the_plain_model, pairs, timeout_s=300):
        assert len(found) == (4 if world_size == 2 else 8)
        assert all(held * world_size == total for held, total, _ in found)
