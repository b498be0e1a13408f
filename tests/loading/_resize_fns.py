"""What the ranks run in the tests of grown models, and the architectures that are tried."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as t
from torch import nn
from torch.distributed.tensor import Shard

import shardwise as sw
from tests.harness.models import fill_with_noise
from tests.loading._load_fns import (
    assert_same_shards,
    assert_same_whole,
    bits,
    forward,
    mesh_of,
    nothing_else_changes,
    ordinary_model,
    whole,
)
from tests.loading._peft_fns import known_warnings

OLD, NEW = 101, 128
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BODY = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES = {**_IDS, **_BODY, "vocab_size": OLD}


def _llava(tied: bool) -> Any:
    vision = t.CLIPVisionConfig(**_BODY, image_size=12, patch_size=4)
    text = t.LlamaConfig(**_SIZES, num_key_value_heads=2, tie_word_embeddings=tied)
    return t.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=100, tie_word_embeddings=tied
    )


#: Name → class, and its config, with tied embeddings or not. Among them: several names of one embedding (T5, BART), a buffer of the
#: vocabulary's size (BART), biases of that size (BERT), a vocabulary in a part of the config (LLaVA).
ARCHITECTURES: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", lambda tied: t.LlamaConfig(**_SIZES, tie_word_embeddings=tied)),
    "mistral": (
        "MistralForCausalLM",
        lambda tied: t.MistralConfig(**_SIZES, num_key_value_heads=2, tie_word_embeddings=tied),
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        lambda tied: t.Qwen2Config(**_SIZES, num_key_value_heads=2, tie_word_embeddings=tied),
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        lambda tied: t.Qwen3MoeConfig(
            **_SIZES,
            head_dim=6,
            num_key_value_heads=2,
            num_experts=3,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            tie_word_embeddings=tied,
        ),
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        lambda tied: t.Gemma3TextConfig(
            **_SIZES, head_dim=6, num_key_value_heads=2, sliding_window=8, tie_word_embeddings=tied
        ),
    ),
    "phi3": (
        "Phi3ForCausalLM",
        lambda tied: t.Phi3Config(**_SIZES, num_key_value_heads=2, tie_word_embeddings=tied),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        lambda tied: t.GPT2Config(
            n_embd=24,
            n_layer=2,
            n_head=4,
            vocab_size=OLD,
            n_positions=33,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=tied,
        ),
    ),
    "opt": (
        "OPTForCausalLM",
        lambda tied: t.OPTConfig(
            **_IDS,
            hidden_size=24,
            ffn_dim=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=OLD,
            max_position_embeddings=33,
            word_embed_proj_dim=24,
            tie_word_embeddings=tied,
        ),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        lambda tied: t.T5Config(
            d_model=24,
            d_ff=40,
            d_kv=6,
            num_layers=2,
            num_heads=4,
            vocab_size=OLD,
            decoder_start_token_id=0,
            tie_word_embeddings=tied,
        ),
    ),
    "bart": (
        "BartForConditionalGeneration",
        lambda tied: t.BartConfig(
            **_IDS,
            d_model=24,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=40,
            decoder_ffn_dim=40,
            vocab_size=OLD,
            max_position_embeddings=33,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
            tie_word_embeddings=tied,
        ),
    ),
    "bert": (
        "BertForMaskedLM",
        lambda tied: t.BertConfig(
            **_BODY, vocab_size=OLD, max_position_embeddings=33, pad_token_id=0, tie_word_embeddings=tied
        ),
    ),
    "llava": ("LlavaForConditionalGeneration", _llava),
}


def write_case(name: str, *, tied: bool, directory: Path) -> None:
    """Write a model to ``old``, and to ``new`` what one process makes of it with transformers' own ``resize_token_embeddings``, except
    that new rows are the mean of the old ones exactly, which those of transformers are compared with.
    """
    class_name, config = ARCHITECTURES[name]
    model_class = getattr(t, class_name)
    # Of BART's buffer, transformers makes one in fp32.
    dtype = torch.bfloat16 if tied and name != "bart" else torch.float32
    torch.manual_seed(len(name))
    model = model_class._from_config(config(tied), dtype=dtype)
    fill_with_noise(model)
    # transformers ties these when it resizes them, even if the config doesn't.
    if name == "bart":
        for part in (model.model.encoder, model.model.decoder):
            part.embed_tokens.weight.data.copy_(model.model.shared.weight)
    if name == "bert":
        model.cls.predictions.decoder.bias.data.copy_(model.cls.predictions.bias)
    model.save_pretrained(directory / "old")
    model = model_class.from_pretrained(directory / "old")
    before = {n: v.clone() for n, v in model.state_dict().items()}
    drawn = copy.deepcopy(model)
    model.resize_token_embeddings(NEW, mean_resizing=False)
    drawn.resize_token_embeddings(NEW)
    by_name, buffers = drawn.state_dict(), dict(model.named_buffers(remove_duplicate=False))
    grown = {n: v for n, v in model.state_dict().items() if v.shape != before[n].shape and n not in buffers}
    assert grown
    with torch.no_grad():
        for n, value in grown.items():
            value[OLD:] = before[n].double().mean(0).to(dtype)
            if value.dim() == 1 and tied:
                assert not by_name[n][OLD:].any()  # transformers pads the bias of a tied head with zeros
                continue
            # A normal distribution around the mean, with a billionth of the variance.
            torch.testing.assert_close(by_name[n][OLD:], value[OLD:], atol=2e-4, rtol=1e-2)
    if name == "bert":
        model._weight_conversions = (
            None  # transformers 5.0 reverts those for its oldest files, too: LayerNorm.beta
        )
    model.save_pretrained(directory / "new")
    torch.save(model, directory / "new.pt")


def resized(directory: str) -> Any:
    """What :func:`write_case` made. transformers itself can't open all that it saves: it loses BART's embeddings, if they aren't tied."""
    return torch.load(f"{directory}/new.pt", weights_only=False)


def grown_equal_ordinary(directories: list[str], out: str) -> dict[str, list[str]]:
    """Load each ``old`` with more tokens, and compare it with ``new``; export it. Returns what the reports say."""
    mesh = mesh_of((dist.get_world_size(),))
    said = {}
    for directory in directories:
        ordinary = resized(directory)
        with nothing_else_changes():
            model, report = sw.load_pretrained(f"{directory}/old", mesh, vocab_size=NEW, return_report=True)
        if directory.endswith(("bart-untied", "bert-untied")):
            for name, tensor in ordinary.state_dict().items():
                assert torch.equal(whole(model.state_dict()[name]), tensor), name
        else:
            assert_same_whole(model, ordinary)
            assert_same_shards(model, sw.shard(copy.deepcopy(ordinary), mesh))
            assert model.config.to_dict() == ordinary.config.to_dict()
        assert model.config.get_text_config().vocab_size == NEW
        assert report.initialized == report.unused == ()
        assert report.bytes_read <= 1.02 * report.local_bytes  # for means, nothing more is read
        torch.testing.assert_close(forward(model), forward(ordinary))
        sw.export_hf(model, f"{out}/{Path(directory).name}")
        said[directory] = [str(one) for one in report.grown]
    return said


# ----------------------------------------------------------------------------------------------------
# By declaration


def classifier(labels: int) -> Any:
    return t.BertConfig(
        **_BODY, vocab_size=OLD, max_position_embeddings=33, pad_token_id=0, num_labels=labels
    )


def more_labels(directory: str, rule: str) -> dict[str, str]:
    """A stored head of three labels becomes one of five. Returns digests."""
    mesh = mesh_of((dist.get_world_size(),))
    stored = ordinary_model(directory)
    for policy in (None, sw.ShardPolicy(placement=lambda p: Shard(1) if p.shape[1:] == (24,) else None)):
        with nothing_else_changes():
            model, report = sw.load_pretrained(
                directory,
                mesh,
                config=classifier(5),
                auto_class=t.BertForSequenceClassification,
                policy=policy,
                grow={"classifier.*": rule},
                seed=3,
                return_report=True,
            )
        assert [one.name for one in report.grown] == ["classifier.weight", "classifier.bias"]
        assert report.initialized == ()
        for name, old in stored.state_dict().items():
            now = whole(model.state_dict()[name])
            assert torch.equal(now[: old.shape[0]] if old.dim() else now, old), name
    drawn = copy.deepcopy(stored)
    drawn.classifier = nn.Linear(24, 5)
    drawn.config.num_labels = 5
    sw.init_weights(drawn, 3, only=["classifier.*"])
    for name, expected in drawn.classifier.named_parameters():
        now, old = (
            whole(model.get_parameter(f"classifier.{name}")),
            stored.get_parameter(f"classifier.{name}"),
        )
        mean = old.double().mean(0).float().expand(expected[3:].shape)
        assert torch.equal(now[3:], expected[3:] if rule == "init" else mean), name
    return sw.digest(model)


def in_place(file: str) -> None:
    """Any module, sharded by the caller or whole on each rank, by each strategy, and columns that aren't finite."""
    strategies: tuple[Any, ...] = ("own", "node", "once") if dist.get_world_size() > 1 else ("own",)
    for is_sharded, strategy in product((True, False), strategies):
        with sw.meta_init():
            model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 12))
        if is_sharded:
            sw.shard(model, mesh_of((dist.get_world_size(),)))
        report = sw.load(
            model, file, grow={"1.*": "mean", "0.weight": "mean"}, io=sw.IOOptions(strategy=strategy)
        )
        assert [(one.name, one.stored, one.shape) for one in report.grown] == [
            ("0.weight", (7, 5), (9, 5)),
            ("1.weight", (4, 5), (12, 5)),
            ("1.bias", (4,), (12,)),
        ]
        for name, value in torch.load(f"{file}.expected").items():
            now, rows = whole(model.get_parameter(name)), value.shape[0]
            assert torch.equal(bits(now[:rows]), bits(value)), name
            mean = value.double().mean(0)
            expected = torch.where(mean.isfinite(), mean, torch.nan).float().expand(now[rows:].shape)
            assert torch.equal(now[rows:].nan_to_num(9), expected.nan_to_num(9)), name


# ----------------------------------------------------------------------------------------------------
# Trained, saved, resumed, exported


def run_of(directory: str, adapter: Any = None, **options: Any) -> sw.TrainState:
    """A grown model and its optimizer."""
    mesh = mesh_of((dist.get_world_size(),))
    with known_warnings():
        model = sw.load_pretrained(f"{directory}/old", mesh, vocab_size=NEW, adapter=adapter, **options)
    return sw.TrainState(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    )


def step_of(state: sw.TrainState) -> float:
    """One step on old and new tokens."""
    ids = torch.tensor([[1, 5, OLD, NEW - 1, 7, OLD + 3]])
    loss = state.model(input_ids=ids, labels=ids).loss
    loss.backward()
    state.optimizer.step()  # type: ignore[union-attr]
    state.optimizer.zero_grad()  # type: ignore[union-attr]
    return loss.item()


def saves(directory: str, adapter: Any = None) -> tuple[Any, float]:
    """Train a grown model, save it, and take another step. Returns its digests when it was saved, and the loss of that step."""
    state = run_of(directory, adapter)
    step_of(state)
    sw.save(state, f"{directory}/step", step=1)
    digests = sw.digest(state.model)
    with known_warnings():
        sw.export_hf(state.model, f"{directory}/out")
    return digests, step_of(state)


def resumes(directory: str, adapter: Any = None) -> tuple[Any, float]:
    """The same after a resume."""
    state = run_of(directory, adapter, seed=9)
    report = sw.restore(state, f"{directory}/step")
    assert all(one.startswith("world size: ") for one in report.differences), report.differences
    return sw.digest(state.model), step_of(state)


def resumes_with_more_tokens(directory: str) -> dict[str, torch.Tensor]:
    """A run saved with ``OLD`` tokens goes on with ``NEW``. Returns the whole states of the optimizer, after checking the model."""
    mesh = mesh_of((dist.get_world_size(),))
    small = sw.load_pretrained(f"{directory}/step", mesh)
    state = run_of(directory, seed=9)
    with pytest.raises(
        sw.errors.PlanError, match=r"restore with grow=\{'model.embed_tokens.weight': 'mean'\}"
    ):
        sw.restore(state, f"{directory}/step")
    report = sw.restore(state, f"{directory}/step", grow={"*embed*": "mean", "*lm_head*": "mean"})
    assert not report.exact
    assert not report.digest
    assert any(
        f"embed_tokens.weight ({OLD} of {NEW} rows stored, the others: mean)" in d for d in report.differences
    )
    for name, tensor in small.state_dict().items():
        old, now = whole(tensor), whole(state.model.state_dict()[name])  # type: ignore[union-attr]
        rows = old.shape[0]
        assert torch.equal(now[:rows], old), name
        assert torch.equal(now[rows:], old.double().mean(0).to(old.dtype).expand(now[rows:].shape)), name
    names = {id(p): n for n, p in state.model.named_parameters()}  # type: ignore[union-attr]
    states = {
        f"{names[id(p)]}.{key}": whole(value).clone()
        for p, of in state.optimizer.state.items()  # type: ignore[union-attr]
        for key, value in of.items()
    }
    step_of(state)
    return states


def saves_small(directory: str) -> dict[str, torch.Tensor]:
    """Train with ``OLD`` tokens, save, and return the states of the optimizer."""
    model = sw.load_pretrained(f"{directory}/old", mesh_of((dist.get_world_size(),)))
    state = sw.TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    ids = torch.tensor([[1, 5, 7, 2, 90]])
    model(input_ids=ids, labels=ids).loss.backward()
    state.optimizer.step()  # type: ignore[union-attr]
    sw.save(state, f"{directory}/step", step=1)
    names = {id(p): n for n, p in model.named_parameters()}
    return {
        f"{names[id(p)]}.{key}": whole(value)
        for p, of in state.optimizer.state.items()  # type: ignore[union-attr]
        for key, value in of.items()
    }


def reopens(directory: str) -> Any:
    """Digests of a grown base with the adapter that was exported."""
    return sw.digest(run_of(directory, f"{directory}/out").model)


def copies_of_modules(directory: str, adapter: Any) -> None:
    """PEFT's copies of embeddings and head are those of the grown model, old rows and new ones."""
    model = run_of(directory, adapter).model
    ordinary = resized(directory)
    for path, layer in (
        ("model.model.embed_tokens", ordinary.model.embed_tokens),
        ("model.lm_head", ordinary.lm_head),
    ):
        for place in ("original_module", "modules_to_save.default"):
            held = whole(model.get_parameter(f"base_model.{path}.{place}.weight"))
            assert torch.equal(held, layer.weight), (path, place)
