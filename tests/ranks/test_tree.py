"""Payloads that ranks combine on their way to rank 0: the result, the bytes that a rank receives, and every failure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import pytest

from shardwise.errors import PlanError, RankError
from shardwise.ranks.protocol import FAN, ranks_below
from shardwise.ranks.ranks import Ranks
from tests.harness.thread_ranks import ThreadRanks, on_threads

#: Rank 1 has three ranks below it, 2 to 16 have none.
WORLD = FAN + 4
LARGE = 300_000  # numbers: two parts of the store


@pytest.mark.parametrize("world_size", [1, 2, FAN, FAN + 1, FAN + 2, 300, 4096])
def test_every_rank_but_the_first_is_below_one_rank(world_size: int) -> None:
    below = [rank for r in range(world_size) for rank in ranks_below(r, world_size)]
    assert sorted(below) == list(range(1, world_size))
    assert max(len(ranks_below(r, world_size)) for r in range(world_size)) <= FAN


def added(parts: Sequence[Any]) -> Any:
    return np.sum(parts, axis=0, dtype=np.uint64)


def own(ranks: Ranks, numbers: int = 5) -> Any:
    return np.arange(numbers, dtype=np.uint64) * np.uint64(3 + ranks.rank) + np.uint64(2**63)


@pytest.mark.parametrize("numbers", [5, LARGE])
def test_results_are_merged_and_every_rank_gets_the_reply(numbers: int) -> None:
    def work(ranks: ThreadRanks) -> list[int]:
        for _ in range(2):  # keys of the first round are not in the way
            found = ranks.reduce("sum", lambda: own(ranks, numbers), added, lambda s: [int(s[1]), len(s)])
        return found

    found, received = on_threads(WORLD, work)
    one = (2**63 * WORLD + sum(3 + r for r in range(WORLD))) % 2**64
    assert found == [[one, numbers]] * WORLD
    small = 2 * WORLD * 1_000
    assert received[0] < 2 * FAN * 8 * numbers + small, (
        "rank 0 receives the results of the ranks below it only"
    )
    assert max(received[2:]) < small, "ranks without ranks below them receive the reply"


def test_one_rank_alone_decides_on_its_own_result() -> None:
    assert Ranks().reduce("sum", lambda: [1], lambda parts: parts[0], len) == 1


def fail(error: Exception) -> NoReturn:
    raise error


def outcomes(work: Any, *, timeout_s: float = 20.0) -> list[Exception]:
    began = time.monotonic()
    found, _ = on_threads(WORLD, work, timeout_s=timeout_s)
    assert time.monotonic() - began < 10
    return [error for error in found if isinstance(error, Exception)]


@pytest.mark.parametrize("failing", [0, 1, 2, WORLD - 1])
def test_a_failure_anywhere_is_every_rank_s(failing: int) -> None:
    def in_work(ranks: ThreadRanks) -> Any:
        work = (lambda: fail(OSError("disk"))) if ranks.rank == failing else (lambda: own(ranks))
        return ranks.reduce("sum", work, added, lambda s: None)

    def in_merge(ranks: ThreadRanks) -> Any:
        merge = (lambda _: fail(ValueError("odd"))) if ranks.rank == failing else added
        return ranks.reduce("sum", lambda: own(ranks), merge, lambda s: None)

    for work, cause in ((in_work, "OSError: disk"), (in_merge, "ValueError: odd")):
        errors = outcomes(work)
        assert len(errors) == WORLD
        assert {type(e) for e in errors} == {RankError}
        assert {str(e) for e in errors} == {str(errors[0])}
        (error,) = {str(e): e for e in errors}.values()
        assert isinstance(error, RankError)
        assert error.causes == {failing: cause}, "no other rank fails because of it"


def test_all_ranks_that_fail_alike_raise_their_own_error() -> None:
    errors = outcomes(lambda ranks: ranks.reduce("sum", lambda: fail(PlanError("no cover")), added, len))
    assert {type(e) for e in errors} == {PlanError}
    assert len(errors) == WORLD


def test_a_rank_in_another_agreement_is_named() -> None:
    last = WORLD - 1

    def work(ranks: ThreadRanks) -> Any:
        if ranks.rank == last:
            return ranks.gather("other", b"")
        return ranks.reduce("sum", lambda: own(ranks, LARGE), added, lambda s: None)

    errors = outcomes(work)
    assert len(errors) == WORLD
    assert {str(e) for e in errors} == {str(errors[0])}
    assert f"rank {last} is in 'other', rank 0 in 'sum'" in str(errors[0])


@pytest.mark.parametrize("missing", [1, WORLD - 1])
def test_a_rank_that_never_comes_is_missed_not_the_rank_that_waits_for_it(missing: int) -> None:
    def work(ranks: ThreadRanks) -> Any:
        if ranks.rank == missing:
            return None
        return ranks.reduce("sum", lambda: own(ranks), added, lambda s: None)

    errors = outcomes(work, timeout_s=2.0)
    assert len(errors) == WORLD - 1
    for error in errors:
        assert isinstance(error, RankError)
        assert error.missing == (missing,)


def test_the_first_rank_is_missed_by_ranks_that_wait_for_others() -> None:
    absent = (0, WORLD - 1)

    def work(ranks: ThreadRanks) -> Any:
        if ranks.rank in absent:
            return None
        return ranks.reduce("sum", lambda: own(ranks), added, lambda s: None)

    errors = outcomes(work, timeout_s=2.0)
    assert len(errors) == WORLD - 2
    assert {e.missing for e in errors if isinstance(e, RankError)} == {(0,)}
