"""Accelerate and the Trainer with ``local=True``: each host has directories of its own, and no rank sees another host's."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwise as sw
from tests.checkpoint.test_local_directories import merge
from tests.harness.pool import RankPool
from tests.harness.tiers import long
from tests.integrations import _local_hosts_fns as fns
from tests.integrations.test_trainer import hub as hub


@pytest.mark.parametrize("automatic", [False, *long(True)])
def test_accelerate(ranks: RankPool, tmp_path: Path, automatic: bool) -> None:
    hosts, places = tmp_path / "hosts", [0, 0, 1]
    below = "run/checkpoints" if automatic else "run"
    names = [f"checkpoint_{k}" if automatic else f"step-{k + 1}" for k in range(3)]
    found = ranks.run_ranks(3, fns.accelerate, str(hosts), places, automatic)
    for place, one in zip(places, found, strict=True):
        own = [str(hosts / f"host-{place}" / below / name) for name in names]
        assert one["paths"] == own
        assert one["resumed"] == (3, own[2], True)
        assert one["after"] == one["losses"][3:], "bitwise"
        assert one["torn"] == (2, own[1]), "the newest that all hosts hold"
        assert one["again"] == one["losses"][2:3]
        assert one["saved again"] == own[2], "what a killed save left on one host is no hindrance"
        assert one["newest"] == 3
        assert one["digest"] == found[0]["digest"]
        if not automatic:
            assert one["taken"][0] == "CheckpointError"
            assert "never overwritten" in one["taken"][1]
    assert any("lacks its part" in text for text in found[0]["warned"])
    parts = [hosts / f"host-{n}" / below / names[2] for n in (0, 1)]
    files = [{str(p.relative_to(part)) for p in part.rglob("*") if p.is_file()} for part in parts]
    assert files[0] & files[1] == {"manifest.json"}
    assert [n.name.startswith(f".torn-{names[2]}-") for n in parts[0].parent.glob(".torn-*")] == [True]
    if automatic:
        assert {p.name for p in parts[0].parent.glob("checkpoint_*")} == {names[1], names[2]}, "total_limit"
        return
    assert sw.verify(merge(hosts, f"{below}/{names[2]}", tmp_path / "merged")).ok

    for one in ranks.run_ranks(2, fns.accelerate_elsewhere, str(hosts), [1, 0]):
        assert one["resumed"] == (3, found[0]["digest"]), "on other ranks"
        assert one["left"] == []
        assert one["away"][0] == "CheckpointError"
        assert "rsync -a" in one["away"][1]
        assert one["fallback"][0] == one["url"][0] == "CheckpointError"
        assert "takes no fallback" in one["fallback"][1]
        assert "give a directory" in one["url"][1]
        assert "no such directory on any host" in one["nothing"][1]
        assert one["none below"] is None
