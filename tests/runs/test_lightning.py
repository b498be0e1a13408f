"""Sharded checkpoints of Lightning, by its own writer: the model is the model, and the optimizer's moments are the optimizer's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import StateError
from shardwise.format.manifest import read_manifest
from tests.catalog import _dcp_fns
from tests.harness.models import build_reference
from tests.harness.pool import RankPool
from tests.runs import _lightning_fns as fns


@pytest.mark.parametrize("program", ["fabric", "trainer"])
def test_a_sharded_checkpoint_of_lightning(ranks: RankPool, tmp_path: Path, program: str) -> None:
    folder = str(tmp_path / "last.ckpt")
    saved = ranks.run_ranks(2, fns.lightning_saves, folder, program)
    expected = saved[0][0]
    prefix = "" if program == "fabric" else "model."
    names = {f"{prefix}{name}" for name in _dcp_fns.Lines().state_dict()}
    assert open_catalog(folder).tensors.keys() == names

    report = sw.convert(folder, tmp_path / "converted")
    assert sw.verify(tmp_path / "converted").ok
    assert (report.tensors, report.optimizer_tensors) == (14, 14 * 3)
    assert read_manifest(str(tmp_path / "converted")).models["model"].keys() == names
    said = " | ".join(report.skipped)
    lost = ["iter_num", "hparams"] if program == "fabric" else ["epoch", "callbacks", "hyper_parameters"]
    assert all(f"'{name}'" in said for name in lost), said
    assert report.step == (0 if program == "fabric" else 3)

    sw.export_hf(folder, tmp_path / "exported")
    exported = load_file(tmp_path / "exported/model.safetensors")
    assert exported.keys() == names
    for name, tensor in exported.items():
        assert torch.equal(tensor, expected[name.removeprefix(prefix)]), name

    for source in (folder, str(tmp_path / "converted")):
        for found, (_, losses) in zip(ranks.run_ranks(2, fns.goes_on, source, program), saved, strict=True):
            assert found["values"].keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found["values"][name], tensor), name
            if program == "trainer":
                assert found["losses"] == losses
                assert found["report"].step == 3
    if program == "trainer":
        for text in ranks.run_ranks(2, fns.asks_for_a_second, folder):
            assert "holds 1 optimizer(s)" in text


def test_a_lightning_module_around_a_transformers_model(
    ranks: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub, folder = tmp_path / "hub", str(tmp_path / "step-1.ckpt")
    build_reference("qwen3-tied").save_pretrained(hub)
    (expected,) = ranks.run_ranks(1, fns.lightning_module_saves, str(hub), folder)

    report = sw.convert(folder, tmp_path / "converted", config=hub)
    assert report.caveats == (
        "tensors were taken from 'model.', the part of the saved module that contains all of the model's names",
    )
    assert "seen: not used by the model's class" in report.skipped
    model = sw.load_pretrained(hub)
    optimizer = torch.optim.AdamW(model.parameters())
    sw.restore(sw.TrainState(model, optimizer), tmp_path / "converted")
    found = fns.moments(model, optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert optimizer.param_groups[0]["lr"] == 0.1

    sw.export_hf(folder, tmp_path / "exported", config=hub)
    exported = load_file(tmp_path / "exported/model.safetensors")
    assert exported.keys() == load_file(hub / "model.safetensors").keys()
    assert f"{folder}: left out everything that isn't in 'model.': 'seen'" in caplog.messages


def test_a_module_with_two_copies_of_the_model(ranks: RankPool, tmp_path: Path) -> None:
    reference = build_reference("qwen3-tied")
    reference.save_pretrained(tmp_path / "hub")
    copies = {f"{part}.{n}": t for part in ("ema", "model") for n, t in reference.state_dict().items()}
    torch.save({"state_dict": copies}, tmp_path / "last.ckpt")
    with pytest.raises(StateError, match=r"'ema\.' and 'model\.' each have all tensors of the model"):
        sw.convert(tmp_path / "last.ckpt", tmp_path / "converted", config=tmp_path / "hub")
