"""One warning about weights in 16 bits under an optimizer that adds small steps to them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.state import low_bit as rounding
from tests.harness.logged import warnings_logged


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_warned", False)


def _state(dtype: torch.dtype, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> sw.TrainState:
    model = nn.Linear(4, 4, dtype=dtype)
    return sw.TrainState(model, kind(model.parameters(), lr=1e-5))  # type: ignore[call-arg]


def test_it_names_the_optimizer_and_the_line_that_helps() -> None:
    with warnings_logged() as said:
        _state(torch.bfloat16)
        _state(torch.bfloat16)
    (text,) = said
    assert "AdamW trains 2 of 2 tensors in bfloat16" in text
    assert "dtype=torch.float32, policy=sw.ShardPolicy(" in text


def test_the_update_is_really_lost() -> None:
    """What the warning says, and what its line ends."""
    torch.manual_seed(0)
    changed = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = nn.Linear(64, 64, dtype=dtype)
        before = model.weight.detach().clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
        model(torch.ones(2, 64, dtype=dtype)).sum().backward()
        optimizer.step()
        changed[dtype] = float((model.weight != before).float().mean())
    assert changed[torch.float32] == 1.0
    assert changed[torch.bfloat16] < 0.2


class OfAnotherPackage(torch.optim.AdamW):
    """May keep fp32 masters, or round stochastically."""


@pytest.mark.parametrize("kind", ["fp32", "another package's", "frozen", "no optimizer"])
def test_it_is_silent(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        if kind == "fp32":
            _state(torch.float32)
        elif kind == "another package's":
            _state(torch.bfloat16, OfAnotherPackage)
        elif kind == "frozen":
            base, adapter = nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False), nn.Linear(4, 4)
            net = nn.Sequential(base, adapter)
            sw.TrainState(net, torch.optim.AdamW(net.parameters()))
        else:
            sw.TrainState(nn.Linear(4, 4, dtype=torch.bfloat16))
    assert caplog.records == []
