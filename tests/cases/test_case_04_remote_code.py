"""Case 4: the text part of a vision-language mixture of experts, in a class that the directory brings along."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardwise as sw
from tests.cases import _case_04_fns as fns
from tests.cases._fns import MIB
from tests.harness.pool import RankPool
from tests.harness.remote_model import write_text_model

#: As the error proposes, and what is not part of the text model.
OPTIONS = {"key_mapping": {r"^model\.language_model\.": "model."}, "allow_unused": ("model.visual.*",)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 200 MiB, nearly all of it experts."""
    found = tmp_path_factory.mktemp("vlm") / "model"
    sizes = {"num_experts": 16, "hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 8}
    write_text_model(found, **sizes)
    return found


def test_the_plan_says_it_before_the_run(directory: Path) -> None:
    plan = sw.plan(directory, ranks=4, trust_remote_code=True, **OPTIONS)
    assert plan.model_class == "OwnTextForCausalLM"
    assert plan.largest_group.name.startswith("model.layers.")
    experts = 16 * 3 * 256 * 512 * 4
    assert experts <= plan.largest_group.gathered_bytes < 1.1 * experts
    assert plan.max_shard_bytes < 1.01 * plan.model_bytes / 4
    assert plan.total_bytes_read == plan.model_bytes


def test_ranks_hold_their_shards_only(ranks: RankPool, directory: Path) -> None:
    costs = ranks.run_ranks(2, fns.load_text_part, str(directory), OPTIONS, timeout_s=170)
    for cost in costs:
        assert cost["class"] == "OwnTextForCausalLM"
        assert cost["experts"] == 2 * 8
        assert cost["model"] > 190 * MIB
        assert cost["after"] <= cost["shard"] + 32 * MIB, cost
        assert cost["peak"] <= cost["shard"] + 64 * MIB < cost["model"], cost
    assert sum(c["shard"] for c in costs) < 1.01 * costs[0]["model"]
    assert sum(c["read"] for c in costs) <= 1.02 * costs[0]["model"]


@pytest.mark.needs(
    "transformers>=5.3",
    "writes the experts of Qwen3-VL one by one: the prefix is not their only change",
)
def test_the_wrapper_s_prefix_is_named(ranks: RankPool, directory: Path) -> None:
    first, second = ranks.run_ranks(2, fns.undeclared, str(directory))
    assert first == second
    prefix, *rest = first
    assert f"key_mapping={OPTIONS['key_mapping']!r}" in prefix
    assert len(rest) == 1
    assert "'model.visual.*'" in rest[0]


def test_ranks_with_other_code_are_one_error(ranks: RankPool, directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    shutil.copytree(directory, other)
    text = (other / "text.py").read_text()
    (other / "text.py").write_text(text.replace("torch.ones(1))", "torch.ones(1)[:, None])"))
    directories = [str(directory), str(directory), str(other)]
    errors = ranks.run_ranks(3, fns.other_code_on_one_rank, directories, OPTIONS)
    assert len(set(errors)) == 1
    assert "rank 2" in errors[0]
    assert "'gain' expects shape [1, 1]" in errors[0]
    assert "rank 1" not in errors[0]
