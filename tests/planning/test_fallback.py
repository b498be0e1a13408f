"""Conversions without a map (arithmetic, values looked at): converted whole, in staging, and said so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.planning import _fallback_fns as fns

MIB = 1024**2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("no-map")
    fns.make_checkpoint(directory)
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", *nightly("float32")])
@pytest.mark.parametrize("world_size", [1, 3, *nightly(2)])
def test_converted_whole_and_right(ranks: RankPool, checkpoint: Path, world_size: int, dtype: str) -> None:
    for found in ranks.run_ranks(world_size, fns.load_beside_ordinary, str(checkpoint), dtype, timeout_s=120):
        assert found["different"] == []
        assert found["names"]
        assert len(found["converted"]) == 6  # three kinds, two layers: each group is as small as it can be
        by_target = {targets: (name, sources) for name, sources, targets, *_ in found["converted"]}
        name, sources = by_target[("model.layers.1.mlp.gate_proj.weight",)]
        assert set(sources) == {f"model.layers.1.mlp.gate_proj.{part}" for part in ("quantized", "scale")}
        assert name.startswith("Dequantize of 'model.layers.1.mlp.gate_proj.")
        assert all("has no map" in reason for *_, reason, _ in found["converted"])
        most = max(staging for *_, staging in found["converted"])
        assert found["bytes_read"] > 0
        assert 0 < found["staging_peak_bytes"] <= most + MIB
        # Sources and results alone, of the largest.
        assert most >= 70 * 48 + 70 * 4 + 2 * 70 * 48 * (4 if dtype == "float32" else 2)


def test_one_that_does_not_fit_is_refused_before_payload(ranks: RankPool, checkpoint: Path) -> None:
    for text in ranks.run_ranks(2, fns.load_error, str(checkpoint), MIB, timeout_s=120):
        assert text.startswith("PlanError")
        assert "6 problems" in text
        assert "too large: AddOne of 'model.layers.0.input_layernorm.offset'" in text
        assert "Give io=IOOptions(staging_bytes=" in text


def test_what_the_error_says_would_fit_does(ranks: RankPool, checkpoint: Path) -> None:
    (text, _) = ranks.run_ranks(2, fns.load_error, str(checkpoint), MIB, timeout_s=120)
    asked = max(int(part.split(")")[0]) for part in text.split("staging_bytes=")[1:])
    assert ranks.run_ranks(2, fns.load_error, str(checkpoint), asked, timeout_s=120) == ["none", "none"]
    (text, _) = ranks.run_ranks(2, fns.load_error, str(checkpoint), asked - 1, timeout_s=120)
    assert "too large" in text


def test_one_that_fails_on_its_data_fails_everywhere(
    ranks: RankPool, checkpoint: Path, tmp_path: Path
) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    stored["model.layers.1.mlp.down_proj.unsorted"][3, 3] = torch.nan
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    for text in ranks.run_ranks(2, fns.load_error, str(tmp_path), 32 * MIB, timeout_s=120):
        assert "LargestRowFirst of 'model.layers.1.mlp.down_proj.unsorted' failed: ValueError: NaN" in text


def test_mis_shaped_sources_are_found_before_payload(
    ranks: RankPool, checkpoint: Path, tmp_path: Path
) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    stored["model.layers.1.mlp.gate_proj.scale"] = torch.ones(69)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    for text in ranks.run_ranks(2, fns.load_error, str(tmp_path), 32 * MIB, timeout_s=120):
        assert text.startswith("UnsupportedConversionError")
        assert "Dequantize of 'model.layers.1.mlp.gate_proj.quantized'" in text


def test_what_was_converted_whole_is_not_exported_wrong(
    ranks: RankPool, checkpoint: Path, tmp_path: Path
) -> None:
    for text in ranks.run_ranks(2, fns.export_error, str(checkpoint), str(tmp_path / "out"), timeout_s=120):
        assert text.startswith("UnsupportedConversionError"), text
        assert not (tmp_path / "out").exists()
