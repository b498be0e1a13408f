"""What torch's own state-dict functions are used for works with a checkpoint, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import _torch_scenarios_fns as fns
from tests.harness.pool import RankPool


@pytest.mark.slow
def test_scenarios_of_state_dicts(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.scenarios, str(tmp_path)):
        for name, (exact, bitwise, same_digest, skipped, differences) in found.items():
            assert same_digest, name
            assert skipped == (), name
            if name in ("ddp to fsdp", "fsdp to ddp"):
                assert not exact, name
                assert any("mesh or placements" in line for line in differences), name
            else:
                assert (exact, bitwise, differences) == (True, True, ()), (name, exact, bitwise, differences)


def test_refusals_name_what_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.refusals, str(tmp_path)):
        for name in ("FSDP1 True", "FSDP1 False", "restore into FSDP1"):
            assert found[name].startswith("StateError")
            assert "wrapped by FSDP1" in found[name]
            assert "fsdp_version: 2" in found[name], "the way out"
        for name, first in (("pipeline", "layers.0.weight"), ("experts", "expert0")):
            assert found[name].startswith("StateError")
            assert "ranks hold different modules" in found[name]
            assert "pipeline stages" in found[name]
            assert "sw.declare_part(model)" in found[name]
            assert first in found[name]
        assert "extra.file: this _io.BytesIO can't be expressed in typed JSON" in found["BytesIO"]
        assert found["left"] == "unit", "nothing else is published"


def test_staging_without_memory_fails_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for failed, steps in ranks.run_ranks(2, fns.staging_without_memory, str(tmp_path)):
        assert failed.startswith("RankError")
        assert "rank 1: CheckpointError: can't allocate" in failed
        assert "max_staging_bytes" in failed
        assert steps == "step-00000002"
