"""The architectures that exercise every kind of conversion: sharded loads and exports beside the ordinary load.

The whole sweep is ``benchmarks/sweep.py``; this is the part of it that is fast enough for every run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.needs("transformers>=5.23", "lacks some of these architectures")
def test_the_subset_is_large_enough() -> None:
    assert set(SUBSET) <= {a.model_type for a in architectures()}
    assert len(SUBSET) >= 40


def sweep(file: Path, *options: str) -> list[dict[str, Any]]:
    """Rows of a run of the command: in processes of its own, since it forks, which one with threads must not."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "sweep.py"),
        "--no-tp",
        "--json",
        str(file),
        *options,
    ]
    done = subprocess.run(
        command, env=worker_env(), cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return rows


def assert_right(rows: list[dict[str, Any]]) -> None:
    """Loads at 2 and 3 ranks, shards on dim 1, the export; and no rank reads what is not its own."""
    for row in rows:
        right = dict.fromkeys(("load 2", "export 2", "dim 1 2", "load 3"), "right")
        assert (row["verdict"], row["results"]) == ("right", right), row
        assert row["bytes_ratio"] <= MOST_BYTES, row


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_kind_of_conversion(tmp_path: Path) -> None:
    rows = sweep(tmp_path / "rows.json", "--library", "transformers", "--subset")
    assert {row["model_type"] for row in rows} == set(SUBSET)
    assert_right(rows)
    used = " ".join(kind for row in rows for kind in row["conversions"])
    assert [kind for kind in OPERATIONS if kind not in used] == []


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_parameters_that_stay_in_fp32(tmp_path: Path) -> None:
    """In bf16 these keep some layers, parameters beside layers, and parameters beside others of a module in fp32."""
    names = ("t5", "deepseek_v4", "olmo_hybrid")
    asked = ("--only", ",".join(names), "--dtype", "bfloat16")
    rows = sweep(tmp_path / "rows.json", "--library", "transformers", *asked)
    assert {row["model_type"] for row in rows} == set(names)
    assert_right(rows)
