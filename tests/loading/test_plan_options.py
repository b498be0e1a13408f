"""plan takes what load_pretrained takes: a class, renames, declarations, adapters, a part of a repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise.cli import main
from tests.harness import models
from tests.harness.command import runner

#: The text part of the tiny LLaVA, as its files name it.
TEXT_PART: dict[str, Any] = {
    "key_mapping": {r"^language_model\.": ""},
    "allow_unused": ("vision*", "multi*"),
}


def _plan(*arguments: str, status: int = 0) -> Any:
    result = runner().invoke(main, ["plan", *arguments, "--ranks", "3", "--json"])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def _as_arguments(options: dict[str, Any]) -> list[str]:
    renames = [word for pair in options["key_mapping"].items() for word in ("--key-mapping", *pair)]
    return renames + [word for pattern in options["allow_unused"] for word in ("--allow-unused", pattern)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plan")
    models.write_hub_directory("llava", root / "llava", torch.float32)
    models.write_hub_directory("qwen3", root / "qwen3", torch.bfloat16)
    return root


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "transformers:LlamaForCausalLM", "shardwise_plan_test:Own"]
)
def test_the_text_part_of_a_vision_language_model(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from transformers import LlamaForCausalLM

    (tmp_path / "shardwise_plan_test.py").write_text(
        "from transformers import LlamaForCausalLM\nclass Own(LlamaForCausalLM): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = str(directory / "llava")
    whole, part = _plan(path), _plan(path, "--auto-class", name, *_as_arguments(TEXT_PART))
    model, report = sw.load_pretrained(path, auto_class=LlamaForCausalLM, **TEXT_PART, return_report=True)
    assert part["model_class"] == name.rpartition(":")[2]
    assert part["model_bytes"] == report.model_bytes == sum(t.nbytes for t in model.state_dict().values())
    assert part["model_bytes"] < whole["model_bytes"]
    assert {d["declared_by"] for d in part["unused"]} == {"caller"}
    assert len(part["unused"]) == len(report.unused) > 0


def test_a_class_that_is_not_there(directory: Path) -> None:
    for name, word in (
        ("NoSuch", "no model class 'NoSuch'"),
        ("no.such:Model", "can't be imported"),
        ("os:path", "os"),
    ):
        assert word in _plan(str(directory / "qwen3"), "--auto-class", name, status=2)["error"]["message"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT's use of it
@pytest.mark.parametrize("kind", ["new", "stored"])
def test_lora(directory: Path, tmp_path: Path, kind: str) -> None:
    """The adapter's bytes count, whether it is read or initialized; without its files it is a new one."""
    import peft

    path = str(directory / "qwen3")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model, loaded = sw.load_pretrained(path, adapter=config, return_report=True)
    model.save_pretrained(tmp_path)
    if kind == "new":
        (tmp_path / "adapter_model.safetensors").unlink()
    found = _plan(path, "--adapter", str(tmp_path))
    adapters = sum(p.nbytes for n, p in model.named_parameters() if "lora_" in n)
    assert adapters > 0
    assert found["model_bytes"] == loaded.model_bytes == _plan(path)["model_bytes"] + adapters
    assert len(found["initialized"]) == (len(loaded.initialized) if kind == "new" else 0)
    assert found["model_class"] == "Qwen3ForCausalLM"


def test_declarations_and_a_variant(directory: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "config.json").write_bytes((directory / "qwen3" / "config.json").read_bytes())
    state = load_file(directory / "qwen3" / "model.safetensors")
    del state["lm_head.weight"]
    save_file({**state, "left.over": torch.ones(3)}, inner / "model.fp16.safetensors")
    place = (str(tmp_path), "--subfolder", "inner", "--variant", "fp16")
    problems = "\n".join(_plan(*place, status=1)["error"]["problems"])
    assert "lm_head.weight" in problems
    assert "left.over" in problems
    found = _plan(*place, "--allow-missing", "lm_head.*", "--allow-unused", "left.*")
    assert [d["name"] for d in found["initialized"]] == ["lm_head.weight"]
    assert [d["name"] for d in found["unused"]] == ["left.over"]
    report = sw.plan(
        tmp_path,
        ranks=3,
        subfolder="inner",
        variant="fp16",
        allow_missing=("lm_head.*",),
        allow_unused=("left.*",),
    )
    assert report.to_json()["model_bytes"] == found["model_bytes"]
