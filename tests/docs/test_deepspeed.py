"""The commands of the page about DeepSpeed, on a checkpoint that DeepSpeed wrote. It compiles an operator for the CPU at first, for minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from tests.docs._run_blocks import write_base
from tests.docs.blocks import DOCS, ROOT, blocks
from tests.docs.test_tutorial import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_weights_are_merged_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("`make loggers` installs it")
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    write_base()
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT))))
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    made = [sys.executable, "-m", "tests.docs._deepspeed", str(free_port())]
    subprocess.run(made, check=True, env=environment, timeout=800)
    (block,) = (block for block in blocks(DOCS / "migrate/deepspeed.md") if "zero_to_fp32" in block.text)
    commands = block.text.replace("$ ", "")
    subprocess.run(["bash", "-ec", commands], check=True, env=environment, timeout=100)
    model = AutoModelForCausalLM.from_pretrained("path/to/base", dtype=torch.float32)
    before = model.lm_head.weight.clone()
    sw.load(model, "old-run/weights")
    expected = load_file("expected.safetensors")
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(model.lm_head.weight, before), "trained"
