"""Quantized sources: what can't be dequantized is refused in one line, with the way to plain weights, before anything is planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import PlanError, ShardwiseError, UnsupportedConversionError
from tests.quantized._fp8_library import fp8_module

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "head_dim": 16,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

State = dict[str, torch.Tensor]


def _uint8(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _int32(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2**31 - 1, shape, dtype=torch.int32)


def _mxfp4(state: State, name: str) -> None:
    """As OpenAI stores gpt-oss: blocks of 32 codes, two a byte, with one exponent each."""
    experts, rows, columns = state.pop(name).shape
    state[f"{name}_blocks"] = _uint8(experts, columns, rows // 32, 16)
    state[f"{name}_scales"] = torch.randint(120, 128, (experts, columns, rows // 32), dtype=torch.uint8)


def _fp8(state: State, name: str) -> None:
    """As DeepSeek-V3 stores it, in smaller blocks."""
    state[name] = state[name].to(torch.float8_e4m3fn)
    rows, columns = state[name].shape
    state[f"{name}_scale_inv"] = torch.rand(rows // 32, columns // 32)


def _int8(state: State, name: str) -> None:
    """As no library that shardwise knows stores it."""
    state[name] = state[name].to(torch.int8)
    state[f"{name}_scale"] = torch.rand(state[name].shape[0], 1)


_FP8 = {"activation_scheme": "dynamic", "weight_block_size": [32, 32], "fmt": "e4m3"}

#: How a tensor is stored, and what config.json says.
FORMATS: dict[str, tuple[Callable[[State, str], None], dict[str, Any]]] = {
    "mxfp4": (_mxfp4, {"quant_method": "mxfp4"}),
    "fp8": (_fp8, {"quant_method": "fp8", **_FP8}),
    "int8": (_int8, {"quant_method": "int8"}),
}


def _write(root: Path, kind: str, *, says: bool = True) -> Path:
    """A tiny model as the library of ``kind`` stores it."""
    pack, quantization = FORMATS[kind]
    if kind == "mxfp4":
        config: Any = transformers.GptOssConfig(
            **_IDS, **_SIZES, **_HEADS, num_local_experts=2, num_experts_per_tok=1
        )
        model: Any = transformers.GptOssForCausalLM._from_config(config, dtype=torch.bfloat16)
        chosen = ("gate_up_proj", "down_proj")
    else:
        config = transformers.Qwen3Config(**_IDS, **_SIZES, **_HEADS, tie_word_embeddings=False)
        model = transformers.Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
        chosen = ("proj.weight",)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    for name in [n for n in state if n.endswith(chosen)]:
        pack(state, name)
    root.mkdir(parents=True)
    save_file(state, root / "model.safetensors", metadata={"format": "pt"})
    document = {**config.to_dict(), "architectures": [type(model).__name__], "dtype": "bfloat16"}
    if says:
        document["quantization_config"] = quantization
    (root / "config.json").write_text(json.dumps(document))
    return root


def _refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(ShardwiseError) as caught:
        work()
    return str(caught.value)


@pytest.mark.parametrize("says", [True, False], ids=["config says it", "tensors alone"])
def test_a_method_that_is_not_known_is_refused_in_one_line(tmp_path: Path, says: bool) -> None:
    """By load_pretrained, also with the declarations that would let random weights in; by load, plan, convert."""
    root = str(_write(tmp_path / "int8", "int8", says=says))
    declared: Any = {"allow_missing": ("*",), "allow_unused": ("*",)}
    model = nn.Linear(2, 2)
    texts = {
        "load_pretrained": _refusal(lambda: sw.load_pretrained(root)),
        "declared": _refusal(lambda: sw.load_pretrained(root, **declared)),
        "plan": _refusal(lambda: sw.plan(root, ranks=2)),
        "convert": _refusal(lambda: sw.convert(root, tmp_path / "out")),
        "load": _refusal(lambda: sw.load(model, root, names={})),
    }
    for case, text in texts.items():
        assert "\n" not in text, (case, text)
        assert "allow_missing=" not in text, (case, text)
        assert "allow_unused=" not in text, (case, text)
        for word in (root, "quantized (int8", "from which it was quantized"):
            assert word in text, (case, text)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_declarations_let_no_codes_through(tmp_path: Path, kind: str) -> None:
    """Codes whose scales are lost are no weights, and no tensors that may be left."""
    root = _write(tmp_path / kind, kind)
    state = load_file(root / "model.safetensors")
    lost = next(name for name in state if name.endswith(("_scales", "_scale_inv")))
    del state[lost]
    save_file(state, root / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError) as caught:
        sw.load_pretrained(root, allow_missing=("*",), allow_unused=("*",))
    assert lost in str(caught.value)


def test_a_conversion_takes_plain_sources(tmp_path: Path) -> None:
    root = _write(tmp_path / "fp8", "fp8")
    text = _refusal(lambda: sw.convert(root, tmp_path / "out"))
    assert "quantized (fp8" in text
    assert "which isn't accepted here" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "config"), [("mxfp4", "Mxfp4Config"), ("fp8", "FineGrainedFP8Config")])
def test_as_transformers_dequantizes_it(tmp_path: Path, kind: str, config: str) -> None:
    """The way that an error names, where one process holds the whole model, and a load give the same bits."""
    root = _write(tmp_path / kind, kind)
    fp8_module()  # which from_pretrained imports
    plain = AutoModelForCausalLM.from_pretrained(
        root, dtype=torch.bfloat16, quantization_config=getattr(transformers, config)(dequantize=True)
    )
    plain.save_pretrained(tmp_path / "out", save_original_format=False)
    # transformers before 5.8 leaves dequantized FP8 in fp32, whatever dtype it was asked for.
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in plain.state_dict().items()}
    for source in (root, tmp_path / "out"):
        model = sw.load_pretrained(source)
        assert model.state_dict().keys() == expected.keys()
        assert all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())
        assert getattr(model.config, "quantization_config", None) is None


def test_float8_without_scales_and_a_models_own_scales(tmp_path: Path) -> None:
    """As-trained tensors in float8, and a module that has integer codes and scales of its own, load as they are."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
            self.register_buffer("weight_scale", torch.ones(4))

    stored = {"weight": torch.full((4, 4), 7, dtype=torch.int8), "weight_scale": torch.rand(4)}
    save_file(stored, tmp_path / "own.safetensors")
    model = Own()
    sw.load(model, tmp_path / "own.safetensors")
    assert all(torch.equal(t, stored[n]) for n, t in model.state_dict().items())

    plain = nn.Linear(4, 4, bias=False)
    plain.weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    weight = torch.rand(4, 4).to(torch.float8_e4m3fn)
    save_file({"weight": weight}, tmp_path / "fp8.safetensors")
    sw.load(plain, tmp_path / "fp8.safetensors")
    assert torch.equal(plain.weight.view(torch.uint8), weight.view(torch.uint8))
    from shardwise.catalog.quantized import quantized

    assert quantized(open_catalog(tmp_path / "fp8.safetensors").tensors) is None


def test_a_config_that_says_it_of_plain_tensors(tmp_path: Path) -> None:
    """The error says how to load them, and that works."""
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_IDS, **_SIZES, **_HEADS)).save_pretrained(
        tmp_path
    )
    document = json.loads((tmp_path / "config.json").read_text())
    document["quantization_config"] = {"quant_method": "bitnet", "quantization_mode": "online"}
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert "give a config without that setting" in _refusal(lambda: sw.load_pretrained(tmp_path))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    del config.quantization_config
    sw.load_pretrained(tmp_path, config=config)


@pytest.mark.parametrize("how", ["quantization_config", "load_in_4bit", "config", "nested config"])
def test_a_quantization_that_the_caller_asks_for_is_not_dropped(tmp_path: Path, how: str) -> None:
    text = transformers.Qwen3Config(**_IDS, **_SIZES, **_HEADS)
    transformers.Qwen3ForCausalLM(text).save_pretrained(tmp_path)
    wanted = transformers.BitsAndBytesConfig(load_in_4bit=True)
    given: dict[str, Any] = {"quantization_config": wanted}
    if how == "load_in_4bit":
        given = {"load_in_4bit": True}
    elif how == "config":
        given = {"config": transformers.AutoConfig.from_pretrained(tmp_path)}
        given["config"].quantization_config = wanted
    elif how == "nested config":
        config = transformers.LlavaConfig(text_config=text)
        config.text_config.quantization_config = wanted.to_dict()
        given = {"config": config, "auto_class": transformers.LlavaForConditionalGeneration}
    said = _refusal(lambda: sw.load_pretrained(tmp_path, **given))
    assert "asks for a quantized model (bitsandbytes)" in said
    assert "\n" not in said


def test_an_export_in_another_dtype_would_cast_the_scales(tmp_path: Path) -> None:
    """Refused; as it is, a quantized directory is cut anew and says the same."""
    root = _write(tmp_path / "fp8", "fp8")
    assert "quantized (fp8" in _refusal(lambda: sw.export_hf(root, tmp_path / "cast", dtype="bfloat16"))
    assert not (tmp_path / "cast").exists()
    sw.export_hf(root, tmp_path / "copy")
    before, after = (load_file(d / "model.safetensors") for d in (root, tmp_path / "copy"))
    assert before.keys() == after.keys()
    assert all(torch.equal(t.view(torch.uint8), after[n].view(torch.uint8)) for n, t in before.items())
    assert (
        json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]["quant_method"]
        == "fp8"
    )


def test_nested_configs() -> None:
    from shardwise.catalog.quantized import method_of_config

    assert method_of_config({"text_config": {"quantization_config": {"quant_method": "fp8"}}}) == "fp8"
    assert (
        method_of_config({"compression_config": {"quant_method": "compressed-tensors"}})
        == "compressed-tensors"
    )
    assert method_of_config({"quantization_config": None}) == ""
    assert method_of_config({"quantization_config": {"bits": 4}}) == "dict"


def test_codes_are_never_said_to_be_new(tmp_path: Path) -> None:
    """Where a model has scales of its own, so that the source is planned: a weight whose codes are stored."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(32, 4))
            self.inner = nn.Module()
            self.inner.register_buffer("weight_scale", torch.zeros(4))

    state = {
        "weight_packed": _int32(4, 4),
        "weight_scale": torch.rand(4),
        "inner.weight_scale": torch.rand(4),
    }
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(PlanError) as caught:
        sw.load(Odd(), tmp_path / "model.safetensors")
    assert not isinstance(caught.value, UnsupportedConversionError)
    assert "its quantized codes are stored ('weight_packed')" in str(caught.value)
    assert "allow_missing=" not in str(caught.value)
    assert "allow_unused=" not in str(caught.value)
