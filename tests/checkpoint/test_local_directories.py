"""Hosts with directories of their own: parts under one manifest, steps that all hosts hold, and a merge that is a copy."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardwise as sw
from shardwise.catalog.checkpoint import catalog_of_checkpoint
from shardwise.checkpoint.verify import quick_check
from shardwise.errors import CheckpointError
from shardwise.format.manifest import rank_of_file
from shardwise.publish.places import delete_sealed, sealed_parts, sweep_leftovers
from tests.checkpoint import _local_fns as fns
from tests.checkpoint._checkpointer_fns import _flip

STEP = "run/step-00000003"


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def merge(hosts: Path, step: str, out: Path, count: int = 2) -> Path:
    for number in range(count):
        shutil.copytree(hosts / f"host-{number}" / step, out, dirs_exist_ok=True)
    return out


def test_parts_resume_bitwise_and_merge_into_a_checkpoint(ranks, tmp_path, monkeypatch):
    hosts = tmp_path / "hosts"
    found = ranks.run_ranks(2, fns.whole_way, str(hosts), [0, 1], "sync")
    assert all(one["same"] and one["exact"] for one in found), found
    assert found[1]["path"].endswith(f"host-1/{STEP}")
    parts = [hosts / f"host-{n}" / STEP for n in (0, 1)]
    first, second = map(files, parts)
    assert first & second == {"manifest.json"}
    assert {"state.json", "rank/00000.json"} <= first
    assert {"rank/00001.json", "model/shard-00002-model-00001-of-00001.safetensors"} <= second
    assert parts[0].joinpath("manifest.json").read_bytes() == parts[1].joinpath("manifest.json").read_bytes()
    assert {n for n in os.listdir(parts[0].parent) if n.startswith(".tmp")} == set()

    report = sw.verify(parts[1])
    assert report.problems == ()
    assert not report.ok
    assert report.part is not None
    assert report.part.startswith("contains part 2 of 2 of the step")
    assert "has the files of ranks 0" in report.part
    with pytest.raises(CheckpointError, match=r"contains part 1 of 2 .*; host .* has the files of ranks 1\."):
        quick_check(str(parts[0]), 3)
    with pytest.raises(CheckpointError, match=r"rsync -a"):  # for restore, convert and export
        catalog_of_checkpoint(parts[1])

    merged = merge(hosts, STEP, tmp_path / "step-00000003")
    assert sw.verify(merged).ok
    deletion_of_a_part_is_cut(parts[1], monkeypatch)
    assert quick_check(str(merged), 3).places[1].ranks == (1,)
    digests = ranks.run_ranks(2, fns.restored, str(merged)) + ranks.run_ranks(1, fns.restored, str(merged))
    assert len(set(digests)) == 1


def deletion_of_a_part_is_cut(part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one file: what is left is no sealed part, and may not be published."""
    root, unlink, left = str(part.parent), os.unlink, [1]
    sealed = part.rename(part.parent / f".tmp-{part.name}-{'ab' * 8}")

    def cut(path: str) -> None:
        if not left:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        unlink(path)
        left.pop()

    assert [one.final for one in sealed_parts(root)] == [part.name]
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", cut)
        delete_sealed(root)
    assert not sealed.exists()
    trash = part.parent / sealed.name.replace(".tmp-", ".trash-")
    assert len(files(trash)) > 1
    assert sealed_parts(root) == []
    sweep_leftovers(root)
    assert not trash.exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_replicas_on_two_hosts_are_stored_once(ranks, tmp_path, mode):
    found = ranks.run_ranks(4, fns.whole_way, str(tmp_path), [0, 0, 1, 1], mode, 2)
    assert all(one["same"] and one["exact"] for one in found), found
    assert sw.verify(merge(tmp_path, STEP, tmp_path / "step-00000003")).ok


def test_the_newest_step_that_all_hosts_hold(ranks, tmp_path):
    """Three ranks on two hosts; then parts are lost, damaged, away, merged, or read by other ranks on other hosts."""
    hosts = tmp_path / "hosts"
    digests = ranks.run_ranks(3, fns.save_steps, str(hosts), [0, 0, 1], 5, 2)[0]
    for number in (0, 1):
        steps = sorted(n for n in os.listdir(hosts / f"host-{number}/run") if n.startswith("step-"))
        assert steps == ["step-00000004", "step-00000005"], number

    def case(name: str) -> Path:
        return Path(shutil.copytree(hosts, tmp_path / name))

    part = "host-1/run/step-00000005"
    shutil.rmtree(case("torn") / part)
    _flip(next((case("flipped") / part / "model").glob("shard-*")), -3)
    next((case("file lost") / part / "optimizer").glob("shard-*")).unlink()
    _flip(case("manifest") / part / "manifest.json", 300)
    shutil.rmtree(case("away") / "host-1")
    shutil.copytree(case("merged") / part, tmp_path / "merged/host-0/run/step-00000005", dirs_exist_ok=True)
    shutil.copytree(tmp_path / "merged", tmp_path / "merged on one host")
    shutil.rmtree(tmp_path / "merged/host-1")
    for name in ("one unmerged", "other ranks"):
        case(name)

    three = ["torn", "flipped", "file lost", "manifest", "away", "merged", "merged on one host"]
    cases = [(str(tmp_path / n), [0, 0, 1], True) for n in three]
    found = ranks.run_ranks(3, fns.resume_each, [*cases, (str(tmp_path / "one unmerged"), [0, 0, 0], False)])
    assert found[0] == found[1] == found[2]
    by_name: dict[str, Any] = dict(zip([*three, "one unmerged"], found[0], strict=True))
    for name in ("torn", "flipped", "file lost", "manifest"):
        assert by_name[name] == (4, digests[4], True), name
        aside = [n for n in os.listdir(tmp_path / name / "host-0/run") if n.startswith("step-00000005.")]
        assert len(aside) == 1, name
    kind, text = by_name["away"]
    assert kind == "CheckpointError"
    assert "this run's hosts have part 1 of 2 of the step" in text
    assert "has the files of ranks 2" in text
    assert "rsync -a " in text
    assert (tmp_path / "away/host-0/run/step-00000005").is_dir()
    assert by_name["merged"] == by_name["merged on one host"] == (5, digests[5], True)
    kind, text = by_name["one unmerged"]
    assert "contains part 1 of 2 of the step" in text
    assert (tmp_path / "one unmerged/host-0/run/step-00000005").is_dir()

    found = ranks.run_ranks(2, fns.resume_each, [(str(tmp_path / "other ranks"), [1, 0], True)])
    assert found[0] == found[1] == [(5, digests[5], False)]


@pytest.mark.nightly
def test_a_host_that_is_new_gets_what_it_needs(ranks, tmp_path):
    digests = ranks.run_ranks(3, fns.save_steps, str(tmp_path), [0, 0, 1], 2, None)[0]
    found = ranks.run_ranks(4, fns.resume_each, [(str(tmp_path), [0, 2, 1, 2], True)])
    assert all(one == [(2, digests[2], False)] for one in found)
    for number in range(3):
        assert not [n for n in os.listdir(tmp_path / f"host-{number}/run") if n.startswith(".tmp")]
        assert (tmp_path / f"host-{number}/run/step-00000012").is_dir()


@pytest.mark.slow
def test_a_run_moves_from_one_directory_to_disks_of_hosts(ranks, tmp_path):
    """What lies whole on one host is fetched by the other; the next step lies in parts."""
    digests = ranks.run_ranks(2, fns.save_steps, str(tmp_path), [0, 0], 1, None, False)[0]
    found = ranks.run_ranks(2, fns.resume_each, [(str(tmp_path), [0, 1], True)])
    assert all(one == [(1, digests[1], True)] for one in found), found
    assert (tmp_path / "host-1/run/step-00000011/rank/00001.json").is_file()
    assert not (tmp_path / "host-0/run/step-00000011/rank/00001.json").exists()


def test_a_host_that_fails_fails_all(ranks, tmp_path):
    blocked, held = zip(*ranks.run_ranks(2, fns.failing_saves, str(tmp_path), [0, 1]), strict=True)
    assert blocked[0] == blocked[1]
    assert blocked[0][0] == "RankError"
    assert "rank 1" in blocked[0][1]
    assert "File too large" in blocked[0][1]
    assert held[0] == held[1]
    assert held[0][0] == "LockedError"
    assert "rank 1" in held[0][1]


def test_no_part_appears_before_all_are_sealed(ranks, tmp_path):
    for (kind, text), left in ranks.run_ranks(2, fns.failing_seal, str(tmp_path), [0, 1]):
        assert kind == "RankError"
        assert "rank 1" in text and "manifest.json" in text  # noqa: PT018
        assert left == ["step-00000001"]


def test_a_part_that_did_not_get_its_name_gets_it_at_the_next_start(ranks, tmp_path):
    first, second = ranks.run_ranks(2, fns.half_published, str(tmp_path), [0, 1])
    assert first["error"] == second["error"]
    assert "rank 1" in first["error"][1]
    assert (first["left"], second["left"]) == (["step"], [".tmp-step-00000001"])
    for one in (first, second):
        assert (one["resumed"], one["same"], one["there"]) == (1, True, ["step-00000001"])


@pytest.mark.nightly
def test_of_two_manifests_of_a_step_the_whole_one_is_taken(ranks, tmp_path):
    """Host 1 alone has published its part of step 1, and was away when the run began again on host 0."""
    ranks.run_ranks(2, fns.save_steps, str(tmp_path), [0, 1], 1, None)
    shutil.rmtree(tmp_path / "host-0/run/step-00000001")
    digests = ranks.run_ranks(2, fns.save_steps, str(tmp_path), [0, 0], 1, None)[0]
    found = ranks.run_ranks(2, fns.resume_each, [(str(tmp_path), [0, 1], True)])
    assert all(one == [(1, digests[1], True)] for one in found), found


def test_of_two_half_published_steps_of_one_name_a_whole_one_is_published(ranks, tmp_path):
    """Two saves of step 1 were cut while their parts appeared: one of all hosts, and, without host 1, which has published the first,
    one of hosts 0 and 2."""
    step = "run/step-00000001"
    first, second = (f"run/.tmp-step-00000001-{word * 8}" for word in ("ab", "cd"))
    hosts = tmp_path / "hosts"
    ranks.run_ranks(3, fns.save_steps, str(hosts), [0, 1, 2], 1, None)
    for number in (0, 2):
        (hosts / f"host-{number}" / step).rename(tmp_path / f"first-{number}")
    digests = ranks.run_ranks(3, fns.save_steps, str(hosts), [0, 0, 2], 1, None)[0]
    (hosts / "host-0" / step).rename(hosts / "host-0" / second)
    for number in (0, 2):
        (tmp_path / f"first-{number}").rename(hosts / f"host-{number}" / first)
    away = Path(shutil.copytree(hosts, tmp_path / "away"))
    cases = [(str(away), [0, 1, 1], True), (str(hosts), [0, 1, 2], True), (str(away), [0, 1, 2], True)]
    for refused, *resumed in ranks.run_ranks(3, fns.resume_each, cases):
        assert refused[0] == "CheckpointError"
        assert "this run's hosts have" in refused[1]
        assert resumed == [(1, digests[1], True)] * 2, resumed


def test_hosts_agree_on_the_steps_that_stay(ranks, tmp_path):
    """Step 3 is damaged on one host: it does not count on the other one, either, and step 2 stays on both."""
    left = ranks.run_ranks(2, fns.keep_two, str(tmp_path), [0, 1])
    assert left == [["step-00000002", "step-00000003", "step-00000004"]] * 2


def test_what_local_does_not_go_with(tmp_path):
    for options in (
        {"mirror": tmp_path / "m"},
        {"failures": sw.FailurePolicy(fallback=tmp_path / "f")},
        {"memory": sw.InMemoryCheckpoints(every=1)},
    ):
        with pytest.raises(ValueError, match="local=True"):
            sw.Checkpointer(tmp_path / "run", local=True, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="local=True"):
        sw.Checkpointer("s3://bucket/run", local=True)


def test_one_process_is_one_host(tmp_path):
    model = nn.Linear(3, 2)
    state = sw.TrainState(model=model)
    with sw.Checkpointer(tmp_path / "run", local=True) as checkpoints:
        checkpoints.save(state, 1)
        assert checkpoints.resume(state) is not None
    assert sw.verify(tmp_path / "run/step-00000001").ok
    assert json.loads((tmp_path / "run/step-00000001/manifest.json").read_text())["version"] == 1


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank/00003.json", 3),
        ("rank/00003.safetensors", 3),
        ("model/shard-00002-model-00001-of-00001.safetensors", 1),
        ("optimizers/b/shard-100001-optimizer-00001-of-00001.safetensors", 100_000),
        ("state.json", 0),
        ("model/config.json", 0),
        ("mine/shard-00002-model-00001-of-00001.safetensors", 0),
        ("model/shard-00002.bin", 0),
    ],
)
def test_the_rank_of_a_file(name, rank):
    assert rank_of_file(name) == rank
