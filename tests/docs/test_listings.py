"""What pages show that no command prints here: log lines, the files of a checkpoint, the tree of errors, the plan of a large pipeline."""

from __future__ import annotations

import inspect
import json
import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import errors
from shardwise.cli import main
from tests.docs.blocks import DOCS, blocks
from tests.docs.shown import check
from tests.harness.command import runner


def text_of(page: str, words: str) -> str:
    (found,) = (block.text for block in blocks(DOCS / page) if words in block.text)
    return found


def trained(model: nn.Module, inputs: torch.Tensor) -> sw.TrainState:
    optimizer = torch.optim.AdamW(model.parameters())
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return sw.TrainState(model, optimizer)


def test_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a save and a resume, as ``logging.basicConfig`` formats them."""
    state = trained(nn.Linear(682, 128), torch.ones(1, 682))
    with (
        caplog.at_level(logging.INFO, logger="shardwise"),
        sw.Checkpointer(tmp_path / "runs/a") as checkpoints,
    ):
        checkpoints.save(state, 100)
        checkpoints.resume(state)
    records = [record for record in caplog.records if record.name.startswith("shardwise")]
    lines = [logging.Formatter(logging.BASIC_FORMAT).format(record) for record in records]
    printed = "\n".join(lines).replace(str(tmp_path), "")
    check("docs/howto/logging.md", text_of("howto/logging.md", "INFO:shardwise"), printed)


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    sw.save(trained(nn.Linear(4, 4), torch.ones(1, 4)), tmp_path / "step-00000100", step=100)
    head, *lines = text_of("format.md", "manifest.json").splitlines()
    shown = {line.split()[0].replace("RRRRR", "00000").rstrip("/") for line in lines}
    assert head == "step-00000100/"
    assert all((tmp_path / head / name).exists() for name in shown)
    assert {path.name for path in (tmp_path / head).iterdir()} == {name.split("/")[0] for name in shown}


def test_tree_of_errors() -> None:
    shown: dict[str, str] = {}
    above: list[str] = []
    for line in text_of("errors.md", "ShardwiseError").splitlines():
        found = re.match(r"([│├└─ ]*)(\w+)", line)
        assert found is not None
        depth = len(found[1]) // 4
        above[depth:] = [found[2]]
        shown[found[2]] = above[depth - 1] if depth else "Exception"
    classes = [getattr(errors, name) for name in errors.__all__]
    assert shown == {c.__name__: c.__base__.__name__ for c in classes if inspect.isclass(c)}


@pytest.mark.slow
def test_plan_of_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the configs of Wan 2.2: those of its diffusers classes are their defaults."""
    pytest.importorskip("diffusers")
    command, *shown = text_of("howto/diffusers.md", "--fit 40GiB").splitlines()
    words = command.removeprefix("$ shardwise ").split()
    text_encoder = {
        "architectures": ["UMT5EncoderModel"],
        "model_type": "umt5",
        "vocab_size": 256384,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    configs = {
        "text_encoder": text_encoder,
        **{name: {"_class_name": "WanTransformer3DModel"} for name in ("transformer", "transformer_2")},
        "vae": {"_class_name": "AutoencoderKLWan"},
    }
    index: dict[str, object] = {"_class_name": "WanPipeline"}
    for name, config in configs.items():
        (tmp_path / words[1] / name).mkdir(parents=True)
        (tmp_path / words[1] / name / "config.json").write_text(json.dumps(config))
        kind = config.get("_class_name")
        index[name] = ["diffusers", kind] if kind else ["transformers", "UMT5EncoderModel"]
    (tmp_path / words[1] / "model_index.json").write_text(json.dumps(index))
    monkeypatch.chdir(tmp_path)
    result = runner().invoke(main, words, prog_name="shardwise")
    assert result.exit_code == 0, result.output
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown
