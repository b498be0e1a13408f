"""``overwrite=True``: an earlier export is replaced at once, and nothing else is ever deleted."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.cli.commands import main
from shardwise.errors import CheckpointError
from shardwise.export import write as to_directory
from tests.harness.command import runner


def model(value: float) -> nn.Module:
    made = nn.Linear(3, 2)
    nn.init.constant_(made.weight, value)
    return made


def weight(path: Path) -> float:
    return float(load_file(path / "model.safetensors")["weight"][0, 0])


@pytest.mark.parametrize("exchange", ["at once", "two renames"])
def test_an_earlier_export_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str
) -> None:
    out = tmp_path / "out"
    sw.export_hf(model(1.0), out, max_shard_bytes=1)  # one file for each tensor, and an index
    assert (out / "model.safetensors.index.json").exists()
    with pytest.raises(CheckpointError, match=r"exists already.*overwrite=True; --overwrite"):
        sw.export_hf(model(2.0), out)
    seen: list[bool] = []
    if exchange == "two renames":

        class Libc:
            def renameat2(self, *_: Any) -> int:
                seen.append(out.exists())
                ctypes.set_errno(errno.EINVAL)
                return -1

        monkeypatch.setattr(to_directory.ctypes, "CDLL", lambda *_, **__: Libc())
    sw.export_hf(model(2.0), out, overwrite=True)
    assert seen == ([] if exchange == "at once" else [True])
    assert weight(out) == 2.0
    assert sorted(os.listdir(out)) == ["model.safetensors"], "none of the old files is left"
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_a_new_directory_needs_no_earlier_one(tmp_path: Path) -> None:
    sw.export_hf(model(1.0), tmp_path / "out", overwrite=True)
    assert weight(tmp_path / "out") == 1.0


@pytest.mark.parametrize("what", ["checkpoint", "run", "repository", "file", "no weights", "link"])
def test_nothing_but_an_export_is_replaced(tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    if what == "checkpoint":
        sw.save(sw.TrainState(model=model(1.0)), out)
    elif what == "run":
        with sw.Checkpointer(out) as checkpoints:
            checkpoints.save(sw.TrainState(model=model(1.0)), 1)
    elif what == "repository":
        sw.export_hf(model(1.0), out)
        (out / ".git").mkdir()
    elif what == "file":
        out.write_text("mine")
    elif what == "no weights":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    else:
        sw.export_hf(model(1.0), tmp_path / "other")
        out.symlink_to(tmp_path / "other")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"earlier exports only|symbolic link"):
        sw.export_hf(model(2.0), out, overwrite=True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_failure_leaves_the_earlier_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    sw.export_hf(model(1.0), out)

    def fails(*_: Any) -> None:
        raise CheckpointError("headers can't be read")

    monkeypatch.setattr(to_directory, "check_readable", fails)
    with pytest.raises(CheckpointError, match="can't be read"):
        sw.export_hf(model(2.0), out, overwrite=True)
    assert weight(out) == 1.0
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_in_a_store_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't exchange two prefixes"):
        sw.export_hf(model(1.0), "s3://bucket/out", overwrite=True)


def test_command(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sw.save(sw.TrainState(model=model(1.0)), tmp_path / "step")
    for options, status in (([], 0), ([], 1), (["--overwrite"], 0)):
        done = runner().invoke(main, ["export", str(tmp_path / "step"), str(tmp_path / "out"), *options])
        assert done.exit_code == status, done.output
    assert weight(tmp_path / "out") == 1.0
