"""Case 7: fewer experts, or rows, than ranks: some shards are empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import _fns as fns
from tests.harness import models
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_rows


@pytest.mark.parametrize(("world_size", "shape"), [(3, (3,)), *nightly_rows((4, (4,)), (4, (1, 4)))])
def test_loads_trains_saves_and_restores(
    ranks: RankPool, tmp_path: Path, world_size: int, shape: tuple[int, ...]
) -> None:
    file = models.write_state(models.state_of(fns.scarce_reference()), tmp_path)
    empty = ranks.run_ranks(world_size, fns.empty_shards, str(file), str(tmp_path / "saved"), shape)
    assert "nothing" in empty[0]
    for names in empty[2:]:
        assert {"experts.weight", "gate.weight", "gate.bias", "head.weight", "head.bias"} <= set(names)
