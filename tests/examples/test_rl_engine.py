"""examples/rl_engine.py and examples/own_loop.py: run as they are, and held against ordinary loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import _rl_engine_fns as fns
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_rows

MODES = {"dense": (), "vlm": ("--model", "vlm"), "lora": ("--lora",), "from scratch": ("--from-scratch",)}
LOOP_MODES = {"dense": (), "moe": ("--model", "moe"), "vlm": ("--model", "vlm"), "lora": ("--lora",)}


@pytest.mark.parametrize(
    ("kind", "lora"), [("dense", False), ("vlm", True), *nightly_rows(("dense", True), ("vlm", False))]
)
def test_models_are_those_of_an_ordinary_load(ranks: RankPool, tmp_path: Path, kind: str, lora: bool) -> None:
    for compared in ranks.run_ranks(2, fns.as_ordinary, kind, lora, str(tmp_path / "base")):
        assert min(compared.values()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_trains_hands_over_and_recovers(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """A run that was stopped and went on elsewhere gives what one without a stop gives."""
    stopped, whole = ("--out", str(tmp_path / "stopped"), *MODES[mode]), ("--out", str(tmp_path / "whole"))
    first = ranks.run_ranks(2, fns.run_engine, *stopped, "--steps", "2")
    for result in first:
        assert set(result["seconds"]) == {"actor", "critic", "reference"}
        assert min(result["seconds"].values()) > 0, "what was read is not part of making a model"
    other = 3 if mode == "dense" else 2
    second = ranks.run_ranks(other, fns.run_engine, *stopped, "--steps", "4")
    straight = ranks.run_ranks(2, fns.run_engine, *whole, *MODES[mode], "--steps", "4")
    assert [r["first_step"] for r in (first[0], second[0])] == [1, 3]
    assert isinstance(second[0]["next_token"], int)
    assert all(r["next_token"] is None for r in second[1:])
    expected = straight[0]["losses"]
    for step, losses in (first[0]["losses"] | second[0]["losses"]).items():
        assert losses == pytest.approx(expected[step], rel=1e-5), step
    if other == 2:
        assert second[0]["digests"] == straight[0]["digests"], "bitwise at the same world size"


@pytest.mark.nightly
@pytest.mark.parametrize("mode", LOOP_MODES)
def test_own_loop_goes_on_at_another_world_size(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    flags, base = LOOP_MODES[mode], str(tmp_path / "stopped/base")
    stopped = ("--out", str(tmp_path / "stopped"), *flags)
    whole = ("--out", str(tmp_path / "whole"), "--base", base, *flags)
    losses = ranks.run_ranks(2, fns.run_loop, *stopped, "--steps", "3")[0]
    losses |= ranks.run_ranks(3, fns.run_loop, *stopped, "--steps", "6")[0]
    expected = ranks.run_ranks(2, fns.run_loop, *whole, "--steps", "6")[0]
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert mode == "lora" or losses[6] < losses[1] - 0.05
    fns.export_is_usable(base, str(tmp_path / "stopped/export-6"), mode)


def test_the_32b_is_built_on_every_rank(ranks: RankPool) -> None:
    """CPU seconds of each rank, the quickest of three runs: how busy the machine is does not count."""
    for seconds in zip(*(ranks.run_ranks(2, fns.time_32b) for _ in range(3)), strict=True):
        assert 0 < min(seconds) <= 0.5
