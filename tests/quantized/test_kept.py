"""``quantized="keep"`` for FP8 and compressed-tensors: each rank holds 1/N of the stored tensors, bit for bit, and runs on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardwise as sw
from shardwise.errors import PlanError, ShardError, UnsupportedConversionError
from shardwise.models.layers import put_into
from tests.harness import models
from tests.harness.bombs import refused_within
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but

pytest.importorskip("compressed_tensors")
pytest.importorskip("peft")

from tests.quantized import _kept_fns as fns
from tests.quantized import _qlora_fns as qlora
from tests.quantized._made import (
    bitsandbytes_directory,
    fp8_directory,
    gpt_oss_directory,
    packed_directory,
    plain_tensors,
    write_quantized,
)
from tests.quantized.compressed_cases import CASES
from tests.quantized.compressed_models import write

#: compressed-tensors' formats → the unsharded model that computes the same. transformers 5.23 can't open packed zero points.
_COMPRESSED = {
    "fp8-blocks": "transformers",
    "fp8-tensor": "transformers",
    "int8-channel": "transformers",
    "int8-group-zeros": "transformers",
    "w4-group": "transformers",
    "w4-group-zeros": "whole",
    "w3-group-zeros": "whole",
    "nvfp4": "transformers",
    "mxfp4": "transformers",
    "mxfp8": "transformers",
    "mixed": "transformers",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Directories by format, each with its reference."""
    root = tmp_path_factory.mktemp("kept")
    torch.manual_seed(0)
    found = {}
    for kind in ("qwen3", "qwen3-moe"):
        models.write_hub_directory(kind, root / kind, torch.bfloat16)
        fp8_directory(root / kind, root / "fp8" / kind, (4, 8))
        found[f"fp8 {kind}"] = str(root / "fp8" / kind), "transformers"
    found["fp8 per tensor"] = str(_per_tensor(root / "qwen3", root / "fp8 per tensor")), "transformers"
    for name, reference in _COMPRESSED.items():
        write(root / name, CASES[name][0], torch.bfloat16)
        found[name] = str(root / name), reference
    return found


def _per_tensor(plain: Path, out: Path) -> Path:
    """One scale a tensor, without dims, as Mistral's files have them and ``Fp8Quantize`` does not."""
    settings = fp8_directory(plain, out.parent / f"{out.name} before", None)
    found = plain_tensors(out.parent / f"{out.name} before")
    scalars = {name: t.reshape(()) if name.endswith("_scale_inv") else t for name, t in found.items()}
    write_quantized(plain, out, settings, scalars)
    return out


@pytest.mark.needs("integers")
@pytest.mark.needs("kept-fp8")
@pytest.mark.parametrize("world_size", nightly_but((1, 2, 3, 5), 3))
def test_shards_are_those_of_the_stored_tensors(
    world_size: int, sources: dict[str, tuple[str, str]], ranks: RankPool
) -> None:
    for name, (directory, reference) in sources.items():
        found = ranks.run_ranks(world_size, fns.as_stored, directory, reference)
        for own, total, rows, compared in found:
            assert compared >= 14, name
            assert own <= total / world_size + rows, name  # the last ranks may hold less
        assert sum(own for own, *_ in found) >= found[0][1], name


@pytest.mark.needs("peft>=0.20", "asks a linear layer of packed codes for its weight")
@pytest.mark.needs("integers")
@pytest.mark.needs("kept-fp8")
@pytest.mark.parametrize("world_size", nightly_but((1, 2, 3), 2))
def test_lora_on_top_is_that_of_the_unsharded_model(
    world_size: int, sources: dict[str, tuple[str, str]], ranks: RankPool
) -> None:
    """Losses and gradients of ten steps, beside transformers and PEFT in one process."""
    for name in ("fp8 qwen3", "w4-group"):
        steps = ranks.run_ranks(world_size, fns.trained, sources[name][0], timeout_s=300)
        assert len(set(steps)) == 1, name
        assert steps[0] >= 100, name


@pytest.mark.needs("integers")
@pytest.mark.needs("kept-fp8")
def test_saved_at_two_exported_and_resumed_at_three(
    sources: dict[str, tuple[str, str]], tmp_path: Path, ranks: RankPool
) -> None:
    """The export holds the source's tensors, bit for bit, and its config."""
    for name in ("fp8 qwen3-moe", "w4-group-zeros", "nvfp4"):
        source, root = Path(sources[name][0]), tmp_path / name
        root.mkdir()
        first, second = ranks.run_ranks(2, fns.saved_and_exported, str(source), str(root))
        assert first == second
        ranks.run_ranks(3, fns.resumed, str(source), str(root), first)
        sw.export_hf(root / "step", root / "stored")
        expected = plain_tensors(source)
        for found in (plain_tensors(root / "out"), plain_tensors(root / "stored")):
            assert expected.keys() == found.keys(), name
            for tensor in expected:
                assert expected[tensor].dtype == found[tensor].dtype, (name, tensor)
                assert torch.equal(fns.raw(expected[tensor]), fns.raw(found[tensor])), (name, tensor)
        with pytest.raises(UnsupportedConversionError, match="quantized"):
            sw.export_hf(root / "step", root / "cast", dtype="float32")
        with pytest.raises(PlanError, match=r"holds the codes and scales of its source .*quantized='keep'"):
            sw.load_pretrained(root / "step")
        settings = [
            json.loads((d / "config.json").read_text())["quantization_config"] for d in (source, root / "out")
        ]
        assert settings[0]["quant_method"] == settings[1]["quant_method"]


@pytest.mark.needs("integers")
@pytest.mark.needs("kept-fp8")
@pytest.mark.parametrize("world_size", nightly_but((2, 4), 2))
def test_other_layouts_compute_the_same(
    world_size: int, sources: dict[str, tuple[str, str]], ranks: RankPool
) -> None:
    for name in ("fp8 qwen3", "fp8 per tensor", "w4-group-zeros"):
        kind = "KeptFP8Linear" if name.startswith("fp8") else "KeptPackedLinear"
        ranks.run_ranks(world_size, fns.in_other_layouts, sources[name][0], kind, timeout_s=200)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_gradients_pass_the_rounding_of_activations(sources: dict[str, tuple[str, str]]) -> None:
    """compressed-tensors rounds without gradients: the adapters before a layer would learn nothing."""
    adapter = qlora.lora(target_modules=["q_proj"])
    model = sw.load_pretrained(sources["int8-channel"][0], quantized="keep", adapter=adapter)
    qlora.set_adapters(model, 1)
    model(input_ids=qlora.batch(0), labels=qlora.batch(0)).loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and g.abs().max() > 0 for g in gradients)


@pytest.mark.needs("integers")
@pytest.mark.needs("kept-fp8")
def test_casts_are_refused(sources: dict[str, tuple[str, str]], ranks: RankPool) -> None:
    ranks.run_ranks(2, fns.refuses_casts, [sources["fp8 qwen3"][0], sources["w4-group"][0]])


@pytest.mark.needs("integers")
@pytest.mark.needs("kept-fp8")
def test_copies_plans_and_what_can_not_be_done_with_codes(
    sources: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    for name, held in (("fp8 qwen3", "FP8 (E4M3) in blocks of 4 x 8, kept"), ("w4-group-zeros", None)):
        model = sw.load_pretrained(sources[name][0], quantized="keep")
        assert torch.equal(fns.logits(sw.clone(model)), fns.logits(model))
        (planned,) = sw.plan(sources[name][0], ranks=2, quantized="keep").dequantized
        assert planned.nbytes == planned.stored_bytes
        assert held in (None, planned.format)
        for options in ({"dtype": "float32"}, {"quantize": "as-source"}):
            with pytest.raises(ValueError, match="plain weights"):
                sw.export_hf(model, tmp_path / "out", **options)
        with pytest.raises(ShardError, match=r"was cast to torch\.float16"):
            fns.logits(model.apply(_half))


def _half(module: torch.nn.Module) -> None:
    """transformers refuses ``model.half()``, and FSDP2's mixed precision does as this."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float16)


@pytest.mark.needs("kept-fp8")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_not_merged_into_codes(sources: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    import peft

    for name in ("fp8 qwen3", "w4-group"):
        lora = peft.LoraConfig(target_modules=["q_proj"], r=2)
        model = sw.load_pretrained(sources[name][0], quantized="keep", adapter=lora)
        qlora.set_adapters(model, 1)
        before = fns.logits(model)
        with pytest.raises(ValueError, match="merge=True needs plain weights"):
            sw.export_hf(model, tmp_path / "out", merge=True)
        for safe in (False, True):
            with pytest.raises((ShardError, NotImplementedError, RuntimeError)):
                model.merge_adapter(safe_merge=safe)
        assert torch.equal(fns.logits(model), before)
        dora = peft.LoraConfig(target_modules=["q_proj"], r=2, use_dora=True)
        with pytest.raises(PlanError, match="use_dora"):
            sw.load_pretrained(sources[name][0], quantized="keep", adapter=dora)


def _altered(source: str, out: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a source in which tensors are others, or gone."""
    settings = json.loads((Path(source) / "config.json").read_text())["quantization_config"]
    found = plain_tensors(Path(source)) | {n: t for n, t in tensors.items() if t is not None}
    write_quantized(
        Path(source), out, settings, {n: t for n, t in found.items() if tensors.get(n, t) is not None}
    )
    return out


@pytest.mark.needs("kept-fp8")
def test_sources_that_no_layer_can_hold_are_named(
    sources: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    gpt_oss_directory(tmp_path / "gpt-oss")
    packed = {
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": False,
        "version": "gemm",
        "zero_point": True,
    }
    plain_model = tmp_path / "llama"
    config = transformers.LlamaConfig(
        vocab_size=72, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(plain_model)
    for method in ("gptq", "awq"):
        packed_directory(plain_model, tmp_path / method, {"quant_method": method, **packed})
    bitsandbytes_directory(plain_model, tmp_path / "int8", load_in_8bit=True)
    for kind in ("gptq", "awq", "int8"):
        with pytest.raises(UnsupportedConversionError, match=r"can't hold .* in shards: .*'dequantize'"):
            sw.load_pretrained(tmp_path / kind, quantized="keep")
    write(tmp_path / "embedding", CASES["embedding"][0], torch.bfloat16)
    for kind, text in (
        ("gpt-oss", "Triton kernel.*'dequantize'"),
        ("embedding", "linear layers.*embed_tokens"),
    ):
        with pytest.raises(UnsupportedConversionError, match=text):
            sw.load_pretrained(tmp_path / kind, quantized="keep")
    stem = "model.layers.0.mlp.up_proj"
    fp8, ints = sources["fp8 qwen3"][0], sources["int8-channel"][0]
    plain = plain_tensors(Path(fp8))[f"{stem}.weight"].to(torch.bfloat16)
    for k, (source, text, tensors) in enumerate(
        (
            (fp8, "missing: scales of the FP8 codes", {f"{stem}.weight_scale_inv": None}),
            (fp8, "stored as BF16", {f"{stem}.weight": plain, f"{stem}.weight_scale_inv": None}),
            (fp8, "shape mismatch", {f"{stem}.weight_scale_inv": torch.ones(3, 3)}),
            (fp8, "both scale the codes", {f"{stem}.weight_scale": torch.ones(1)}),
            (ints, "has no .*weight_scale next to it", {f"{stem}.weight_scale": None}),
        )
    ):
        with pytest.raises(PlanError, match=text):
            sw.load_pretrained(_altered(source, tmp_path / str(k), **tensors), quantized="keep")


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "(.|.)" * 40 + "X"]},
        {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["re:(.+)+X"]},
        transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["(a|a)*X"]),
        {"quant_method": "fp8", "modules_to_not_convert": ["(lm_head"]},
    ],
    ids=["fp8", "compressed-tensors", "bitsandbytes", "no expression"],
)
@pytest.mark.processes
def test_expressions_that_a_quantizer_would_match_for_ever(settings: Any) -> None:
    """They are refused before transformers or the library matches them with the model's modules."""
    model = torch.nn.ModuleDict({"a" * 60: torch.nn.Linear(2, 2)})
    text = refused_within(lambda: put_into(model, settings, torch.bfloat16), seconds=2)
    assert "in quantization_config" in text or "quantization_config." in text
