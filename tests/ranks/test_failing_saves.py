"""Saves that fail on a full disk while training goes on: alike on all ranks, counted, tried again, into a fall-back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.checkpoint.run import Failures, may_pass
from shardwise.checkpoint.save import SaveReport
from tests.checkpoint.test_checkpointer import tiny_disk as tiny_disk
from tests.harness.pool import RankPool
from tests.ranks import _failing_fns as fns


def test_where_a_policy_saves() -> None:
    assert Failures.under(None).roots("/runs/a") == ["/runs/a"]
    elsewhere = os.path.expanduser("~/elsewhere")
    assert Failures.under(sw.FailurePolicy(fallback="~/elsewhere")).roots("/runs/a") == ["/runs/a", elsewhere]
    assert Failures.under(sw.FailurePolicy(fallback="s3://b/a/")).fallback == "s3://b/a"


def test_training_goes_on(ranks: RankPool, tiny_disk: Path) -> None:
    first, second = ranks.run_ranks(2, fns.train_on, str(tiny_disk), None, "sync")
    assert first == second
    assert first["save 1"] is None
    assert "takes 1,600,000 bytes" in first["save 2"]
    assert first["save 3"] is not None
    assert first["save 4"] is None, "tried again, and counted anew"
    step, kind, text = first["raised"]
    assert (step, kind) == (7, "LowSpaceError"), "the third in a row"
    assert "No space left on device" in text
    assert first["failures"] == 5
    assert first["resumed"] == 4
    assert [first[f"failed in {step}"] for step in (1, 2, 3, 4)] == [None, 2, 3, None]


def test_failures_in_the_background_are_in_the_next_report(ranks: RankPool, tiny_disk: Path) -> None:
    first, second = ranks.run_ranks(2, fns.train_in_background, str(tiny_disk))
    assert first == second, "the same words on every rank"
    assert first["save 1"] == first["save 2"] == first["save 4"] == [None, None]
    step, text = first["save 3"]
    assert step == 2, "the report of the save after it"
    assert os.strerror(28) in text, text
    assert first["kept"] == 0, "a closed Checkpointer keeps no copy of the state"
    both = SaveReport.of_failure("run/step-4", 4, "no room").after_failure(step, text)
    assert (both.failed_step, both.failure) == (
        4,
        f"no room; the save of step 2 before it failed, too: {text}",
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_fallback(ranks: RankPool, tiny_disk: Path, tmp_path: Path, mode: str) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    first, second = ranks.run_ranks(2, fns.train_on, str(tiny_disk), elsewhere, mode)
    assert first == second
    assert "raised" not in first
    assert first["resumed"] == (7 if mode == "sync" else 6), first
    names = {path.name for path in Path(elsewhere).glob("step-*")}
    if mode == "sync":
        assert first["failures"] == 0
        assert names == {"step-00000006", "step-00000007"}, "retention holds there, too"
    else:
        assert first["failures"] == 3, "each second one of those that do not fit: the next goes elsewhere"


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(5, "Input/output error"), True),
        (sw.errors.LowSpaceError("full"), True),
        (sw.errors.LockedError("another run"), False),
        (sw.errors.StateError("a function"), False),
        (TypeError("a program's error"), False),
        (sw.errors.RankError("write", {1: "OSError: [Errno 5] Input/output error"}), True),
        (sw.errors.RankError("write", {0: "PermissionError: no", 1: "CheckpointError: no"}), True),
        (sw.errors.RankError("write", {0: "CheckpointError: no", 1: "KeyError: 'x'"}), False),
        (sw.errors.RankError("write", {0: "LockedError: another run"}), False),
        (sw.errors.RankError("write", {}, (1,), 5.0), False),
    ],
)
def test_which_failures_pass(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
