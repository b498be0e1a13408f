"""mode="async": what is stored is the state at the call, and what fails behind is heard of."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.take import Lineage, collect, detached_documents
from shardwise.ranks.ranks import Ranks
from tests.checkpoint import _async_save_fns as fns
from tests.harness.pool import RankPool
from tests.harness.process import ROOT, worker_env
from tests.harness.tiers import nightly

MIB = 1024**2


@pytest.mark.parametrize("world_size", [2, *nightly(1, 3)])
@pytest.mark.parametrize("budget", [None, 2 * MIB])
def test_the_state_at_the_call_is_stored(
    ranks: RankPool, tmp_path: Path, world_size: int, budget: int | None
) -> None:
    width = 100_000  # 4 MB of weights, 12 MB with AdamW's moments
    for found in (
        ranks.run_ranks(
            world_size, fns.changed_while_saving, str(tmp_path / "run"), width * world_size, budget
        )
        if budget is None
        else ranks.run_ranks(
            world_size, fns.changed_while_saving, str(tmp_path / "run"), 40_000 * world_size, budget
        )
    ):
        assert found["equal"] == [True, True]
        assert found["verified"] == [True, True]
        assert found["published"] == (False, False, True)
        assert found["threads"] == []
        assert found["collectives"] == 0  # neither the copying nor the thread behind may meet the training's
        assert found["written"]
        assert len(set(found["staging"])) == 1  # sized at the start, used again
        if budget is None:
            assert found["local"] <= found["staging"][0] <= found["local"] + 4096
        else:
            assert found["staging"][0] == budget < found["local"]


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux says how much of its memory a process has touched"
)
def test_tensors_in_documents_are_those_at_the_call() -> None:
    kept = torch.zeros(3)
    state = sw.TrainState(model=nn.Linear(2, 2), extra={"kept": kept})
    detached = detached_documents(collect(state, 1, Lineage("", None), Ranks()))
    kept.add_(1)
    (stored,) = detached.shared["extra.kept"].tensors.values()
    assert not stored.any()


def test_staging_is_touched_before_the_first_save(ranks: RankPool, tmp_path: Path) -> None:
    """Else the first save would wait for the system to find its pages, where the second does not."""
    (found,) = ranks.run_ranks(1, fns.staging_is_touched, str(tmp_path / "run"), 400_000)
    assert found["staging"] >= 40 * 400_000 * 3
    assert found["there"] >= found["staging"]
    assert len(set(found["memory"])) == 1, "kept for the next save"


def test_a_closed_checkpointer_keeps_no_copy(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    with sw.Checkpointer(tmp_path, mode="async") as checkpointer:
        checkpointer.save(sw.TrainState(model=model), 1)
        assert checkpointer._buffer is not None
        memory = [weakref.ref(block) for block in checkpointer._buffer._blocks]
        assert checkpointer.staging_bytes >= 64 * 64 * 4
    assert checkpointer.staging_bytes == 0
    assert [ref() for ref in memory] == [None]


def test_a_budget_that_no_piece_fits_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for kind, text in ranks.run_ranks(2, fns.budget_too_small, str(tmp_path / "run")):
        assert kind in ("StateError", "RankError")
        assert "layer.weight" in text
        assert "max_staging_bytes=" in text


def test_a_failure_behind_is_raised_by_the_next_call_and_by_close(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.fails_behind, str(tmp_path / "run")):
        for call in ("next save", "close"):
            kind, text = found[call]
            assert kind == "RankError", text
            assert "rank 1" in text
            assert "File too large" in text
        assert found["steps"] == ["step-00000001"]
        assert found["resumed"] == 4
        assert found["equal"]


def test_retention_goes_on_behind(ranks: RankPool, tmp_path: Path) -> None:
    for names in ranks.run_ranks(2, fns.retention_behind, str(tmp_path / "run")):
        assert names == ["latest", "step-00000004", "step-00000005"]


def test_resume_waits_for_the_save_behind(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.resume_waits, str(tmp_path / "run")):
        assert found == [1, True]


@pytest.mark.processes
def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    root = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, str(fns.script(tmp_path)), str(root)],
        env=worker_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"latest", "step-00000001"} == {p.name for p in root.iterdir()} - {".lock"}
    assert sw.verify(root / "step-00000001").ok


@pytest.mark.parametrize(("option", "value"), [("mode", "later")])
def test_wrong_options_are_named(tmp_path: Path, option: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be"):
        sw.Checkpointer(tmp_path, **{option: value})


@pytest.mark.parametrize("option", ["max_staging_bytes", "keep_last", "keep_every"])
@pytest.mark.parametrize("value", [0, -5])
def test_wrong_numbers_are_named(tmp_path: Path, option: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1 or None, got {value}"):
        sw.Checkpointer(tmp_path, **{option: value})


def test_two_checkpointers_write_at_a_time(ranks: RankPool, tmp_path: Path) -> None:
    for steps in ranks.run_ranks(2, fns.two_at_a_time, str(tmp_path)):
        assert steps == [1, 1, 2, 2, 3, 3]


@pytest.mark.slow
def test_an_interrupted_wait_loses_nothing(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run_ranks(1, fns.interrupted_wait, str(tmp_path / "run"))
    assert found["interrupted"]
    assert found["still there"]
    assert found["first"]
    assert found["second"]
