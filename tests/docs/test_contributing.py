"""The tests that CONTRIBUTING.md shows are tests of this file, from the page's own text; what they leave out is here."""

from __future__ import annotations

import itertools
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.docs.blocks import ROOT, blocks
from tests.harness.launch import Launch
from tests.harness.on_ranks import on_ranks

__all__ = ["Launch", "dist", "on_ranks", "signal"]

fns = sys.modules[__name__]
ON_RANKS, RETURNED, KILLED = (
    block.text for block in blocks(ROOT / "CONTRIBUTING.md") if block.language == "python"
)
exec(ON_RANKS)
exec(RETURNED)


def digest_of(folder: str) -> object:
    """Of the same model on each rank."""
    assert Path(folder).is_dir()
    return sw.digest(nn.Linear(4, 4))


def _save_forever(folder: str) -> None:
    torch.manual_seed(0)
    state = sw.TrainState(nn.Linear(4, 4))
    with sw.Checkpointer(folder, keep_last=1, io=sw.IOOptions(timeout_s=5)) as checkpoints:
        for step in itertools.count(1):
            checkpoints.save(state, step)
            print("writing", flush=True)


def test_killing_ranks(tmp_path: Path) -> None:
    exec(KILLED, globals() | {"tmp_path": tmp_path})


def test_these_are_tests() -> None:
    assert {"test_sum", "test_same_on_all_ranks"} <= globals().keys()
