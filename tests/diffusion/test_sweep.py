"""Some model classes of diffusers of each kind: sharded loads in fp32 and bf16, and the ordinary load.

The whole sweep is ``benchmarks/sweep.py``; this is a part of it that is fast enough for every change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.architectures import diffusion_models
from benchmarks.sweep import DIFFUSION_SUBSET, MOST_BYTES
from tests.meta.test_sweep import sweep

_CLASSES = pytest.mark.needs("diffusers>=0.39", "lacks one of these classes")


@_CLASSES
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_classes_of_each_kind(tmp_path: Path) -> None:
    rows = sweep(tmp_path / "rows.json", "--library", "diffusers", "--subset")
    assert {row["class_name"] for row in rows} == set(DIFFUSION_SUBSET)
    for row in rows:
        right = dict.fromkeys(("load 2", "bf16 2", "dim 1 2", "load 3", "bf16 3", "whole 1"), "right")
        assert (row["verdict"], row["results"]) == ("right", right), row
        assert row["bytes_ratio"] <= MOST_BYTES, row
    assert any("stay in fp32" in note for row in rows for note in row["notes"])


@_CLASSES
def test_every_exported_class_is_asked_for() -> None:
    names = {model.class_name for model in diffusion_models()}
    assert set(DIFFUSION_SUBSET) <= names
    assert len(names) > 100
    assert [m.class_name for m in diffusion_models("transformer_flux,VQ*")] == [
        "FluxTransformer2DModel",
        "VQModel",
    ]
