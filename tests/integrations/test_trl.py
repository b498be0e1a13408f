"""TRL's DPO, KTO, GRPO and RLOO trainers with FSDP2: references by shards, the loss of plain TRL, resume, export."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.harness.models import build_reference
from tests.harness.pool import RankPool
from tests.integrations import _trl_fns as fns

pytestmark = pytest.mark.needs("trainer")

#: (step, loss, gradient norm) of each step.
History = list[tuple[int, float, float]]
Histories = dict[str, History]
BETA = 0.5


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub")
    build_reference("qwen3").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapter(hub: Path) -> Path:
    """As if trained: its B is not zero."""
    import peft
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    path = hub / "adapter"
    with fns.known_warnings():
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(hub), config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def alone(ranks: RankPool, hub: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Histories:
    """Plain TRL on one rank, and ours."""
    root = tmp_path_factory.mktemp("alone")
    found = ranks.run_ranks(1, fns.alone, str(hub), str(adapter), str(root), BETA, timeout_s=100)[0]
    return found  # type: ignore[no-any-return]


def assert_close(found: History, expected: History) -> None:
    assert len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.nightly
def test_dpo(ranks: RankPool, hub: Path, alone: Histories, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert alone["ours dpo"] == alone["dpo"]
    found = ranks.run_ranks(2, fns.dpo, str(hub), str(tmp_path), timeout_s=200)[0]
    for name in ("left out", "cloned", "loaded", "by mesh"):
        assert_close(found[name], alone["dpo"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dpo" / "run" / "export")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, found["after"][name]), name


@pytest.mark.slow
def test_dpo_with_lora(ranks: RankPool, hub: Path, adapter: Path, alone: Histories, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    found = ranks.run_ranks(2, fns.lora, str(hub), str(adapter), str(tmp_path), timeout_s=200)[0]
    assert found["losses"][0][1] == pytest.approx(math.log(2)), "the reference is the adapter as it was"
    assert_close(found["losses"], alone["lora"])
    assert found["kl"][0] == pytest.approx(0, abs=1e-6)
    with fns.known_warnings():
        base = AutoModelForCausalLM.from_pretrained(hub)
        model = peft.PeftModel.from_pretrained(base, tmp_path / "lora" / "run" / "export")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, found["after"][name]), name


@pytest.mark.nightly
def test_grpo(ranks: RankPool, hub: Path, alone: Histories, tmp_path: Path) -> None:
    assert alone["ours grpo"] == alone["grpo"]
    found = ranks.run_ranks(2, fns.grpo, str(hub), str(tmp_path), BETA, timeout_s=200)[0]
    assert len(found["lengths"]) > 1
    assert found["kl"][0] == 0.0
    assert found["kl"][-1] > 0.0
    sole = ranks.run_ranks(1, fns.elsewhere, str(hub), str(tmp_path), BETA, timeout_s=100)[0]
    assert not sole["exact"]
    assert any("extra.completions" in line for line in sole["left"])
    assert sole["steps"] == 6
    assert sole["step"] == 12, "rounds of generation go on where they were"


@pytest.mark.nightly
def test_references_are_clones_of_shards(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    ranks.run_ranks(2, fns.references, str(hub), str(tmp_path), timeout_s=200)


def test_what_cannot_be_had_is_named(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    results = ranks.run_ranks(2, fns.refused, str(hub), str(tmp_path), timeout_s=100)
    assert results[0] == results[1]
    found = results[0]
    for name, words in (
        ("precompute", "args.precompute_ref_log_probs can't be had with a sharded model"),
        ("sync", "args.sync_ref_model"),
        ("cast", "args.cast_lm_head_to_fp32"),
        ("batching", "args.use_transformers_"),
        ("unsharded dpo", "loaded whole on every rank"),
        ("unsharded grpo", "integrations.trainer.load_pretrained(args, path)"),
        ("saved", "modules_to_save"),
        ("dora", "use_dora"),
    ):
        assert found[name].startswith("ShardError: "), (name, found[name])
        assert words in found[name], (name, found[name])
