"""A short form of what ``python -m tests.launchers.table`` runs: one stop under SLURM, one killed worker under Ray Train."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import ray_train, slurm
from .curves import curve_of
from .rows import NotHere

pytestmark = pytest.mark.nightly


@pytest.mark.timeout(150)
def test_slurm_preempts_and_starts_again(tmp_path: Path) -> None:
    try:
        slurm.version()
    except NotHere as why:
        pytest.skip(str(why))
    with slurm.running() as cluster:
        expected = slurm.whole(cluster, tmp_path / "whole")
        row = slurm.run_case(cluster, slurm.SHORT, tmp_path / "stopped", expected)
    assert row.ok, row


@pytest.mark.timeout(300)
def test_ray_starts_a_killed_worker_again(tmp_path: Path) -> None:
    try:
        ray_train.version()
    except NotHere as why:
        pytest.skip(str(why))
    assert ray_train.run_example(tmp_path / "killed", ((1, 13),)) == 0
    found = curve_of(tmp_path / "killed" / "losses.jsonl")
    assert len(found.losses) == ray_train.STEPS
    assert [first for first, _ in found.lives] == [0, 10]
    assert found.repeated_alike, "steps 11 and 12 have the same losses in both lives"
