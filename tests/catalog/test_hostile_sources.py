"""Files of other programs beside the tensors: configs, indexes, states. Whatever they hold, the error is ours and named."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import FormatError, ShardwiseError, SourceError
from shardwise.loading.adapters import open_adapter
from shardwise.models.classes import read_config
from shardwise.models.homes import read_assets
from shardwise.runs.third_party import find_run
from tests.fuzz.seeds import make_model
from tests.harness.bombs import refused_within, run_apart
from tests.harness.open_files import open_below

#: Texts in the place of a JSON document, each wrong in its own way.
NOT_DOCUMENTS = {
    "empty": b"",
    "no JSON": b"{",
    "no UTF-8": b'{"a": "\xff"}',
    "deep": b'{"weight_map":' + b"[" * 100_000,
    "digits": b'{"global_step": ' + b"9" * 10_000 + b"}",
    "a list": b"[1, 2]",
    "a number": b"3",
    "nothing": b"null",
}
every_text = pytest.mark.parametrize("text", NOT_DOCUMENTS)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 as transformers stores it."""
    root = tmp_path_factory.mktemp("hub") / "gpt2"
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, n_positions=12)
    AutoModelForCausalLM.from_config(config).save_pretrained(root)
    return root


def copy_of(source: Path, root: Path, **contents: bytes) -> Path:
    """The directory with other contents of some ``.json`` files."""
    root.mkdir()
    for path in source.iterdir():
        (root / path.name).write_bytes(path.read_bytes())
    for name, content in contents.items():
        (root / f"{name}.json").write_bytes(content)
    return root


def changed(source: Path, **values: Any) -> bytes:
    return json.dumps({**json.loads((source / "config.json").read_text()), **values}).encode()


# ----------------------------------------------------------------------------------------------------
# config.json, generation_config.json


@pytest.mark.parametrize(
    "values",
    [
        {"n_layer": 4294967298},
        {"num_hidden_layers": 4294967298},
        {"num_labels": 4294967298},
        {"text_config": {"num_hidden_layers": 2**40}},
        {"depths": [2, 2**33]},
    ],
)
def test_a_config_that_counts_to_billions(
    model_directory: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    root = copy_of(model_directory, tmp_path / "x", config=changed(model_directory, **values))
    text = refused_within(lambda: sw.load_pretrained(root))
    assert "config.json" in text
    assert "the limit is" in text


def test_a_model_far_larger_than_its_source(model_directory: Path, tmp_path: Path) -> None:
    root = copy_of(model_directory, tmp_path / "x", config=changed(model_directory, n_layer=200_000))
    text = refused_within(lambda: sw.load_pretrained(root), seconds=10)
    assert "config.json" in text
    assert "the source only has" in text
    with pytest.raises(FormatError, match="the source only has"):
        sw.convert(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@every_text
def test_no_config(model_directory: Path, tmp_path: Path, text: str) -> None:
    root = copy_of(model_directory, tmp_path / "x", config=NOT_DOCUMENTS[text])
    for read in (read_config, sw.load_pretrained, read_assets):
        if read is read_assets and text == "digits":
            continue  # Python's JSON takes it for what it is only where it is asked for
        with pytest.raises(FormatError, match=r"config\.json"):
            read(str(root))  # type: ignore[operator]


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["Trainer"]},
        {"architectures": ["pipeline"]},
        {"architectures": ["models"]},
        {"architectures": [[]]},
        {"architectures": 3},
        {"dtype": "load"},
        {"dtype": [1]},
        {"configuration_files": ["../../config.json"]},
        {"configuration_files": [3]},
        {"n_embd": "16"},
        {"n_embd": -1},
        {"n_embd": 2**70},
    ],
)
def test_a_config_of_wrong_values(model_directory: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    root = copy_of(model_directory, tmp_path / "x", config=changed(model_directory, **values))
    with pytest.raises(ShardwiseError, match="config"):
        sw.load_pretrained(root)


def test_configs_nested_deeply(model_directory: Path, tmp_path: Path) -> None:
    """transformers writes them out again, each line indented by its depth: 100 KB took seconds."""
    nested: Any = 1
    for _ in range(120):
        nested = {"x": [nested]}
    texts = {
        "config": changed(model_directory, mine=nested),
        "generation_config": json.dumps({"mine": nested}).encode(),
    }
    for name, text in texts.items():
        root = copy_of(model_directory, tmp_path / name, **{name: text})
        found = refused_within(lambda root=root: sw.load_pretrained(root))  # type: ignore[misc]
        assert f"{name}.json" in found
        assert "nested deeper than 32" in found


@every_text
def test_no_generation_config(model_directory: Path, tmp_path: Path, text: str) -> None:
    root = copy_of(model_directory, tmp_path / "x", generation_config=NOT_DOCUMENTS[text])
    with pytest.raises(ShardwiseError, match=r"generation_config\.json"):
        sw.load_pretrained(root)


@pytest.mark.parametrize(
    "document", [{"cache_implementation": {}}, {"max_new_tokens": "x"}, {"watermarking_config": 3}]
)
def test_a_generation_config_of_wrong_values(model_directory: Path, tmp_path: Path, document: Any) -> None:
    """transformers takes some of them; what it raises for the rest names the file."""
    content = json.dumps(document).encode()
    root = copy_of(model_directory, tmp_path / "x", generation_config=content)
    outcome = run_apart(lambda: sw.load_pretrained(root), seconds=10, mbytes=500)
    assert outcome.kind == "done" or (outcome.is_ours and "generation_config.json" in outcome.text), outcome


def test_a_pipe_or_a_sparse_file_in_the_place_of_a_document(
    model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = copy_of(model_directory, tmp_path / "x")
    os.truncate(root / "config.json", 5 * 1024**3)
    text = refused_within(lambda: read_config(str(root)))
    assert "the limit is" in text
    root = copy_of(model_directory, tmp_path / "y", tokenizer=b"")
    os.truncate(root / "tokenizer.json", 5 * 1024**3)
    with caplog.at_level(logging.WARNING, "shardwise"):
        outcome = run_apart(lambda: read_assets(str(root)), seconds=1, mbytes=200)
        assert outcome.kind == "done", outcome
        assert "tokenizer.json" not in read_assets(str(root))
    assert f"tokenizer.json ({5 * 1024**3} bytes)" in caplog.text


# ----------------------------------------------------------------------------------------------------
# Indexes and headers


@pytest.mark.parametrize("index", ["pytorch_model.bin.index.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "file",
    ["../stolen.bin", "/etc/passwd", "..", ".", "", "a/b", "a\0b", "\ud800", "x" * 2000, 3, None, ["x"], {}],
)
def test_an_index_that_leads_elsewhere(tmp_path: Path, index: str, file: Any) -> None:
    (tmp_path / index).write_text(json.dumps({"weight_map": {"w": file}}))
    (tmp_path / "x.safetensors").write_bytes(b"") if "safe" in index else None
    with pytest.raises(FormatError, match="not a plain file name") as caught:
        open_catalog(tmp_path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("index", ["pytorch_model.bin.index.json", "model.safetensors.index.json"])
@every_text
def test_no_index(tmp_path: Path, index: str, text: str) -> None:
    (tmp_path / index).write_bytes(NOT_DOCUMENTS[text])
    (tmp_path / "x.safetensors").write_bytes(b"") if "safe" in index else None
    with pytest.raises(FormatError, match="index"):
        open_catalog(tmp_path)


@pytest.mark.parametrize("shape", [[0, 2**61, 2**61], [0] + [2] * 63, [2**62, 0]])
def test_a_header_whose_shape_no_tensor_has(tmp_path: Path, shape: list[int]) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for read in (open_catalog, lambda path: sw.convert(path, tmp_path / "out")):
        with pytest.raises(FormatError, match="too large"):
            read(tmp_path)
    assert not (tmp_path / "out").exists()


def test_names_that_are_none(tmp_path: Path) -> None:
    for name in ("\ud800", "x" * 5000):
        save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
        content = (tmp_path / "model.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        document = json.loads(content[8 : 8 + length])
        header = json.dumps({name: document["w"]}).encode()
        (tmp_path / "model.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + content[8 + length :]
        )
        with pytest.raises(FormatError, match="is no"):
            open_catalog(tmp_path)


# ----------------------------------------------------------------------------------------------------
# What stands beside a run


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """Accelerate's full state of a linear layer."""
    root = tmp_path / "run"
    root.mkdir()
    model = torch.nn.Linear(3, 2)
    torch.save(model.state_dict(), root / "pytorch_model_fsdp.bin")
    group = {"lr": 0.1, "params": ["weight", "bias"]}
    state = {n: {"momentum": torch.ones_like(p)} for n, p in model.named_parameters()}
    torch.save({"state": state, "param_groups": [group]}, root / "optimizer.bin")
    return root


@pytest.mark.parametrize(
    "step", ["Infinity", "NaN", "-5", "1e3", '"7"', "[]", "true", str(2**63), "9" * 5000, "[" * 100_000]
)
def test_a_step_that_counts_nothing(run_directory: Path, tmp_path: Path, step: str) -> None:
    (run_directory / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    with pytest.raises(FormatError, match=r"trainer_state\.json"):
        _ = find_run(run_directory).step
    with pytest.raises(FormatError, match=r"trainer_state\.json"):
        sw.convert(run_directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [[1, 2], 3, None, "text", torch.ones(2), ()])
def test_a_scheduler_that_is_no_dict(run_directory: Path, tmp_path: Path, value: Any) -> None:
    torch.save(value, run_directory / "scheduler.bin")
    report = sw.convert(run_directory, tmp_path / "out")
    assert any(line.startswith("scheduler") and "is a dict" in line for line in report.skipped)
    assert sw.verify(tmp_path / "out").ok


def optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, sgd, torch.optim.lr_scheduler.StepLR(sgd, 3)


@pytest.mark.parametrize(
    ("document", "said"),
    [([1], "is a dict"), ({"step": 5}, "is a method"), ({"get_last_lr": None}, "is a method")],
)
def test_a_scheduler_that_can_not_be_put_back(run_directory: Path, document: Any, said: str) -> None:
    torch.save(document, run_directory / "scheduler.bin")
    model, sgd, scheduler = optimizer()
    with pytest.raises(ShardwiseError, match=said):
        sw.restore(sw.TrainState(model=model, optimizer=sgd, scheduler=scheduler), run_directory)


@pytest.mark.parametrize(
    "content",
    [
        {"state": {"weight": {"m": torch.ones(2, 3)}}, "param_groups": [{"params": [["weight"]]}]},
        {"state": {"weight": {"m": torch.ones(2, 3)}}, "param_groups": [{"params": "weight"}]},
        {"state": {"weight": {"m": torch.ones(2, 3)}}, "param_groups": [3]},
        {"state": {"weight": 3}, "param_groups": []},
        {"state": [], "param_groups": []},
        [1],
    ],
)
def test_an_optimizer_of_another_kind(run_directory: Path, tmp_path: Path, content: Any) -> None:
    torch.save(content, run_directory / "optimizer.bin")
    with pytest.raises(ShardwiseError, match="optimizer"):
        sw.convert(run_directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@every_text
def test_no_adapter_config(tmp_path: Path, text: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes(NOT_DOCUMENTS[text])
    with pytest.raises(SourceError, match=r"adapter_config\.json"):
        open_adapter(tmp_path)


def test_no_descriptor_stays_open(run_directory: Path, tmp_path: Path) -> None:
    """After errors as after success."""
    (tmp_path / "bad.pt").write_bytes(b"PK" * 100)
    torch.save([torch.ones(3).as_strided((2,), (2,))], run_directory / "scheduler.bin")
    reads: list[Callable[[], object]] = [
        lambda: open_catalog(tmp_path / "bad.pt"),
        lambda: open_catalog(run_directory),
        lambda: find_run(run_directory).document("scheduler"),
        lambda: find_run(run_directory).optimizer(0),
    ]
    for read in reads:
        for _ in range(3):
            with contextlib.suppress(ShardwiseError):
                read()
    assert open_below(tmp_path) == open_below(run_directory) == []


def test_a_lock_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ShardwiseError, match="not a regular file"):
        sw.Checkpointer(tmp_path)


@pytest.mark.parametrize(
    ("field", "said"), [("head_dim", "'head_dim' is"), ("vocab_size", "describes a tensor of more than")]
)
def test_a_config_that_asks_for_huge_tensors(tmp_path: Path, field: str, said: str) -> None:
    """It is refused before the allocator is asked, which may have the memory."""
    (tmp_path / "model").mkdir()
    make_model(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), field: 2**36}))
    with pytest.raises(ShardwiseError, match=rf"config\.json: {said}"):
        sw.plan(tmp_path / "model", ranks=2)
