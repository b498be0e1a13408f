"""Accelerate and the Trainer with ``local=True``: each host has directories of its own, and no rank sees another host's."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwise as sw
from tests.checkpoint.test_local_directories import merge
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.integrations import _local_hosts_fns as fns
from tests.integrations.test_trainer import hub as hub


@pytest.mark.parametrize("automatic", [False, *nightly(True)])
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
    assert any("files are missing on" in text for text in found[0]["warned"])
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
        assert "not found on any host" in one["nothing"][1]
        assert one["none below"] is None


def test_accelerate_goes_on_after_a_first_save_that_was_cut(ranks: RankPool, tmp_path: Path) -> None:
    for number, one in enumerate(ranks.run_ranks(2, fns.accelerate_cut, str(tmp_path), [0, 1])):
        assert one["resumed"] == (1, str(tmp_path / f"host-{number}/run/step-1"))
        assert one["left"] == [f".tmp-other-{'cd' * 8}"], "it may be another run's"


@pytest.mark.needs("trainer")
def test_trainer_goes_on_after_a_first_save_that_was_cut(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    found = ranks.run_ranks(2, fns.trainer_cut, str(hub), str(tmp_path), [0, 1], timeout_s=200)
    for number, one in enumerate(found):
        path = str(tmp_path / f"host-{number}/run/checkpoint-3")
        assert one["report"] == (3, False, path, []), "restored again, with batches of half the size"
        assert [step for step, *_ in one["losses"]] == list(range(1, 11))
        assert [n for n in one["names"] if not n.startswith("_superseded-checkpoint-6-")] == [
            "checkpoint-3",
            "checkpoint-9",
        ], "no sealed part stays"


@pytest.mark.slow
@pytest.mark.needs("trainer")
def test_trainer(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    """Four ranks on two hosts, then three on three; 48 rows are six steps an epoch."""
    hosts, places = tmp_path / "hosts", [0, 0, 1, 1]
    found = ranks.run_ranks(4, fns.trainer, str(hub), str(hosts), places, timeout_s=200)
    for place, one in zip(places, found, strict=True):
        own = hosts / f"host-{place}/run"
        whole, first, again, torn = (one[name] for name in ("whole", "first", "again", "torn"))
        assert (first["has"], again["has"]) == (False, True)
        assert first["losses"] == whole["losses"][:10]
        assert first["names"] == ["checkpoint-6", "checkpoint-9"], "save_total_limit"
        assert again["report"] == (9, True, str(own / "checkpoint-9"), [])
        assert again["losses"] == whole["losses"], "bitwise"
        assert again["digest"] == whole["digest"]
        assert again["best"] == str(own / Path(whole["best"]).name)
        assert torn["report"] == (9, True, str(own / "checkpoint-9"), [12])
        assert torn["losses"] == whole["losses"]
        assert torn["best"] == again["best"]
        assert [n for n in torn["names"] if n.startswith("checkpoint")] == ["checkpoint-12", "checkpoint-9"]
        aside = [n for n in torn["names"] if n.startswith("_damaged-checkpoint-12-")]
        assert len(aside) == (place == 0), "it was whole on no host but the first"
    assert any("files are missing on" in text for text in found[0]["torn"]["warned"])
    parts = [hosts / f"host-{n}/run/checkpoint-12" for n in (0, 1)]
    files = [{str(p.relative_to(part)) for p in part.rglob("*") if p.is_file()} for part in parts]
    assert files[0] & files[1] == {"manifest.json"}
    assert "trainer_state.json" in files[0]
    merged = merge(hosts, "run/checkpoint-12", tmp_path / "merged")
    assert sw.verify(merged).ok
    assert sw.verify(parts[1]).problems == ()


@pytest.mark.nightly
@pytest.mark.needs("trainer")
def test_trainer_on_other_hosts(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    """Two ranks on two hosts save; four on three hosts resume, of which one is new."""
    hosts, places = tmp_path / "hosts", [1, 0, 2, 2]
    first, _ = ranks.run_ranks(2, fns.trainer_first, str(hub), str(hosts), [0, 1], timeout_s=200)
    found = ranks.run_ranks(4, fns.trainer_elsewhere, str(hub), str(hosts), places, timeout_s=200)
    for place, one in zip(places, found, strict=True):
        own = hosts / f"host-{place}/run"
        step, _, path, damaged = one["other"]["report"]
        assert (step, path, damaged) == (9, str(own / "checkpoint-9"), [])
        losses = [loss for _, loss, _ in one["other"]["losses"]]
        assert losses == pytest.approx([loss for _, loss, _ in first["whole"]["losses"]], rel=1e-3)
        assert (own / "checkpoint-12").is_dir()
        assert one["named"]["report"][0] == 9
        assert len(one["named"]["losses"]) == 10
        assert not [n for n in one["named"]["names"] if n.startswith(".tmp")], (
            "nothing that was fetched stays"
        )
        kind, text = one["away"]
        assert kind == "CheckpointError"
        assert "this run's hosts have part 1 of 2" in text
        assert "rsync -a" in text
        assert one["url"][0] == one["fallback"][0] == "CheckpointError"
        assert "checkpoint_root is a URL" in one["url"][1]
        assert "takes no fallback" in one["fallback"][1]


@pytest.mark.nightly
@pytest.mark.needs("trainer")
def test_trainers_best_model_of_adapters(ranks: RankPool, hub: Path, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    for number, one in enumerate(ranks.run_ranks(2, fns.trainer_best, str(hub), str(hosts), [0, 1])):
        assert one["best"] == str(hosts / f"host-{number}/run/checkpoint-1")
        assert one["digest"] == one["shared"]["digest"], "the best is loaded"
        assert [n for n in one["names"] if "checkpoint" in n] == ["checkpoint-1"]
        assert (len([w for w in one["warned"] if "no copy of the adapters for PEFT" in w]) > 0) == (
            number == 0
        )
