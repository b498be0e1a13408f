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


@pytest.mark.parametrize("kind", ["packed", "listed"])
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [((1, 1), (1, 2)), ((1, 2), (1, 4)), ((1, 4), (1, 1)), ((2, 2), (2, 1))],
    ids=str,
)
def test_experts(
    ranks: RankPool, tmp_path: Path, kind: str, saved: tuple[int, int], resumed: tuple[int, int]
) -> None:
    """The same with experts over another number of ranks, with data parallelism and without."""
    path = str(tmp_path / "step")
    ranks_of = saved[0] * saved[1], resumed[0] * resumed[1]
    never, *_ = ranks.run_ranks(ranks_of[0], fns.experts_run, kind, saved, (0, STEPS[1]), {STEPS[0]: path})
    after = ranks.run_ranks(ranks_of[1], fns.experts_run, kind, resumed, STEPS, {}, path)
    assert after == [never] * ranks_of[1]
