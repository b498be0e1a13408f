"""PEFT: what can't be loaded or saved gives one clear error, the same on every rank, and changes nothing."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from tests.harness import models
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.harness.versions import lacking
from tests.loading import _peft_errors_fns as error_fns
from tests.loading import _peft_fns as fns

A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
HELD = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    fns.write_reference("lora", str(root))
    return root


def _variant(root: Path, case: str) -> Path:
    return Path(shutil.copytree(root / "adapter", root / case))


def _with_config(root: Path, case: str, **changes: Any) -> Path:
    file = _variant(root, case) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return file.parent


def _with_tensors(root: Path, case: str, **changes: Any) -> Path:
    file = _variant(root, case) / "adapter_model.safetensors"
    state = {n: t for n, t in (load_file(file) | changes).items() if t is not None}
    save_file(state, file)
    return file.parent


EXPECTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "no directory": ("SourceError", ("no directory: no such directory",)),
    "no config": ("SourceError", ("no config: no adapter_config.json",)),
    "no tensors": ("SourceError", ("no tensors: no adapter_model.safetensors",)),
    "pickled": ("FormatError", ("adapter_model.bin: not a torch.save file",)),
    "not a config": ("FormatError", ("adapter_config.json: not a config that PEFT can read",)),
    "other rank": ("PlanError", ("'default': r is 2 in", "but 4 in the model")),
    "other alpha": ("PlanError", ("'default': lora_alpha is 99 in", "but 8 in the model")),
    "mis-shaped": (
        "PlanError",
        (f"shape mismatch: '{HELD}' expects shape [4, 24], but 'default:{A}'", "[2, 24]"),
    ),
    "missing": ("PlanError", ("1 problems", f"missing: parameter '{HELD}'", "give key_mapping=")),
    "foreign": (
        "PlanError",
        ("1 problems", f"unused: stored tensor 'default:{A}x' [3]", "isn't used by the model"),
    ),
}


@pytest.mark.parametrize("world_size", [2, *nightly(3)])
def test_a_wrong_directory(ranks: RankPool, reference: Path, tmp_path: Path, world_size: int) -> None:
    root = Path(shutil.copytree(reference, tmp_path / "lora"))
    (_variant(root, "no config") / "adapter_config.json").unlink()
    (_variant(root, "no tensors") / "adapter_model.safetensors").unlink()
    pickled = _variant(root, "pickled") / "adapter_model.safetensors"
    pickled.rename(pickled.with_name("adapter_model.bin"))
    (_variant(root, "not a config") / "adapter_config.json").write_text('{"peft_type": "LORA", "bias": ')
    _with_config(root, "other rank", r=2)
    _with_config(root, "other alpha", lora_alpha=99)
    _with_tensors(root, "mis-shaped", **{A: torch.ones(2, 24)})
    _with_tensors(root, "missing", **{A: None})
    _with_tensors(root, "foreign", **{A + "x": torch.ones(3)})
    directories = {case: str(root / case) for case in EXPECTED}
    found = ranks.run_ranks(world_size, error_fns.refusals, str(root / "base"), directories)
    assert all(f == found[0] for f in found), "ranks raise different errors"
    for case, (kind, parts) in EXPECTED.items():
        assert found[0][case][0] == kind, (case, found[0][case])
        for part in parts:
            assert part in found[0][case][1], (case, found[0][case][1])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base's weights"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights='olora' changes the base's weights"),
    "loftq": (
        {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
        "='loftq' changes the base's",
    ),
    "orthogonal": (
        {"init_lora_weights": "orthogonal"},
        "='orthogonal' can't give the same values",
    ),
    "False": ({"init_lora_weights": False}, "=False can't give the same values"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices= is not supported"),
    "layers": ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication= is not supported"),
    "method": ({"kind": "IA3Config", "feedforward_modules": []}, "its method is IA3; only LoRA"),
}


def test_configs_without_a_sharded_form(ranks: RankPool, reference: Path) -> None:
    given = {case: {"target_modules": ["q_proj"], **settings} for case, (settings, _) in REFUSED.items()}
    found = ranks.run_ranks(2, error_fns.refused_configs, str(reference / "base"), given)
    assert found[0] == found[1]
    for case, (_, words) in REFUSED.items():
        assert found[0][case][0] == "PlanError", (case, found[0][case])
        assert words in found[0][case][1], (case, found[0][case])


@pytest.mark.needs("peft>=0.19", "converts no adapters: it names the modules that it does not find")
def test_an_adapter_that_has_to_be_fused(ranks: RankPool, tmp_path: Path) -> None:
    """Experts one by one, as transformers 4 had them: PEFT fuses them with zeros in between."""
    models.write_hub_directory("mixtral", tmp_path / "base", torch.float32)
    sizes = {"w1": (24, 40), "w2": (40, 24), "w3": (24, 40)}
    state = {}
    for layer, expert, (part, (width, height)) in product(range(2), range(3), sizes.items()):
        name = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}"
        state |= {
            f"{name}.lora_A.weight": torch.ones(4, width),
            f"{name}.lora_B.weight": torch.ones(height, 4),
        }
    models.write_state(state, tmp_path / "adapter", "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "target_modules": list(sizes), "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    found = ranks.run_ranks(2, error_fns.refused_adapter, str(tmp_path / "base"), str(tmp_path / "adapter"))
    assert found[0] == found[1]
    assert found[0][0] == "UnsupportedConversionError"
    assert "was trained on a class that has changed since" in found[0][1]
    can_not = (
        version("peft").startswith("0.19.")
        and lacking("transformers>=5.6", "takes PEFT 0.19's argument") is None
    )
    instead = (
        "pip install 'peft>=0.20'"
        if can_not
        else "load it with PEFT on one process, save it there, and load that"
    )
    assert instead in found[0][1]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
def test_an_adapter_beside_experts(tmp_path: Path) -> None:
    """Its names are the model's already: nothing is converted, which PEFT 0.19 can't do with transformers 5.6 or newer."""
    import peft
    from transformers import AutoModelForCausalLM

    models.write_hub_directory("qwen3-moe", tmp_path / "base", torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    model = sw.load_pretrained(tmp_path / "base", adapter=tmp_path / "adapter")
    live = {name.replace(".default", ""): p for name, p in model.named_parameters() if "lora" in name}
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert live.keys() == stored.keys()
    assert all(torch.equal(live[name], tensor) for name, tensor in stored.items())


def test_a_quantized_base(ranks: RankPool, reference: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(reference / "base", tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    found = ranks.run_ranks(2, error_fns.refused_configs, str(base), {"base": {"target_modules": ["q_proj"]}})
    assert found[0] == found[1]
    assert found[0]["base"][0] == "UnsupportedConversionError"
    assert "says that it is quantized (bitsandbytes)" in found[0]["base"][1]


def test_wrong_arguments_and_export(ranks: RankPool, tmp_path: Path) -> None:
    fns.write_reference("two", str(tmp_path))
    found = ranks.run_ranks(2, error_fns.other_refusals, str(tmp_path), str(tmp_path / "out"))
    assert found[0] == found[1]
    for case, words in {
        "one directory for two": "ValueError: the model has the adapters 'default', 'style'",
        "no such adapter": "ValueError: adapter= names 'stile'; the model has 'default', 'style'",
        "not PEFT's": "TypeError: adapter=: Linear is not a PeftModel",
        "not a config": "TypeError: adapter 'default' must be a PEFT config or a directory, got 3",
        "export": "CheckpointError: adapters were injected into this model, which is not a PeftModel",
        "save": "ValueError: adapters='stile': the model has the adapters 'default', 'style'",
        "again": "exists already",
        "other settings": "adapter 'style': r is 5 in adapter=, but 3 in the model",
        "nothing said of adapters": "PlanError",
        "no adapters": "ValueError: adapters= needs a model with PEFT adapters",
    }.items():
        assert words in found[0][case], (case, found[0][case])
    assert sorted(p.name for p in (tmp_path / "out").rglob("*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "style",
    ]
