"""Loads of quantized directories as callers make them: into a model of their own, with adapters, with tensors that look like scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import PlanError
from shardwise.quantized.open import dequantized
from tests.harness import models
from tests.quantized._made import decoded, fp8_directory, plain_tensors, whole
from tests.quantized.compressed_cases import CASES
from tests.quantized.compressed_models import write


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8")
    models.write_hub_directory("qwen3", root / "plain", torch.bfloat16)
    fp8_directory(root / "plain", root / "fp8", (4, 8))
    return root / "fp8"


def test_into_a_model_of_its_config(fp8: Path, tmp_path: Path) -> None:
    """The model is plain then, and says so where it is exported and saved."""
    config = transformers.AutoConfig.from_pretrained(fp8)
    with sw.meta_init():
        model = transformers.Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    report = sw.load(model, fp8)
    assert [one.format for one in report.dequantized] == ["FP8 (E4M3) in blocks of 4 x 8"]
    sw.export_hf(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    sw.save(sw.TrainState(model=model), tmp_path / "step")
    again = sw.load_pretrained(tmp_path / "step")
    expected = sw.load_pretrained(fp8)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
        assert torch.equal(tensor, again.state_dict()[name])


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT's use of it
def test_beneath_adapters(fp8: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2)
    model, report = sw.load_pretrained(fp8, adapter=lora, return_report=True)
    expected = sw.load_pretrained(fp8)
    assert report.dequantized
    base = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    assert torch.equal(base, expected.model.layers[0].self_attn.q_proj.weight)
    with sw.meta_init():
        config = transformers.AutoConfig.from_pretrained(fp8)
        bare: Any = transformers.Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
        wrapped = peft.get_peft_model(bare, lora)
    sw.load(wrapped, fp8, adapter=lora)
    assert torch.equal(bare.model.layers[0].self_attn.q_proj.base_layer.weight, base)


def test_a_tensor_of_the_model_that_is_called_like_a_scale(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8, bias=False)
            self.input_scale = nn.Parameter(torch.zeros(3))

    stored = {
        "inner.weight": torch.randn(8, 8).to(torch.float8_e4m3fn),
        "inner.weight_scale": torch.rand(8, 1),
        "input_scale": torch.full((3,), 9.0),
    }
    save_file(stored, tmp_path / "model.safetensors")
    model = Own()
    sw.load(model, tmp_path)
    assert torch.equal(model.input_scale, stored["input_scale"])
    assert torch.equal(model.inner.weight, stored["inner.weight"].float() * stored["inner.weight_scale"])


def test_a_single_code(tmp_path: Path) -> None:
    save_file(
        {"w": torch.tensor(1.5).to(torch.float8_e4m3fn), "w_scale": torch.tensor(3.0)},
        tmp_path / "a.safetensors",
    )
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(()))
    sw.load(model, tmp_path)
    assert model.w.item() == 4.5


def test_codes_that_a_config_says_are_scaled(fp8: Path, tmp_path: Path) -> None:
    """All scales are lost: the codes are no weights, also not of a model in FP8."""
    tensors = {n: t for n, t in plain_tensors(fp8).items() if not n.endswith("_scale_inv")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((fp8 / "config.json").read_text())
    name = "model.layers.0.self_attn.q_proj.weight"
    model = nn.Module()
    model.register_parameter(
        "w", nn.Parameter(torch.zeros(tensors[name].shape).to(torch.float8_e4m3fn), False)
    )
    with pytest.raises(PlanError, match="missing: scales of the FP8 codes"):
        sw.load(model, tmp_path, names={name: "w"}, allow_unused=("*",))


def test_an_order_of_columns_from_a_file(tmp_path: Path) -> None:
    """compressed-tensors' ``weight_g_idx`` is read when the source is opened."""
    write(tmp_path / "q", CASES["w4-group"][0], torch.bfloat16)
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    stem = "model.layers.0.mlp.up_proj.weight"
    columns = 32 * tensors[f"{stem}_scale"].shape[1]
    order = torch.randperm(columns) // 32
    save_file({**tensors, f"{stem}_g_idx": order.to(torch.int32)}, file, metadata={"format": "pt"})
    found = {one.tensor.name: one for one in dequantized(open_catalog(tmp_path / "q")).coded.values()}
    save_file(tensors, file, metadata={"format": "pt"})
    straight = {one.tensor.name: one for one in dequantized(open_catalog(tmp_path / "q")).coded.values()}
    box = whole(found[stem].tensor.shape)
    tensors[f"{stem}_g_idx"] = order.to(torch.int32)
    mixed, plain = (decoded(one[stem], tensors, box) for one in (found, straight))
    assert not torch.equal(mixed, plain)
    scales = tensors[f"{stem}_scale"]
    codes = plain / scales.repeat_interleave(32, 1)
    assert torch.equal(mixed, codes.round() * scales[:, order])


def test_plain_tensors_under_a_quantized_config(tmp_path: Path) -> None:
    """The error says what is wrong, and its advice works."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "vocab_size": 64,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    stored = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    stored.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))
    with pytest.raises(
        sw.errors.UnsupportedConversionError, match=r"quantized \(fp8\), but its tensors are plain"
    ):
        sw.load_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    del config.quantization_config
    model = sw.load_pretrained(tmp_path, config=config)
    for name, tensor in stored.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
