"""Accelerate and the Trainer, where saves fail on one rank or find the disk full: training goes on, alike on all ranks."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pool import RankPool
from tests.harness.small_disks import small_disk_at
from tests.integrations import _failing_saves_fns as fns
from tests.integrations.test_trainer import hub as hub


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    with small_disk_at(tmp_path / "disk", "64m") as disk:
        yield disk


TOO_LARGE = os.strerror(errno.EFBIG)


def test_accelerate(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run_ranks(2, fns.accelerate, str(tmp_path / "run"), timeout_s=100)
    assert len(first.pop("warned")) == 2
    assert second.pop("warned") == [], "rank 0 says it for all"
    assert {k: first[k] for k in ("failures", "taken", "raised", "resumed", "by default")} == {
        k: second[k] for k in ("failures", "taken", "raised", "resumed", "by default")
    }
    one, two, three, four = first["failures"]
    assert (one, three) == (None, None)
    for text in (two, four, first["raised"][1], first["by default"][1]):
        assert "rank 1: CheckpointError" in text
        assert TOO_LARGE in text
        assert str(tmp_path / "run") in text
    assert first["taken"][0] == "CheckpointError", "the program's error passes in no case"
    assert first["raised"][0] == first["by default"][0] == "RankError"
    assert first["resumed"] == 3
    for found in (first, second):
        assert found["after"] == found["losses"][3:], "training was not touched, and goes on from step 3"
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"step-1", "step-3"}, "nothing half published"


@pytest.mark.parametrize("automatic", [False, True])
def test_accelerate_with_a_fallback(
    ranks: RankPool, small_disk: Path, tmp_path: Path, automatic: bool
) -> None:
    elsewhere = tmp_path / "elsewhere"
    places = [small_disk / "run" / ("checkpoints" if automatic else "")] * 2 + [elsewhere] * 2
    names = [f"checkpoint_{k}" if automatic else f"step-{k + 1}" for k in range(5)]
    for found in ranks.run_ranks(
        2, fns.accelerate_with_fallback, str(small_disk), str(elsewhere), automatic, timeout_s=100
    ):
        assert found["paths"] == [str(p / name) for p, name in zip(places, names[:4], strict=True)]
        assert found["resumed"] == (4, str(elsewhere / names[3])), "the newest of both"
        assert found["after"] == found["losses"][4:]
        last = names[4] if automatic else "step-6"
        assert found["next"] == str(places[0] / last)


@pytest.mark.slow
@pytest.mark.needs("trainer")
def test_trainer(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    first, second = ranks.run_ranks(2, fns.trainer, str(hub), str(tmp_path), timeout_s=200)
    for name in ("warn", "raise", "beside"):
        assert first[name]["failures"] == second[name]["failures"], name
        assert first[name].get("raised") == second[name].get("raised"), name
        assert second[name]["warned"] == []
    run = first["warn"]
    assert [step for step, why in run["failures"].items() if why is None] == [2, 6]
    step, kind, text = run["raised"]
    assert (step, kind) == (10, "RankError"), "the second in a row"
    assert len(run["warned"]) == 2, "steps 4 and 8; 10 is raised"
    for said in (*run["warned"], text):
        assert "rank 1: CheckpointError" in said
        assert TOO_LARGE in said
        assert str(tmp_path / "run") in said
    assert run["names"] == ["checkpoint-2", "checkpoint-6"], "nothing half published"
    assert first["raise"]["raised"][:2] == (2, "RankError")
    assert first["beside"]["raised"][0] == 4, (
        "rank 0 can't write its small files, and no rank waits in Trainer's barrier"
    )
    for found in (first, second):
        assert found["warn"]["losses"] == found["whole"]["losses"][:10], "failed saves do not touch training"
        assert found["again"]["resumed"] == 6
        assert found["again"]["losses"] == found["whole"]["losses"]


@pytest.mark.nightly
@pytest.mark.needs("trainer")
def test_trainer_with_a_fallback(ranks: RankPool, hub: Path, small_disk: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    for found in ranks.run_ranks(
        2, fns.trainer_with_fallback, str(hub), str(small_disk), str(elsewhere), timeout_s=200
    ):
        first, again = found["first"], found["again"]
        assert set(first["failures"].values()) == {None}
        assert first["best"] == str(elsewhere / "checkpoint-10"), "where it lies"
        assert first["names"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
        assert again["resumed"] == 10, "the newest of both"
        assert again["losses"] == found["whole"]["losses"], "bitwise"
        assert again["best"] == str(small_disk / "run" / "checkpoint-12")
    assert {p.name for p in elsewhere.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-10"}
