"""When a save is due: ``save_every`` and ``should_save``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.checkpoint.run import Due
from shardwise.ranks.ranks import Ranks
from tests.checkpoint import _due_fns as fns
from tests.harness.pool import RankPool

_ALONE = Ranks()


def test_every_so_many_steps() -> None:
    due = Due(3)
    assert [step for step in range(1, 10) if due.at(step, None, _ALONE)] == [3, 6, 9]
    assert not due.at(6, 6, _ALONE), "saved or restored already"


@given(
    interval=st.floats(1.0, 60.0),
    pace=st.lists(st.floats(0.05, 5.0), min_size=1, max_size=5),
)
def test_after_a_time(interval: float, pace: list[float]) -> None:
    """Never early; late by one step where the pace is even, and by a step of the slowest pace for each look where it is not."""
    now, looks = 0.0, 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now

    due = Due(timedelta(seconds=interval), clock)
    looks = 0
    for step in range(1, 10_000):
        now += pace[step % len(pace)]
        if due.at(step, None, _ALONE):
            break
    mean = sum(pace) / len(pace)
    assert timedelta(seconds=now) >= timedelta(seconds=interval)
    assert now < interval + 2 * max(pace) + len(pace) * mean + interval / 2
    assert looks <= 64


def test_at_an_even_pace_a_save_is_one_step_late_at_most() -> None:
    for interval, pace in ((600.0, 0.7), (60.0, 0.01), (5.0, 7.0), (1200.0, 3.3)):
        now, looks = [0.0], [0]

        def clock(now: list[float] = now, looks: list[int] = looks) -> float:
            looks[0] += 1
            return now[0]

        due = Due(timedelta(seconds=interval), clock)
        for saved in range(3):
            began, step, looks[0] = now[0], 0, 0
            while True:
                step += 1
                now[0] += pace
                if due.at(step, None, _ALONE):
                    break
            assert interval <= now[0] - began + 1e-6
            assert now[0] - began <= interval + pace + 1e-6, (interval, pace, saved)
            assert looks[0] <= 40
            due.restart()


@pytest.mark.parametrize("every", [0, -1, timedelta(0), timedelta(seconds=-1)])
def test_what_is_no_interval(tmp_path: Path, every: int | timedelta) -> None:
    with pytest.raises(ValueError, match="save_every must be"):
        sw.Checkpointer(tmp_path / "run", save_every=every)


def test_it_has_to_be_given(tmp_path: Path) -> None:
    with (
        sw.Checkpointer(tmp_path / "run") as checkpoints,
        pytest.raises(ValueError, match=r"give .* save_every"),
    ):
        checkpoints.should_save(1)


def test_a_restored_step_is_not_due_again(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with sw.Checkpointer(tmp_path / "run", save_every=5) as checkpoints:
        assert [step for step in range(1, 6) if checkpoints.should_save(step)] == [5]
        checkpoints.save(sw.TrainState(model, torch.optim.SGD(model.parameters())), 5)
        assert not checkpoints.should_save(5)
    with sw.Checkpointer(tmp_path / "run", save_every=5) as checkpoints:
        checkpoints.resume(sw.TrainState(model, torch.optim.SGD(model.parameters())))
        assert [step for step in range(5, 12) if checkpoints.should_save(step)] == [10]


def test_all_ranks_save_at_the_same_steps_by_time(ranks: RankPool, tmp_path: Path) -> None:
    """Though each is as fast as it likes, and their clocks differ."""
    first, *others = ranks.run_ranks(3, fns.saved_by_time, str(tmp_path / "run"))
    assert len(first) >= 2
    assert all(found == first for found in others)
