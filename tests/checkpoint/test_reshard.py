"""One state, saved and restored under one mesh after the other: digests of all tensors stay what they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import _reshard_fns as fns
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly

#: 1 → 2 → 3 → 4 → HSDP 2 × 2 → FSDP 2 × TP 2 → 3 → FSDP 2 × TP 2 → 1.
CHAIN = ((1, "1d"), (2, "1d"), (3, "1d"), (4, "1d"), (4, "hsdp"), (4, "tp"), (3, "1d"), (4, "tp"), (1, "1d"))


@pytest.mark.parametrize("optimizer", ["adamw", *nightly("adagrad", "sgd")])
def test_digests_are_equal_at_every_stop(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    source, expected = None, None
    for stop, (world_size, mesh_kind) in enumerate(CHAIN):
        target = str(tmp_path / f"{stop}")
        by_rank = ranks.run_ranks(
            world_size, fns.stage, source, target, mesh_kind, optimizer, train_steps=0 if stop else 3
        )
        found = by_rank[0]
        assert found["problems"] == ()
        if expected is not None:
            assert found["digests"] == expected, (stop, world_size, mesh_kind)
            for rank in by_rank:
                # Its own part, each byte once; of HSDP's replicas each reads its own. Only a shard of columns, cut by
                # TP, is read with what lies between its rows: these are too short to be read one by one.
                most = rank["rows"] if mesh_kind == "tp" else rank["held"]
                assert rank["held"] <= rank["read"] <= most, (stop, mesh_kind)
        expected, source = found["digests"], target
    assert len(expected or ()) > 20
