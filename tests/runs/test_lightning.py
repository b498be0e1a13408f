"""Sharded checkpoints of Lightning, by its own writer: the model is the model, and the optimizer's moments are the optimizer's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.format.manifest import read_manifest
from tests.catalog import _dcp_fns
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
