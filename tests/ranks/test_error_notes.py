"""Notes of errors on ranks: a RankError leads to where causes and cures stand once, and no text that travels holds it."""

from __future__ import annotations

import traceback

import pytest

from shardwise.errors import IntegrityError, RankError, StateError
from shardwise.ranks.ranks import Ranks
from tests.harness.pool import RankPool

NOTE = "Causes and fixes: "


def _raised(failing: dict[int, type[Exception]]) -> tuple[str, str, str]:
    """What this rank raises when some ranks fail: its text, its causes, and its part of the traceback."""
    ranks = Ranks.current(timeout_s=30.0)
    try:
        with ranks.agree("write"):
            if ranks.rank in failing:
                raise failing[ranks.rank]("it is damaged")
    except RankError as error:
        own_part = traceback.TracebackException.from_exception(error).format(chain=False)
        return str(error), "\n".join(error.causes.values()), "".join(own_part)
    raise AssertionError("no rank learned of the failure")


@pytest.mark.parametrize(
    ("failing", "section"),
    [({1: IntegrityError}, "IntegrityError"), ({0: IntegrityError, 1: StateError}, "RankError")],
)
def test_every_rank_shows_the_note_once(
    ranks: RankPool, failing: dict[int, type[Exception]], section: str
) -> None:
    for text, causes, traced in ranks.run_ranks(2, _raised, failing):
        assert "it is damaged" in causes
        assert NOTE not in text + causes
        assert traced.count(NOTE) == 1
        assert traced.rstrip().endswith(f"explain {section}")
