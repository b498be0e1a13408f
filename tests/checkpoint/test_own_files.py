"""What a rank writes in a save is worked out once, before payload moves."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.snapshot import own_parts, take_snapshot
from shardwise.format.slices import rank_files
from tests.harness.looks import looks


def _state() -> sw.TrainState:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return sw.TrainState(model=model, optimizer=optimizer)


def test_a_save_works_out_its_files_once(tmp_path: Path) -> None:
    state = _state()
    with looks() as seen:
        sw.save(state, tmp_path / "step")
    assert seen.files == 2, "those of the model, and those of the optimizer"


def test_an_async_save_works_out_its_files_once(tmp_path: Path) -> None:
    """Sizing its memory, copying and writing take the same list."""
    state = _state()
    with sw.Checkpointer(tmp_path, mode="async") as checkpoints, looks() as seen:
        checkpoints.save(state, step=1)
        checkpoints.wait()
    assert seen.files == 2


def test_pieces_are_the_content_of_the_slices() -> None:
    snapshot = take_snapshot(_state(), 1)
    for part, own in zip(snapshot.parts, own_parts(snapshot, 0), strict=True):
        assert [f.slices for f in own.files] == rank_files([v.stored for v in part.live], 0)
        for file in own.files:
            assert [(p.live.stored, p.held) for p in file.pieces] == [(s.tensor, s.held) for s in file.slices]
        assert own.summed == [], "one rank writes all"
