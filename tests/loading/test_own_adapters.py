"""An adapter in the directory that load_pretrained is given: alone, or with its base. As from_pretrained takes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import shardwise as sw
from shardwise.errors import SourceError

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated",  # PEFT asks for it
    "ignore:Could not find a config file in  - will assume:UserWarning",  # PEFT 0.18, of a base without a directory
)
IDS = torch.arange(8)[None]
CONFIG = "adapter_config.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """``base``, ``other`` (a base with other weights), ``adapter`` (of ``base``), ``both`` (``other`` with it)."""
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    for seed, name in enumerate(("other", "base")):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(tmp_path / name)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    name_base(tmp_path / "adapter", str(tmp_path / "base"))
    shutil.copytree(tmp_path / "other", tmp_path / "both")
    for file in (CONFIG, "adapter_model.safetensors"):
        shutil.copy(tmp_path / "adapter" / file, tmp_path / "both")
    return tmp_path


def name_base(adapter: Path, base: str | None) -> None:
    file = adapter / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def test_the_base_in_the_adapter_s_directory(root: Path) -> None:
    """It counts, whatever the adapter says it was trained on."""
    other = AutoModelForCausalLM.from_pretrained(root / "other")
    expected = peft.PeftModel.from_pretrained(other, root / "adapter")
    assert torch.equal(logits(sw.load_pretrained(root / "both")), logits(expected))


_BOTH = pytest.mark.needs("transformers>=5.8", "loads the base that the adapter was trained on")


@pytest.mark.parametrize("name", [pytest.param("both", marks=_BOTH), "adapter"])
def test_the_logits_of_from_pretrained(root: Path, name: str) -> None:
    expected = AutoModelForCausalLM.from_pretrained(root / name)
    assert not torch.equal(logits(expected), logits(sw.load_pretrained(root / "base")))
    model, report = sw.load_pretrained(root / name, return_report=True)
    assert isinstance(model, peft.PeftModel)
    assert torch.equal(logits(model), logits(expected))
    assert report.ignored_files == ()
    assert (
        sum("lora_" in n for n in model.state_dict()) == sum("lora_" in n for n in expected.state_dict()) == 2
    )
    planned = sw.plan(root / name, ranks=1)
    assert planned.tensors == report.tensors
    base = root / {"both": "both", "adapter": "base"}[name]
    assert model.name_or_path == str(base)


def test_a_pickled_adapter(root: Path) -> None:
    state = load_file(root / "both" / "adapter_model.safetensors")
    torch.save(state, root / "both" / "adapter_model.bin")
    (root / "both" / "adapter_model.safetensors").unlink()
    base = AutoModelForCausalLM.from_pretrained(root / "other")
    expected = peft.PeftModel.from_pretrained(base, root / "both")  # transformers does not look for it
    model, report = sw.load_pretrained(root / "both", return_report=True)
    assert torch.equal(logits(model), logits(expected))
    assert report.ignored_files == ()


def test_the_base_alone_by_an_empty_mapping(root: Path) -> None:
    model, report = sw.load_pretrained(root / "both", adapter={}, return_report=True)
    assert type(model) is Qwen3ForCausalLM
    assert torch.equal(logits(model), logits(sw.load_pretrained(root / "other")))
    assert report.ignored_files == ("adapter_model.safetensors",)
    assert sw.plan(root / "both", ranks=1, adapter={}).tensors == report.tensors
    converted = sw.convert(root / "both", root / "step")
    assert any(line.startswith("adapter_model.safetensors: ") for line in converted.skipped)


def test_a_given_adapter_goes_first(root: Path) -> None:
    new = peft.LoraConfig(r=2, target_modules=["k_proj"])
    model, report = sw.load_pretrained(root / "both", adapter=new, return_report=True)
    assert any("k_proj.lora_A" in n for n in model.state_dict())
    assert not any("q_proj.lora_A" in n for n in model.state_dict())
    assert report.ignored_files == ("adapter_model.safetensors",)


def test_an_adapter_whose_base_is_not_there(root: Path) -> None:
    for base, words in (
        (str(root / "gone"), ("of the base model", str(root / "gone"), "adapter=")),
        ("tiny/gone", ("of the base model 'tiny/gone'", "adapter=")),
        (None, ("names no base model", "load_pretrained(BASE, adapter=")),
    ):
        name_base(root / "adapter", base)
        with pytest.raises(SourceError) as caught:
            sw.load_pretrained(root / "adapter", cache_dir=root / "cache", local_files_only=True)
        for word in words:
            assert word in str(caught.value)
        with pytest.raises(SourceError, match="adapter="):
            sw.plan(root / "adapter", ranks=1, cache_dir=root / "cache", local_files_only=True)
        model = sw.load_pretrained(root / "base", adapter=root / "adapter")
        assert isinstance(model, peft.PeftModel)


def test_an_adapter_in_a_snapshot_of_the_hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' rule a model of the hub with an adapter is that of the base that the adapter names."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("both", "adapter", "base"):
        repository = root / "cache" / f"models--tiny--{name}"
        shutil.copytree(root / name, repository / "snapshots" / ("b" * 40))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("b" * 40)
        if name != "base":
            name_base(repository / "snapshots" / ("b" * 40), "tiny/base")
    place: dict[str, Any] = {"cache_dir": str(root / "cache"), "local_files_only": True}
    for name in ("both", "adapter"):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root / "cache"))
        expected = AutoModelForCausalLM.from_pretrained(f"tiny/{name}", **place)
        model = sw.load_pretrained(f"tiny/{name}", **place)
        assert torch.equal(logits(model), logits(expected))
        assert model.name_or_path == "tiny/base"
