"""Paths that hold something else than what is asked for: the error says what lies there, and what to give instead."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import SourceError


def test_a_directory_of_steps_is_named(tmp_path: Path) -> None:
    root = tmp_path / "run"
    model = torch.nn.Linear(2, 3)
    readers: list[Callable[[], object]] = [
        lambda: open_catalog(root),
        lambda: open_catalog(root, "actor"),
        lambda: sw.load(model, root),
        lambda: sw.restore(sw.TrainState(model=model), root),
        lambda: sw.verify(root),
        lambda: sw.export_hf(root, tmp_path / "out"),
        lambda: sw.load_pretrained(root),
        lambda: sw.convert(root, tmp_path / "out"),
        lambda: sw.diff(root, root),
    ]
    for held, said in (
        ((5,), f"contains step 5; give {root}/step-00000005"),
        ((5, 123456789), f"contains steps 5, 123456789; give one of them, e.g. {root}/step-123456789"),
        ((5, 6, 7, 8), f"contains 4 steps, the newest 6, 7, 8; give one of them, e.g. {root}/step-00000008"),
    ):
        shutil.rmtree(root, ignore_errors=True)
        for step in held:
            (root / f"step-{step:08d}").mkdir(parents=True)
        (root / "step-00000009.damaged-00").mkdir()
        for read in readers:
            with pytest.raises(SourceError, match=re.escape(said)):
                read()


def test_a_file_is_not_called_missing(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(SourceError, match="is a file"):
        sw.verify(file)
    with pytest.raises(SourceError, match="is a file"):
        sw.restore(sw.TrainState(model=torch.nn.Linear(2, 3)), file)
    with pytest.raises(SourceError, match="no such directory"):
        sw.verify(tmp_path / "no")
