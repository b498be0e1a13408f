"""Gradients that are DTensors wait, or do not, as plain ones do (see tests/state/test_gradients.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.pool import RankPool
from tests.state import _sharded_gradients_fns as fns


@pytest.mark.parametrize("layout", ["tp", "fsdp"])
def test_what_waits(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    found = ranks.run_ranks(2, fns.what_waits, layout, str(tmp_path))
    assert found[0] == found[1]
    assert found[0] == {
        "before a step": 3,
        "used": 0,
        "added to used ones": 3,
        "set to zero": 3,
        "added to zeros": 3,
        "cleared": 0,
    }


@pytest.mark.parametrize("layout", ["tp", "fsdp"])
def test_goes_on_in_the_middle_of_a_cycle(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    for found in ranks.run_ranks(2, fns.goes_on, layout, str(tmp_path)):
        assert found == {"stored": 3, "exact": True, "equal": True}
