"""Case 1: any module, any mix of DTensor and plain tensors, buffers, compiled or checkpointed."""

from __future__ import annotations

from pathlib import Path

from tests.cases import _fns as fns
from tests.harness import models
from tests.harness.pool import RankPool


def test_loads_however_it_is_wrapped(ranks: RankPool, tmp_path: Path) -> None:
    file = models.write_state(models.state_of(fns.mixed_reference()), tmp_path)
    run = ("plain", "checkpointed blocks", "compiled blocks")
    names = ranks.run_ranks(2, fns.loads_however_wrapped, str(file), run)[0]
    # The names that make other loaders fail are really there.
    assert "blocks.0._orig_mod.up.weight" in names["compiled blocks"]
    assert "blocks.0._checkpoint_wrapped_module.up.weight" in names["checkpointed blocks"]
    assert "blocks.0._orig_mod._checkpoint_wrapped_module.up.weight" in names["both"]
    assert "_orig_mod.blocks.0.up.weight" in names["compiled around"]
