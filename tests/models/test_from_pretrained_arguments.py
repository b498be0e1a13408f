"""Keyword arguments that people bring along from from_pretrained: they work, or the error says what to do instead."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, modeling_utils
from transformers.models.auto import auto_factory

import shardwise as sw
from shardwise.catalog.weights import Choice
from shardwise.errors import SourceError
from shardwise.integrations import accelerate as swa
from shardwise.models.hub import REFUSED, FromPretrained, needed_files, understand

_CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_labels": 3,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arguments") / "qwen"
    Qwen3ForCausalLM(Qwen3Config(**_CONFIG)).to(torch.bfloat16).save_pretrained(path)
    return path


def _arguments_of(function: Callable[..., Any]) -> set[str]:
    """Keyword arguments that a function names, takes out of its ``kwargs``, or lists to be dropped."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (body,) = tree.body
    assert isinstance(body, ast.FunctionDef)
    named = {a.arg for a in (*body.args.args, *body.args.kwonlyargs)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("kwargs.pop", "kwargs.get"):
            if isinstance(node.args[0], ast.Constant):
                named.add(node.args[0].value)
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.List):
            named |= {c.value for c in node.iter.elts if isinstance(c, ast.Constant)}
    return named - {"cls", "pretrained_model_name_or_path"}


def test_every_argument_of_from_pretrained_works_or_has_an_answer() -> None:
    theirs = _arguments_of(modeling_utils.PreTrainedModel.from_pretrained)
    theirs |= _arguments_of(auto_factory._BaseAutoModelClass.from_pretrained)
    assert {"device_map", "low_cpu_mem_usage", "revision", "tp_plan", "code_revision"} <= theirs
    ours = set(inspect.signature(sw.load_pretrained).parameters) | set(FromPretrained.__annotations__)
    asks = {"quantization_config", "load_in_4bit", "load_in_8bit"}
    assert theirs - ours - asks - REFUSED.keys() == set()
    assert ours & REFUSED.keys() == set()


@pytest.mark.parametrize("name", [*REFUSED, "use_cache"])
def test_what_is_not_taken_says_what_to_do_instead(model: Path, name: str) -> None:
    with pytest.raises(TypeError) as caught:
        sw.load_pretrained(model, **{name: True})
    said = str(caught.value)
    assert said.startswith(f"load_pretrained takes no {name}=; leave it out: ")
    assert (REFUSED.get(name) or f"AutoConfig.from_pretrained(path, {name}=…)") in said
    assert "\n" not in said


def test_what_works(model: Path, tmp_path: Path) -> None:
    loaded = sw.load_pretrained(model, attn_implementation="eager", torch_dtype="float32")
    assert loaded.config._attn_implementation == "eager"
    assert loaded.dtype == torch.float32
    assert sw.load_pretrained(model).config._attn_implementation == "sdpa"
    same = sw.load_pretrained(
        model, dtype="float32", torch_dtype=torch.float32, token="hf_x", revision="main"
    )
    assert same.dtype == torch.float32
    with pytest.raises(ValueError, match="torch_dtype is the old name"):
        sw.load_pretrained(model, dtype="float32", torch_dtype=torch.bfloat16)
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "inner").symlink_to(model)
    (tmp_path / "outer" / "model.safetensors").write_bytes(b"not this one")
    inner, report = sw.load_pretrained(tmp_path / "outer", subfolder="inner", return_report=True)
    assert report.source == str(tmp_path / "outer" / "inner")
    assert all(torch.equal(t, same.state_dict()[n].bfloat16()) for n, t in inner.state_dict().items())
    by_path = sw.load_pretrained(model, config=model)
    assert by_path.config.hidden_size == 32


def test_the_accelerator_takes_them_too(model: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    try:
        loaded = swa.load_pretrained(Accelerator(cpu=True), model, attn_implementation="eager")
        assert loaded.config._attn_implementation == "eager"
        with pytest.raises(TypeError, match="every rank gets its shards"):
            swa.load_pretrained(Accelerator(cpu=True), model, device_map="auto")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_new_head_as_the_answer_says(model: Path) -> None:
    """In place of ignore_mismatched_sizes."""
    from transformers import Qwen3ForSequenceClassification

    path = model.parent / "classifier"
    Qwen3ForSequenceClassification(Qwen3Config(**_CONFIG)).save_pretrained(path)
    config = Qwen3Config(**{**_CONFIG, "num_labels": 5})
    said = REFUSED["ignore_mismatched_sizes"]
    assert "names=lambda n: n.replace('score.', 'old_score.')" in said
    assert "allow_unused=('score.*',), allow_missing=('score.*',)" in said
    with sw.meta_init():
        classifier = Qwen3ForSequenceClassification(config)
    report = sw.load(
        classifier,
        path,
        names=lambda n: n.replace("score.", "old_score."),
        allow_unused=("score.*",),
        allow_missing=("score.*",),
    )
    assert classifier.score.weight.shape == (5, 32)
    assert [d.name for d in report.initialized] == ["score.weight"]


def test_the_token_is_in_no_text() -> None:
    asked = understand({"token": "hf_secret"}, "auto")
    assert asked.hub.token == "hf_secret"
    assert "hf_secret" not in repr(asked)


def test_which_files_of_a_repository() -> None:
    def chosen(files: list[str], **options: Any) -> set[str]:
        return set(needed_files(files, where="x/y", **options)[0])

    documents = ["config.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "README.md"]
    other = [
        "flax_model.msgpack",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "code.py",
        "a/b.json",
    ]
    two = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert chosen([*documents, *other, "model.safetensors"]) == {*documents, "model.safetensors"}
    assert chosen([*documents, *other, *two]) == {*documents, two[2]}, "the index names the others"
    assert chosen([*documents, *other]) == {*documents, "pytorch_model.bin"}
    assert chosen(["config.json", "pytorch_model.bin"]) == {"config.json", "pytorch_model.bin"}
    fp16 = ["model.fp16.safetensors", "model.safetensors.index.fp16.json"]
    assert chosen(["model.safetensors", fp16[0]], choice=Choice(variant="fp16")) == {fp16[0]}
    assert (
        needed_files(["model.safetensors", fp16[1]], choice=Choice(variant="fp16"), where="x")[1] == fp16[1]
    )
    assert chosen(["x.py", "m/y.py", "model.safetensors"], with_code=True) == {
        "x.py",
        "m/y.py",
        "model.safetensors",
    }
    inner = ["inner/config.json", "inner/model.safetensors"]
    assert chosen([*documents, *inner, "model.safetensors"], subfolder="inner") == set(inner)
    with pytest.raises(SourceError, match=r"is a GGUF model"):
        chosen(["config.json", "q4.gguf"])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("dtpye", "dtype"),
        ("attn_implementaton", "attn_implementation"),
        ("adaptor", "adapter"),
        ("meshes", "mesh"),
        ("revison", "revision"),
    ],
)
def test_a_misspelled_argument_is_told_what_was_meant(typed: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"takes no {typed}=; did you mean {meant}=\?"):
        understand({typed: None}, "auto")
