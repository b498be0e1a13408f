"""What must never happen silently around saving and resuming, on several ranks."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint import _promises_on_ranks_fns as fns
from tests.harness.pool import RankPool


def test_state_that_differs_between_ranks(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks.run_ranks(2, fns.per_rank_state, str(tmp_path))
    for rank, (extra, rows, exact, _) in enumerate(saved):
        assert extra == rank
        assert all(row == [float(rank)] * len(row) for row in rows)
        assert exact
    assert saved[0][3] != saved[1][3], "BatchNorm statistics differ between ranks and are kept per rank"
    for everything, extra, (exact, left) in ranks.run_ranks(3, fns.elsewhere, str(tmp_path)):
        assert everything[0] == extra[0] == "StateError"
        assert "optimizer.opaque was stored per rank by 2 ranks" in everything[1]
        assert "extra.mine was stored per rank by 2 ranks" in extra[1]
        assert not exact
        assert any("buffers that differed between ranks" in line for line in left)


def test_replicas_that_drifted_apart(ranks: RankPool, tmp_path: Path) -> None:
    for replicated, digest, hsdp, momentum in ranks.run_ranks(4, fns.drifted_replicas, str(tmp_path)):
        for kind, text in (replicated, hsdp, momentum):
            assert kind == "RankError"
            assert "differ between ranks" in text
        assert "0.weight" in hsdp[1]
        assert "weight.momentum_buffer" in momentum[1]
        assert digest[0] == "IntegrityError"
    assert list(tmp_path.iterdir()) == [], "nothing is published, nothing is left"


def test_names_that_collide(ranks: RankPool, tmp_path: Path) -> None:
    for rank, (scale, (kind, text)) in enumerate(ranks.run_ranks(2, fns.names_that_collide, str(tmp_path))):
        assert scale == rank
        assert kind == "RankError"
        assert "rank 1: StateError: step must be an integer from 0" in text
