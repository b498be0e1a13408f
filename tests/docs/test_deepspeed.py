"""A transformers model from a checkpoint that DeepSpeed wrote, as on the page about it. DeepSpeed compiles an operator for the CPU at first, for minutes."""

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
from tests.docs.blocks import ROOT
from tests.docs.test_tutorial import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_run_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("`make loggers` installs it")
    monkeypatch.chdir(tmp_path)
    write_base()
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT))))
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    made = [sys.executable, "-m", "tests.docs._deepspeed", str(free_port())]
    subprocess.run(made, check=True, env=environment, timeout=800)
    model = sw.load_pretrained("path/to/base", dtype=torch.float32)
    before = model.lm_head.weight.clone()
    optimizer = torch.optim.AdamW(model.parameters())
    assert sw.restore(sw.TrainState(model, optimizer), "old-run").step == 1
    expected = load_file("expected.safetensors")
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(model.lm_head.weight, before), "trained"
    assert all(optimizer.state[p]["exp_avg"].any() for p in model.lm_head.parameters())
