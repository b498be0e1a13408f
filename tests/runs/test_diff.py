"""sw.diff() and the command diff, on real files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.cli import main
from tests.harness.command import runner


def write(path: Path, **tensors: torch.Tensor) -> str:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return str(path)


def test_added_removed_changed_and_by_how_much(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    moved = base.clone()
    moved[1, 2] += 0.5
    moved[2, 3] -= 2.0
    zeros = torch.zeros(4)
    a = write(
        tmp_path / "a", same=base, moved=base.clone(), gone=zeros.clone(), cast=zeros.clone(), cut=zeros + 1
    )
    b = write(
        tmp_path / "b", same=base.clone(), moved=moved, new=zeros + 2, cast=zeros.half(), cut=torch.ones(5)
    )
    report = sw.diff(a, b)
    assert (report.added, report.removed, report.equal, report.by_digest) == (("new",), ("gone",), 1, 0)
    changed = {c.name: c for c in report.changed}
    assert changed.keys() == {"moved", "cast", "cut"}
    assert (changed["moved"].elements, changed["moved"].largest) == (2, 2.0)
    assert changed["moved"].relative == pytest.approx(math.sqrt(4.25) / float(base.norm()))
    assert changed["cast"].what == "dtype: F32 and F16"
    assert changed["cast"].elements == 0
    assert changed["cut"].what == "shape: [4] and [5]"
    assert not report.ok
    assert sw.diff(a, a).ok


def test_bits_count_not_numbers(tmp_path: Path) -> None:
    nan = torch.tensor([math.nan, 0.0, math.inf, 1.0])
    other = torch.tensor([math.nan, -0.0, 1.0, 1.0])
    (change,) = sw.diff(write(tmp_path / "a", x=nan), write(tmp_path / "b", x=other)).changed
    assert (change.elements, change.largest) == (2, math.inf)
    assert sw.diff(tmp_path / "a", tmp_path / "a").ok
    number = torch.tensor([2.0, 0.0, math.inf, 1.0])
    (change,) = sw.diff(tmp_path / "a", write(tmp_path / "c", x=number)).changed
    assert (change.elements, change.largest) == (1, math.inf)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    y = torch.tensor([0, 1, 0, 0]).to(dtype)
    (change,) = sw.diff(write(tmp_path / "a", x=x), write(tmp_path / "b", x=y)).changed
    assert (change.elements, change.largest) == (1, 1.0)


def test_large_tensors_are_read_in_pieces(tmp_path: Path) -> None:
    x = torch.randn(6, 1024, 1024)
    y = x.clone()
    y[5, 1023, 1023] += 1
    (change,) = sw.diff(write(tmp_path / "a", x=x), write(tmp_path / "b", x=y)).changed
    assert change.elements == 1


def two_steps(tmp_path: Path) -> tuple[str, str]:
    """Only the second layer's weight trains, so that digests of the rest stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW([model[1].weight], lr=0.1)
    paths = []
    for step in (1, 2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        paths.append(str(tmp_path / f"step-{step}"))
        sw.save(sw.TrainState(model=model, optimizer=optimizer), paths[-1], step=step)
    return paths[0], paths[1]


def test_two_steps_of_a_run(tmp_path: Path) -> None:
    first, second = two_steps(tmp_path)
    report = sw.diff(first, second)
    names = {c.name for c in report.changed}
    assert {"model:1.weight", "optimizer:1.weight.exp_avg"} <= names
    assert not any("0.weight" in n or "bias" in n for n in names)
    assert report.by_digest == report.equal == 3
    assert report.bytes_read < 1000  # what digests tell is not read


def test_a_checkpoint_beside_its_export(tmp_path: Path) -> None:
    first, _ = two_steps(tmp_path)
    sw.export_hf(first, tmp_path / "hf")
    report = sw.diff(first, tmp_path / "hf")
    assert report.ok
    assert report.equal == 4


def test_the_command(tmp_path: Path) -> None:
    first, second = two_steps(tmp_path)
    run = runner().invoke(main, ["diff", first, second])
    assert run.exit_code == 1
    assert "1.weight" in run.output
    assert "they differ" in run.output
    as_json = json.loads(runner().invoke(main, ["diff", first, second, "--json"]).output)
    assert as_json["ok"] is False
    assert as_json["equal"] == 3
    copy = shutil.copytree(first, tmp_path / "copy")
    same = runner().invoke(main, ["diff", first, str(copy)])
    assert (same.exit_code, "no differences" in same.output) == (0, True)
    lost = runner().invoke(main, ["diff", first, str(tmp_path / "nowhere")])
    assert lost.exit_code in (1, 2)
    assert "Traceback" not in lost.output
