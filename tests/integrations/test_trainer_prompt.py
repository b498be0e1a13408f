"""Prompt tuning of an HF Trainer on several ranks: what no rank can write for PEFT is left out on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.models import build_reference
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly, nightly_but
from tests.integrations import _trainer_prompt_fns as fns

pytestmark = pytest.mark.needs("trainer")

_SPLITS = pytest.mark.needs("accelerate!=1.14.*", "shards a tied head apart from its embedding")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # below from_pretrained
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", nightly_but(sorted(fns.KINDS), "prefix"))
@pytest.mark.parametrize("fsdp", [*nightly(False), pytest.param(True, marks=_SPLITS)], ids=["whole", "fsdp"])
def test_a_learned_prompt_on_two_ranks(ranks: RankPool, tmp_path: Path, kind: str, fsdp: bool) -> None:
    build_reference("qwen3-tied").save_pretrained(tmp_path / "hub")
    found = ranks.run_ranks(2, fns.train, str(tmp_path / "hub"), str(tmp_path), kind, fsdp, timeout_s=200)
    for rank in found:
        assert rank["exact"] == (True, ())
        assert rank["trained"].keys() == rank["resumed"].keys()
        assert all(torch.equal(value, rank["resumed"][name]) for name, value in rank["trained"].items())
        assert rank["refused"][0] == "UnsupportedConversionError", rank["refused"]
        assert rank["refused"] == found[0]["refused"]
        if not fsdp and kind != "encoder":  # what that computes is no tensor of the model
            name = "prompt_encoder.default.embedding.weight"
            assert torch.equal(rank["by PEFT"][name], rank["resumed"][name])
        assert not {"adapter_config.json", "adapter_model.safetensors"} & set(rank["beside"])
    assert len(found[0]["warnings"]) == 3, "two checkpoints, and one of the resume"
    assert not found[1]["warnings"], "said once"
