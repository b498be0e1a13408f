"""Case 2: every rank reads and holds its own part only, and initializes nothing that is then overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.cases import _fns as fns
from tests.cases._fns import MIB
from tests.harness import models
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3-like model of about a quarter GiB in fp32."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=32_001,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    directory = tmp_path_factory.mktemp("large")
    config.save_pretrained(directory)
    with sw.meta_init():
        model = transformers.Qwen3ForCausalLM(config)
    models.write_state({n: torch.rand(t.shape) for n, t in model.state_dict().items()}, directory)
    return str(directory)


@pytest.mark.parametrize("shape", [(4,), *nightly((2, 2))])
def test_what_a_load_costs(ranks: RankPool, tmp_path: Path, large: str, shape: tuple[int, ...]) -> None:
    models.write_hub_directory("qwen3", tmp_path, torch.float32)
    costs = ranks.run_ranks(4, fns.cost_of_a_load, str(tmp_path), large, shape)
    (total,) = {c["model"] for c in costs}
    assert 200 * MIB < total < 300 * MIB
    replicas = 4 // shape[-1]
    assert sum(c["shard"] for c in costs) == replicas * total
    for cost in costs:
        assert cost["peak"] <= cost["shard"] + 128 * MIB, cost
        assert cost["after"] <= cost["shard"] + 32 * MIB, cost
        assert cost["staging"] <= 128 * MIB
        assert cost["drawn"] == 0, "values were drawn only to be overwritten"
    assert sum(c["reported"] for c in costs) <= 1.02 * replicas * total, costs
    assert sum(c["read"] for c in costs) <= 1.02 * replicas * total, costs


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3-like mixture of experts of about a quarter GiB in fp32, its experts stored one by one."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=8_001,
        hidden_size=256,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="float32",
    )
    directory = tmp_path_factory.mktemp("experts")
    config.save_pretrained(directory)
    with sw.meta_init():
        model = transformers.Qwen3MoeForCausalLM(config)
    stored = {}
    for name, stacked in model.state_dict().items():
        path, _, projection = name.rpartition(".")
        if not path.endswith(".experts"):
            stored[name] = torch.rand(stacked.shape) * 0.05
            continue
        for part in ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",):
            for expert in range(config.num_experts):
                stored[f"{path}.{expert}.{part}.weight"] = torch.rand(256, 256) * 0.05
    models.write_state(stored, directory)
    return str(directory)


@pytest.mark.slow
def test_what_a_script_with_accelerate_costs(ranks: RankPool, tmp_path: Path, experts: str) -> None:
    """From its first line to its first step: the shard and at most 128 MiB, which a whole model would break."""
    models.write_hub_directory("qwen3-moe", tmp_path, torch.float32)
    costs = ranks.run_ranks(4, fns.cost_with_accelerate, str(tmp_path), experts)
    assert sum(c["shard"] for c in costs) == costs[0]["model"]
    for cost in costs:
        assert cost["model"] > cost["shard"] + 160 * MIB
        assert cost["peak"] <= cost["shard"] + 128 * MIB, cost
        assert cost["held"] <= cost["shard"] + 32 * MIB, cost
        assert cost["drawn"] == 0, "values were drawn only to be overwritten"
