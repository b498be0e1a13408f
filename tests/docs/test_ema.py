"""The block of docs/state.md about diffusers' EMAModel: tensors and counters come back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.docs.blocks import DOCS, blocks
from tests.docs.shown import run_and_check


def made(seed: int) -> dict[str, Any]:
    """What the block makes of a model."""
    diffusers = pytest.importorskip("diffusers.training_utils", reason="`make loggers` installs it")
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    names = {"copy": copy, "sw": sw, "EMAModel": diffusers.EMAModel, "model": model}
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    (block,) = (block for block in blocks(DOCS / "state.md") if "EMAModel" in block.text)
    run_and_check(block, block.text.replace(", …", ""), names)
    return names


@pytest.mark.filterwarnings("default")
def test_tensors_and_counters_are_restored(tmp_path: Path) -> None:
    first = made(1)
    for _ in range(3):
        first["model"](torch.ones(1, 4)).sum().backward()
        first["optimizer"].step()
        first["optimizer"].zero_grad()
        first["ema"].step(first["model"].parameters())
    sw.save(first["state"], tmp_path / "step-00000003", step=3)
    second = made(2)
    sw.restore(second["state"], tmp_path / "step-00000003")
    assert second["ema"].optimization_step == first["ema"].optimization_step == 3
    for ours, theirs in zip(second["ema"].shadow_params, first["ema"].shadow_params, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(second["ema"].shadow_params[0], second["model"].weight), "an average"
