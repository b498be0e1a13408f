"""Checkpointer: damage, lock, retention, lines of a run, and saves that fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

import shardwise as sw
from tests.checkpoint import _checkpointer_fns as fns
from tests.harness.logged import warnings_logged
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool
from tests.harness.small_disks import small_disk_at
from tests.harness.tiers import nightly


@pytest.fixture(scope="module")
def pristine(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Steps 1 and 2, saved by two ranks."""
    root = str(tmp_path_factory.mktemp("pristine"))
    ranks.run_ranks(2, fns.save_two, root)
    return root


@pytest.mark.parametrize("world_size", [2, *nightly(1)])
def test_damaged_step_is_skipped_with_a_warning(
    ranks: RankPool, tmp_path: Path, pristine: str, world_size: int
) -> None:
    by_rank = ranks.run_ranks(world_size, fns.falls_back, pristine, str(tmp_path))
    for name, found in by_rank[0].items():
        assert list(found["damaged"]) == [2], name
        skipped, *others = found["warnings"]
        assert skipped.startswith("skipping damaged "), name
        assert all(line.startswith("restored step 1") and " was replaced by " in line for line in others), (
            name
        )
        kept, moved = found["names"]
        assert kept == "step-00000001", name
        assert moved.startswith("step-00000002.damaged-"), name
    facts = {name: found["damaged"][2] for name, found in by_rank[0].items()}
    assert "layer.weight" in facts["model payload"] or "layer.bias" in facts["model payload"]
    assert "exp_avg" in facts["optimizer payload"]
    assert "shard-00001-model-00001-of-00001.safetensors" in facts["header"]
    assert "rank/00001.json" in facts["deleted rank file"]
    assert all(found["damaged"] for rank in by_rank for found in rank.values())


def test_no_valid_step_is_an_error(ranks: RankPool, tmp_path: Path, pristine: str) -> None:
    for world_size in (1, 2):
        for found in ranks.run_ranks(world_size, fns.all_damaged, pristine, str(tmp_path / str(world_size))):
            kind, text = found["lost"]
            assert kind == "NoCheckpointError"
            assert "step 1:" in text
            assert "step 2:" in text
            assert found["aside"][0] == "NoCheckpointError"
            assert found["missing"][0] in ("CheckpointError", "RankError")
            assert "no step 9" in found["missing"][1]


@pytest.mark.parametrize("name", ["step-7", "step-00000007"], ids=["torchtitan", "as ours"])
def test_dcp_directories_are_named(ranks: RankPool, tmp_path: Path, name: str) -> None:
    for kind, text in ranks.run_ranks(2, fns.resumes_among_dcp, str(tmp_path), name):
        assert kind == "NoCheckpointError"
        assert f"DCP directories (torch.distributed.checkpoint) but no shardwise step: {name}." in text
        assert f"sw.restore(state, {str(tmp_path / name)!r})" in text
        assert "shardwise convert" in text
        assert "set aside" not in text


@on_ranks(2)
def test_dcp_directories_of_other_names_are_pointed_to(tmp_path: Path) -> None:
    """They may be there for another purpose: a run that begins is no error."""
    state = fns.state_at(7)
    for number in (9, 10):
        dcp.save(state.models["model"].state_dict(), checkpoint_id=tmp_path / f"checkpoint-{number}")
    with warnings_logged() as lines:
        assert sw.Checkpointer(tmp_path).resume(state) is None
    if dist.get_rank() != 0:
        assert lines == []
        return
    (line,) = lines
    assert "there are DCP directories: checkpoint-9, checkpoint-10." in line
    assert f"sw.restore(state, {str(tmp_path / 'checkpoint-10')!r})" in line


def test_never_published_is_none(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.never_published, str(tmp_path / "new")):
        assert found == [None, None, []]


def test_state_that_does_not_fit_is_not_damage(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.stale_state_does_not_fit, str(tmp_path)):
        assert found["model"][0] == "PlanError"
        assert "layer.weight" in found["model"][1]
        kind, text = found["strange"]
        assert kind == "PlanError"
        assert "missing: " in text
        assert "unused: " in text
        assert "allow_missing=" not in text  # restore takes no declarations
        assert "allow_unused=" not in text
        assert found["scheduler"][0] == "StateError"
        assert "contains no scheduler" in found["scheduler"][1]
        assert found["optimizer"][0] == "StateError"
        assert "contains no optimizer" in found["optimizer"][1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_run_per_directory(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    for found in ranks.run_ranks(world_size, fns.lock_is_exclusive, str(tmp_path)):
        kind, text = found["refused"]
        assert kind == "LockedError"
        assert "elsewhere" in text
        assert found["free after kill"]
        assert found["free after close"]


def test_retention(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run_ranks(2, fns.retention, str(tmp_path))[0]
    assert found["1 to 7"] == ["step-00000004", "step-00000006", "step-00000007"]
    assert found["again"] == [
        "00000004.damaged",
        "00000006",
        "00000006.superseded",
        "00000007",
        "00000007.superseded",
    ]
    assert found["latest"] == ["step-00000007\n"]
    assert found["published"][0] == "CheckpointError"
    assert "not newer than the published step" in found["published"][1]


def test_a_run_finds_its_own_line(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run_ranks(2, fns.lineage, str(tmp_path))[0]
    assert first["parent_step"] is None
    assert (second["step"], second["parent_step"]) == (2, 1)
    assert first["run_id"] == second["run_id"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_disk_at(tmp_path / "disk", "1m") as disk:
        yield disk


def test_full_disk_fails_on_every_rank(ranks: RankPool, tiny_disk: Path) -> None:
    texts = set()
    for kind, text in ranks.run_ranks(2, fns.full_disk, str(tiny_disk / "run")):
        assert kind == "LowSpaceError", "seen before anything is written"
        assert os.strerror(28) in text
        assert "Nothing was written" in text
        texts.add(text)
    assert len(texts) == 1


@pytest.mark.parametrize("limited_rank", [0, 1])
def test_file_size_limit_fails_on_every_rank(ranks: RankPool, tmp_path: Path, limited_rank: int) -> None:
    found = ranks.run_ranks(2, fns.file_size_limit, str(tmp_path), limited_rank)
    assert found[0] == found[1]
    assert f"rank {limited_rank}: CheckpointError" in found[0][1]


def test_late_writer_leaves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run_ranks(2, fns.slow_rank_leaves_nothing, str(tmp_path))
    assert "rank 0: OSError" in found[0][1]


def test_hint_is_not_part_of_a_save(ranks: RankPool, tmp_path: Path) -> None:
    texts = ranks.run_ranks(2, fns.hint_can_not_be_written, str(tmp_path))[0]
    assert len(texts) == 1
    assert "latest" in texts[0]


def test_states_that_can_not_be_saved(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.refused_states, str(tmp_path)):
        assert {kind for kind, _ in found.values()} == {"StateError"}
        assert "extra.odd.inner[1]" in found["unserializable"][1]
        assert "ResumableLoader" in found["loader"][1]
        assert "step" in found["step differs"][1]
        assert "temperature" in found["plain parameter"][1]
        assert "optimizer holds 2 parameters" in found["strange optimizer"][1]
        assert "LBFGS keeps flat history" in found["flat optimizer"][1]


def test_plain_buffers_come_back_per_rank(ranks: RankPool, tmp_path: Path) -> None:
    for rank, (mean, count, documents) in enumerate(
        ranks.run_ranks(2, fns.buffers_per_rank, str(tmp_path), resume_only=False)
    ):
        assert mean == [10.0 + rank] * 5
        assert count == 1
        assert "buffers" in documents
    alone = ranks.run_ranks(1, fns.buffers_per_rank, str(tmp_path), resume_only=True)
    assert alone[0][0][0] in (10.0, 11.0), "one of the stored values, the same in every element"


def test_a_path_of_its_own_on_every_rank_is_named(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.saves_to_paths_of_its_own, str(tmp_path)):
        assert found.startswith("RankError: ")
        assert f"rank 1 should save to {tmp_path}/run-1, rank 0 to {tmp_path}/run-0" in found
    assert not list(tmp_path.iterdir())
