"""declare_part(): pipeline stages and local experts are saved, resumed, loaded, and exported as one model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.pool import RankPool
from tests.sharding import _parts_fns as fns

STEPS = (4, 14)
Layout = tuple[int, int, int]


def _world(layout: Layout) -> int:
    pp, dp, tp = layout
    return pp * dp * tp


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [((1, 1, 1), (3, 1, 1)), ((2, 1, 1), (1, 1, 1)), ((3, 1, 1), (2, 1, 1))],
    ids=str,
)
def test_stages(ranks: RankPool, tmp_path: Path, saved: Layout, resumed: Layout) -> None:
    """10 steps after a resume with other stages have the bits of the run that never stopped: no sum is over stages."""
    path = str(tmp_path / "step")
    never, *_ = ranks.run_ranks(_world(saved), fns.staged_run, saved, (0, STEPS[1]), {STEPS[0]: path})
    after = ranks.run_ranks(_world(resumed), fns.staged_run, resumed, STEPS, {}, path)
    assert after == [never] * _world(resumed)
