"""Adapters whose files use other names or another vocabulary than the base: read as PEFT reads them, or one error that says how."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import shardwise as sw

TOKENS, MORE = 100, 104
IDS = torch.arange(90, TOKENS)[None]
pytestmark = pytest.mark.filterwarnings(  # PEFT's
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",  # 0.18
)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=TOKENS, **sizes, **heads, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(root)
    return root


def resized(base: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(MORE, mean_resizing=False)
    return model


def write_adapter(model: Any, path: Path, kind: str) -> Path:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **KINDS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it stores the embeddings, which is the point
        peft.get_peft_model(model, config).save_pretrained(path)
    return path


def rename(adapter: Path, changed: Mapping[str, str]) -> None:
    file = adapter / "adapter_model.safetensors"

    def new(name: str) -> str:
        for old, text in changed.items():
            name = name.replace(old, text)
        return name

    save_file({new(n): t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_adapter(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter", "plain")


def test_names_of_a_compiled_model(base: Path, adapter: Path) -> None:
    expected = logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))
    rename(adapter, {".layers.0.": ".layers.0._orig_mod."})
    model, report = sw.load_pretrained(base, adapter=adapter, return_report=True)
    assert not report.initialized
    assert torch.equal(logits(model), expected)


def test_key_mapping_reaches_adapters(base: Path, adapter: Path) -> None:
    expected = logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))
    rename(adapter, {"base_model.model.model.": "base_model.model.backbone."})
    with pytest.raises(sw.errors.PlanError) as refused:
        sw.load_pretrained(base, adapter=adapter)
    missing = [line for line in refused.value.problems if line.startswith("missing")]
    assert missing
    for line in missing:
        assert f"expected in {adapter}" in line
        assert "key_mapping=" in line
        assert "allow_missing" not in line
    model, report = sw.load_pretrained(
        base, adapter=adapter, key_mapping={r"^backbone\.": "model."}, return_report=True
    )
    assert not report.initialized
    assert torch.equal(logits(model), expected)


def test_two_names_for_one_tensor_are_an_error(base: Path, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    state = load_file(file)
    name = next(iter(state))
    save_file({**state, name.replace(".layers.0.", ".layers.0._orig_mod."): state[name] + 1}, file)
    with pytest.raises(sw.errors.PlanError, match="_orig_mod"):
        sw.load_pretrained(base, adapter=adapter)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_with_new_tokens(base: Path, tmp_path: Path, kind: str) -> None:
    adapter = write_adapter(resized(base), tmp_path / "adapter", kind)
    ids = torch.arange(90, MORE)[None]
    expected = logits(peft.PeftModel.from_pretrained(resized(base), adapter), ids)
    with pytest.raises(sw.errors.PlanError, match=rf"load_pretrained\(…, vocab_size={MORE}\)"):
        sw.load_pretrained(base, adapter=adapter)
    model, report = sw.load_pretrained(base, adapter=adapter, vocab_size=MORE, return_report=True)
    assert not report.initialized
    assert not report.grown, "the adapter has all tokens"
    assert torch.equal(logits(model, ids), expected)


def test_more_tokens_than_stored(base: Path) -> None:
    """The advice is one that works: it is carried out here."""
    config = AutoConfig.from_pretrained(base)
    config.vocab_size = MORE
    with pytest.raises(sw.errors.PlanError) as refused:
        sw.load_pretrained(base, config=config)
    assert len(refused.value.problems) == 2
    for line in refused.value.problems:
        assert f"if its other rows are new: load_pretrained(…, vocab_size={MORE}), or load," in line
    sw.load_pretrained(base, vocab_size=MORE)


def test_a_saved_resized_model_loads(base: Path, tmp_path: Path) -> None:
    model = resized(base)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == MORE
    loaded = sw.load_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
