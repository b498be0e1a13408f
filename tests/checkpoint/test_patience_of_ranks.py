"""Slow system calls are no dead ranks; a run that lost its directory publishes nothing; failures alike on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import _patience_of_ranks_fns as fns
from tests.harness.pool import RankPool


@pytest.mark.slow
def test_a_slow_call_is_progress(ranks: RankPool, tmp_path: Path) -> None:
    """fsync, close, rename, unlink and rmdir that take three times the timeout, on either rank, in the thread behind."""
    for found in ranks.run_ranks(2, fns.slow_calls, str(tmp_path)):
        assert found.pop("sync: left") == ["step-00000007"]
        assert found.pop("async: left") == ["step-00000003"]
        assert len(found) == 8
        for what, outcome in found.items():
            assert outcome == ("done", "", True), what


def test_slow_cleaning_up_is_progress(ranks: RankPool, tmp_path: Path) -> None:
    for failed, saved in ranks.run_ranks(2, fns.slow_cleanup, str(tmp_path)):
        assert failed[0] == "RankError"
        assert "rank 1: OSError" in failed[1]
        assert saved == ("done", "")


def test_what_hangs_is_still_found(ranks: RankPool) -> None:
    """Python that hangs after the timeout; a call that never ends after ten times that."""
    for python, kernel in ranks.run_ranks(2, fns.hangs, 6.0):
        for kind, text, _ in (python, kernel):
            assert kind == "RankError"
            assert "rank 1: no progress for 0.3 s" in text
        assert kernel[2] > 3.0  # it was given the time


def test_reading_the_lock_file_keeps_the_lock(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run_ranks(2, fns.lock_survives_readers, str(tmp_path / "run"))[0]
    assert found == {
        "after copying": True,
        "with a fork": True,
        "closed, the fork alive": False,
        "steps": ["step-00000001", "step-00000002"],
    }


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_lost_lock_publishes_nothing(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    by_rank = ranks.run_ranks(2, fns.lock_is_lost, str(tmp_path), mode)
    assert by_rank[0] == by_rank[1]
    causes = {
        "replaced": "another file has its name",
        "deleted": "the file was deleted",
        "taken": 'it was taken by {"host": "elsewhere", "pid": 1}',
    }
    for when in ("before", "during"):
        for how, cause in causes.items():
            kind, text = by_rank[0][f"{when}, {how}"]
            assert kind == "LockedError", (when, how, text)
            assert cause in text
            assert by_rank[0][f"{when}, {how}: left"] == ["step-00000001"]


def test_closing_after_the_group_is_a_named_error(ranks: RankPool, tmp_path: Path) -> None:
    """What the body raised comes first, and what the save says is a warning."""
    for found in ranks.run_ranks(2, fns.closed_too_late, str(tmp_path / "run")):
        assert found["body"] == ("LookupError", "the body's")
        assert any("before destroy_process_group()" in text for text in found["warned"]), found["warned"]


def test_no_room_for_staging(ranks: RankPool, tmp_path: Path) -> None:
    kind, text = ranks.run_ranks(1, fns.no_room_for_staging, str(tmp_path / "one"), 0)[0]
    assert kind == "CheckpointError"
    assert "max_staging_bytes" in text
    for kind, text in ranks.run_ranks(2, fns.no_room_for_staging, str(tmp_path / "two"), 1):
        assert kind == "RankError"
        assert "rank 1: CheckpointError: can't allocate" in text


def test_no_thread_for_a_save_behind(ranks: RankPool, tmp_path: Path) -> None:
    for outcome, left in ranks.run_ranks(2, fns.no_thread, str(tmp_path / "roomy"), 1, None):
        assert outcome == ("done", "")
        assert left == ["step-00000001"]
    for outcome, left in ranks.run_ranks(2, fns.no_thread, str(tmp_path / "tight"), 1, 90_000):
        assert outcome[0] == "RankError"
        assert "can't start new thread" in outcome[1]
        assert left == []
