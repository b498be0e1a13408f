"""The architectures that exercise every kind of conversion: sharded loads and exports beside the ordinary load.

The whole sweep is ``benchmarks/sweep.py``; this is the part of it that is fast enough for every run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.architectures import architectures
from benchmarks.sweep import MOST_BYTES, SUBSET
from tests.harness.process import ROOT, worker_env

#: Every kind of operation that transformers' conversions are made of, on the dims that they act on.
OPERATIONS = (
    "Chunk(0)",
    "Chunk(1)",
    "Concatenate(0)",
    "Concatenate(1)",
    "ErnieFuseAndSplitTextVisionExperts",
    "Interleave(1)",
    "MergeModulelist(0)",
    "PermuteForRope",
    "Split(0)",
    "Transpose",
    "rename",
)


def test_the_subset_is_large_enough() -> None:
    known = {a.model_type for a in architectures()}
    assert set(SUBSET) <= known
    assert len(SUBSET) >= 40


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_conversions_load_and_export_alike(tmp_path: Path) -> None:
    """In processes of its own: it forks, which a test process with threads must not."""
    file = tmp_path / "rows.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "sweep.py"),
        "--subset",
        "--no-tp",
        "--json",
        str(file),
    ]
    done = subprocess.run(
        command, env=worker_env(), cwd=ROOT, capture_output=True, text=True, timeout=580, check=False
    )
    rows = json.loads(file.read_text())
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert {row["model_type"] for row in rows} == set(SUBSET)
    for row in rows:
        right = dict.fromkeys(("load 2", "export 2", "dim 1 2", "load 3"), "right")
        assert (row["verdict"], row["results"]) == ("right", right), row
        assert row["bytes_ratio"] <= MOST_BYTES, row
    used = " ".join(kind for row in rows for kind in row["conversions"])
    assert [kind for kind in OPERATIONS if kind not in used] == []
