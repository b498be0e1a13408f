"""QLoRA over several ranks: the base in 4-bit codes, 1/N on each; everything bitwise that of transformers and PEFT in one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardwise as sw
from shardwise.errors import CheckpointError, PlanError, StateError, UnsupportedConversionError
from shardwise.format.manifest import read_manifest
from tests.harness import models
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

from tests.quantized import _qlora_fns as fns
from tests.quantized._made import bitsandbytes_directory

#: How the source is stored → what is asked of it.
KINDS = ("quantized while it is read", "kept", "kept, scales quantized")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in bf16, and as transformers and bitsandbytes quantize it."""
    root = tmp_path_factory.mktemp("qlora")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=72,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "plain")
    options = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    bitsandbytes_directory(root / "plain", root / "nf4", bnb_4bit_quant_type="nf4", **options)
    nested = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}
    bitsandbytes_directory(root / "plain", root / "nested", **nested, **options)
    return root


def asked(root: Path, kind: str) -> tuple[str, Any]:
    """The directory, and ``quantized=``."""
    if kind == "quantized while it is read":
        return str(root / "plain"), fns.four_bits()
    return str(root / ("nf4" if kind == "kept" else "nested")), "keep"


@pytest.mark.needs("integers")
@pytest.mark.parametrize("world_size", nightly_but((1, 2, 3, 4), 3))
def test_losses_and_gradients_are_those_of_the_unsharded_model(
    world_size: int, root: Path, ranks: RankPool
) -> None:
    """Ten steps. Where three ranks average, the unsharded gradients are added and divided in the same order."""
    for kind in KINDS:
        found = ranks.run_ranks(world_size, fns.like_unsharded, *asked(root, kind), timeout_s=300)
        assert found == [fns.STEPS * 28] * world_size, kind


@pytest.mark.needs("integers")
@pytest.mark.parametrize("world_size", nightly_but((1, 2, 3, 4), 3))
def test_each_rank_holds_its_part_of_the_codes(world_size: int, root: Path, ranks: RankPool) -> None:
    for kind in KINDS:
        for own, total, row in ranks.run_ranks(world_size, fns.held_bytes, *asked(root, kind)):
            assert abs(own - total / world_size) <= row, kind
            assert total == (2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 192)) // 64 * 36


@pytest.mark.needs("integers")
def test_saved_at_two_and_resumed_at_three(root: Path, tmp_path: Path, ranks: RankPool) -> None:
    source = asked(root, KINDS[0])
    straight = ranks.run_ranks(2, fns.run, *source, str(tmp_path / "straight"), 0, 4)[0]
    first = ranks.run_ranks(2, fns.run, *source, str(tmp_path / "run"), 0, 2)[0]
    assert first[0] == straight[0][:2]
    resumed = ranks.run_ranks(3, fns.run, *source, str(tmp_path / "run"), 2, 4)[0]
    assert resumed[1] == first[2]  # every tensor, codes included
    assert resumed[0][0] == straight[0][2]
    again = ranks.run_ranks(2, fns.run, *source, str(tmp_path / "run 2"), 0, 2)[0]
    assert again == first
    assert ranks.run_ranks(2, fns.run, *source, str(tmp_path / "run 2"), 2, 4)[0][::2] == (
        straight[0][2:],
        straight[2],
    )


@pytest.mark.needs("integers")
def test_a_checkpoint_refers_to_the_base(root: Path, tmp_path: Path, ranks: RankPool) -> None:
    """It holds adapters and optimizer; the base, quantized the same way, is compared by its digests, at any number of ranks."""
    source = asked(root, KINDS[0])
    straight = ranks.run_ranks(2, fns.run, *source, str(tmp_path / "straight"), 0, 4)[0]
    first = ranks.run_ranks(2, fns.run, *source, str(tmp_path / "run"), 0, 2, frozen="refer")[0]
    again = ranks.run_ranks(2, fns.run, *source, str(tmp_path / "run"), 2, 4, frozen="refer")[0]
    assert (first[0] + again[0], again[2]) == (straight[0], straight[2])
    resumed = ranks.run_ranks(3, fns.run, *source, str(tmp_path / "run"), 4, 5, frozen="refer")[0]
    assert resumed[1] == straight[2]
    entries = read_manifest(tmp_path / "run" / "step-00000005").models["model"]
    assert {".lora_" in name for name, t in entries.items() if not t.refers} == {True}
    assert any(t.dtype == "U8" for t in entries.values())
    assert sw.diff(tmp_path / "run/step-00000004", tmp_path / "straight/step-00000004").ok
    with fns.known_warnings():
        other = sw.load_pretrained(root / "nested", quantized="keep", adapter=fns.lora())
    with pytest.raises(StateError, match=r"which is not the one of this run.*quantized the same way"):
        sw.restore(sw.TrainState(model=other), tmp_path / "run" / "step-00000005")


@pytest.mark.needs("integers")
@pytest.mark.parametrize("world_size", nightly_but((1, 2, 3), 3))
def test_a_merged_export_is_what_peft_merges(
    world_size: int, root: Path, tmp_path: Path, ranks: RankPool
) -> None:
    for k, (directory, quantized) in enumerate(
        [*(asked(root, kind) for kind in KINDS), (str(root / "plain"), "dequantize")]
    ):
        out = tmp_path / str(k)
        ranks.run_ranks(world_size, fns.merged, directory, quantized, str(out))
        found = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
        expected = fns.merged_by_peft(directory, quantized)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype == torch.bfloat16
            assert torch.equal(found[name], tensor), (k, name)
        assert "quantization_config" not in json.loads((out / "config.json").read_text())


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",  # PEFT 0.18
)
def test_two_active_adapters_and_an_embedding_are_merged_as_peft_does(root: Path, tmp_path: Path) -> None:
    import peft

    first = fns.lora(r=2, target_modules=["q_proj"], use_rslora=True, modules_to_save=["lm_head"])
    second = fns.lora(r=3, target_modules=["q_proj", "embed_tokens"], lora_alpha=5)
    model = sw.load_pretrained(
        root / "plain", adapter={"default": first, "more": second}, quantized=fns.four_bits()
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        root / "plain", quantization_config=fns.four_bits(), dtype=torch.bfloat16, device_map="cpu"
    )
    reference: Any = peft.get_peft_model(base.dequantize().to(torch.bfloat16), first)
    reference.add_adapter("more", second)
    for name, parameter in reference.named_parameters():
        if "lora_" in name:  # PEFT 0.18 leaves a second adapter in the base's dtype
            parameter.data = parameter.data.float()
    for one in (model, reference):
        one.base_model.set_adapter(["default", "more"])
        fns.set_adapters(one, 1)
    sw.export_hf(model, tmp_path / "out", merge=True)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in reference.merge_and_unload().state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_copies_and_full_tensors_of_a_base_in_codes(root: Path) -> None:
    model = sw.load_pretrained(root / "plain", quantized=fns.four_bits())
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(sw.clone(model)(input_ids=ids).logits, model(input_ids=ids).logits)
    with pytest.raises(CheckpointError, match="4-bit codes"):
        sw.iter_full_tensors(model)
    assert dict(sw.iter_full_tensors(model, naming="module"))["lm_head.weight"].shape == (72, 128)


def test_a_checkpoint_of_codes_is_loaded_kept_and_not_exported(root: Path, tmp_path: Path) -> None:
    model = sw.load_pretrained(root / "plain", quantized=fns.four_bits())
    sw.save(sw.TrainState(model=model), tmp_path / "step")
    again = sw.load_pretrained(tmp_path / "step", quantized="keep")
    assert fns.digests(again) == fns.digests(model)
    with pytest.raises(CheckpointError, match="4-bit blocks"):
        sw.export_hf(tmp_path / "step", tmp_path / "out")


def test_a_base_without_adapters_is_exported_dequantized(root: Path, tmp_path: Path) -> None:
    model = sw.load_pretrained(root / "nf4", quantized="keep")
    sw.export_hf(model, tmp_path / "out")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = sw.load_pretrained(root / "nf4")
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_transposed_weights_are_turned_before_they_are_quantized(tmp_path: Path) -> None:
    """GPT-2 stores inputs as rows; its widths are no multiple of a block, too."""
    models.write_hub_directory("gpt2", tmp_path / "gpt2", torch.float32)
    options = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_quant_type": "nf4"}
    config = transformers.BitsAndBytesConfig(**options)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "gpt2", quantization_config=config, device_map="cpu"
    )
    model = sw.load_pretrained(tmp_path / "gpt2", quantized=config)
    checked = 0
    for path, layer in plain.named_modules():
        if type(layer).__name__ == "Linear4bit":
            own = model.get_submodule(path)
            codes, scales = own.blocks.split(own.weight.data)
            state = layer.weight.quant_state
            assert torch.equal(codes[: layer.weight.numel()], layer.weight.data.view(-1)), path
            assert torch.equal(scales, state.absmax), path
            checked += 1
    assert checked >= 4
    ids = torch.arange(12).view(1, 12)
    found_logits = []
    for one in (model, plain):
        torch.manual_seed(0)  # of dropout
        found_logits.append(one.train()(input_ids=ids).logits)
    assert torch.equal(*found_logits)
    sw.export_hf(model, tmp_path / "out")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = plain.dequantize().state_dict()
    assert {n: t.shape for n, t in found.items()} == {
        n: t.shape for n, t in sw.load_pretrained(tmp_path / "gpt2").state_dict().items()
    }
    assert torch.equal(
        found["transformer.h.0.mlp.c_fc.weight"], expected["transformer.h.0.mlp.c_fc.weight"].t()
    )


@pytest.mark.needs("integers")
def test_plan_says_what_is_stored_and_held(root: Path) -> None:
    (one,) = sw.plan(root / "plain", ranks=2, quantized=fns.four_bits()).dequantized
    assert one.format == "BF16, quantized to NF4 in blocks of 64"
    assert (one.tensors, one.stored_bytes, one.nbytes) == (14, 491520, 138240)
    (kept,) = sw.plan(root / "nf4", ranks=2, quantized="keep").dequantized
    assert (kept.format, kept.stored_bytes, kept.nbytes) == ("NF4 in blocks of 64, kept", 138240, 138240)


def test_what_is_asked_and_can_not_be_had(root: Path, tmp_path: Path) -> None:
    def refused(error: type[Exception], text: str, directory: str = "plain", **options: Any) -> None:
        with pytest.raises(error, match=text):
            sw.load_pretrained(root / directory, **options)

    refused(ValueError, "'dequantize', 'keep' or", quantized="nf4")
    refused(TypeError, "BitsAndBytesConfig", quantized={"load_in_4bit": True})
    refused(UnsupportedConversionError, "nothing to keep", quantized="keep")
    refused(UnsupportedConversionError, "quantized already", "nf4", quantized=fns.four_bits())
    double = fns.four_bits(bnb_4bit_use_double_quant=True)
    refused(UnsupportedConversionError, "mean of all scales", quantized=double)
    eight = transformers.BitsAndBytesConfig(load_in_8bit=True)
    refused(UnsupportedConversionError, "only 4 bits", quantized=eight)
    refused(PlanError, "use_dora", quantized=fns.four_bits(), adapter=fns.lora(use_dora=True))
    model = sw.load_pretrained(root / "plain", quantized=fns.four_bits())
    with pytest.raises(ValueError, match="PeftModel"):
        sw.export_hf(model, tmp_path / "out", merge=True)
    with pytest.raises(ValueError, match="stored"):
        sw.export_hf(root / "plain", tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_a_model_of_plain_weights_is_told_how_to_take_blocks(root: Path, tmp_path: Path) -> None:
    model = sw.load_pretrained(root / "plain", quantized=fns.four_bits())
    sw.save(sw.TrainState(model=model), tmp_path / "step")
    plain = transformers.AutoModelForCausalLM.from_pretrained(root / "plain")
    for load in (sw.load_pretrained, partial(sw.load, plain)):
        with pytest.raises(PlanError, match=r"4-bit codes in blocks of 64; build .* quantized='keep'"):
            load(tmp_path / "step")
    kept = sw.load_pretrained(tmp_path / "step", quantized="keep")
    assert sw.digest(kept) == sw.digest(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_that_has_no_merged_form_is_named(root: Path, tmp_path: Path) -> None:
    model = sw.load_pretrained(root / "plain", adapter=fns.lora(use_dora=True))
    with pytest.raises(CheckpointError, match="DoRA"):
        sw.export_hf(model, tmp_path / "out", merge=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_trained_copy_of_a_tied_tensor_is_not_merged(module: str, tmp_path: Path) -> None:
    models.write_hub_directory("qwen3-tied", tmp_path / "tied", torch.bfloat16)
    adapter = fns.lora(target_modules=["q_proj"], modules_to_save=[module])
    model = sw.load_pretrained(tmp_path / "tied", adapter=adapter)
    with pytest.raises(
        CheckpointError, match=rf"modules_to_save trains a copy of .*{module}\.weight \(tied with"
    ):
        sw.export_hf(model, tmp_path / "out", merge=True)
    assert sw.export_hf(model, tmp_path / "adapter").tensors


@pytest.mark.needs("integers")
@pytest.mark.parametrize("world_size", nightly_but((1, 2, 5), 5))
def test_weights_of_no_whole_number_of_blocks(world_size: int, tmp_path: Path, ranks: RankPool) -> None:
    """The last block is filled up, some ranks hold none, and the merged model computes what the live one does."""
    config = transformers.LlamaConfig(
        vocab_size=72,
        hidden_size=12,
        intermediate_size=10,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=True,
        head_dim=6,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    ranks.run_ranks(world_size, fns.odd_blocks, str(tmp_path / "plain"), str(tmp_path))
