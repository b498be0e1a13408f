"""Accelerate and the HF Trainer with checkpoints in a store: saved, rotated, killed, resumed bitwise."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.format.header import parse_head
from shardwise.storage import files_below, folders_in, is_file, names_in, read_whole
from tests.harness.launch import Launch
from tests.harness.models import build_reference
from tests.harness.object_store import BUCKET, Asked, Do, Proxy, S3Server
from tests.harness.pool import RankPool
from tests.storage import _integrations_fns as fns


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub")
    build_reference("qwen3-tied").save_pretrained(path)
    return path


@pytest.fixture
def root() -> str:
    return f"s3://{BUCKET}/integrations/{os.urandom(6).hex()}"


def head_of(root: str) -> Any:
    return parse_head(read_whole(f"{root}/head.json", 10**6), root)


def test_accelerate(ranks: RankPool, proxy: Proxy, root: str, tmp_path: Path) -> None:
    for found in ranks.run_ranks(2, fns.accelerate, proxy.endpoint, root, str(tmp_path), timeout_s=100):
        assert found["path"] == f"{root}/state"
        assert "CheckpointError" in found["taken"]
        assert f"{root}/state: isn't empty" in found["taken"]
        assert found["report"] == (3, True)
        assert found["same"]
        assert f"{root}/other" in found["nowhere"]
        assert found["automatic"] == str(tmp_path / "checkpoints/checkpoint_0")
    assert set(names_in(root)) == {"state"}
    assert sw.verify(f"{root}/state").ok


@pytest.mark.nightly
@pytest.mark.needs("trainer")
def test_trainers_best_checkpoint(
    ranks: RankPool, hub: Path, proxy: Proxy, root: str, tmp_path: Path
) -> None:
    for found in ranks.run_ranks(
        2, fns.best, str(hub), proxy.endpoint, root, str(tmp_path / "run"), timeout_s=100
    ):
        assert found["nothing"].startswith(f"NoCheckpointError: {root}")
        assert found["has"] == [False, False, True]
        assert found["best"].startswith(f"{root}/step-00000001.")
        for name, tensor in found["at 1"].items():
            assert torch.equal(found["loaded"][name], tensor), name
        assert found["kept"]
        longer = "scheduler.lr_lambdas[0].num_training_steps: 3 when saved, 4 now"
        assert found["resumed"] == (3, (longer,)), "four steps have other learning rates than three"
        assert found["best again"] == found["best"], (
            "a resume knows the best, though Trainer sees no such directory"
        )
        assert "pass checkpoint_root to the trainer" in found["output_dir"]
    assert not list((tmp_path / "run").iterdir()), "nothing lies in output_dir"
    head = head_of(root)
    assert list(head.steps) == [1], "save_total_limit=1: the best alone stays at the end"
    assert set(folders_in(root)) == set(head.steps.values())
    assert is_file(f"{root}/{head.steps[1]}/trainer_state.json")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.needs("trainer")
def test_trainer_is_killed_and_resumed(
    ranks: RankPool, server: S3Server, hub: Path, proxy: Proxy, root: str, tmp_path: Path
) -> None:
    """Killed while it writes the third checkpoint: the second is the newest then."""
    given = (str(hub), proxy.endpoint, root)
    with Launch(2, fns.killed, *given, str(tmp_path / "run")) as life:

        def decide(asked: Asked) -> Do | None:
            if (
                asked.method in ("PUT", "POST")
                and "/step-00000009." in asked.path
                and "shard-00002" in asked.path
            ):
                return Do(before=lambda: life.kill(1))
            return None

        proxy.reset(decide)
        assert life.wait(200, ranks=[1]) == [-signal.SIGKILL]
        life.kill(0)
    proxy.reset()
    head = head_of(root)
    assert sorted(head.steps) == [3, 6]
    (left,) = set(folders_in(root)) - set(head.steps.values())
    assert left.startswith("step-00000009.")
    assert not is_file(f"{root}/{left}/manifest.json")

    found = ranks.run_ranks(2, fns.resumed, *given, str(tmp_path), True, timeout_s=200)
    for rank in found:
        assert rank["report"] == (6, True, (), [])
        assert rank["resumed"] == rank["whole"], "a resume goes on bitwise"
        for name, tensor in rank["after"].items():
            assert torch.equal(rank["resumed after"][name], tensor), name
    head = head_of(root)
    assert sorted(head.steps) == [9, 12]
    newest = f"{root}/{head.steps[12]}"
    assert sw.verify(newest).step == 12
    names = set(files_below(newest))
    assert {"trainer_state.json", "training_args.bin", "model/tokenizer.json"} <= names
    local = tmp_path / "whole" / "checkpoint-12"
    assert names == {n for n in _files(local) if is_one_of_a_store(n)}

    # Named by its URL, on another number of ranks: the newer one is set aside. Then the oldest is damaged where only reading shows it.
    (alone,) = ranks.run_ranks(
        1, fns.resumed, *given, str(tmp_path / "alone"), f"{root}/{head.steps[9]}", 0.0
    )
    assert alone["report"][0] == 9
    assert [step for step, *_ in alone["resumed"]] == list(range(1, 13))
    aside = head_of(root)
    assert [(one.name, one.why) for one in aside.aside] == [(head.steps[12], "superseded")]
    shard = next(n for n in files_below(f"{root}/{aside.steps[12]}") if n.startswith("model/shard-00001-"))
    content = bytearray(read_whole(f"{root}/{aside.steps[12]}/{shard}", 10**8))
    content[-1] ^= 1
    server.put(f"{root.removeprefix(f's3://{BUCKET}/')}/{aside.steps[12]}/{shard}", bytes(content))
    (again,) = ranks.run_ranks(1, fns.resumed, *given, str(tmp_path / "again"), True, 0.0)
    assert (again["report"][0], again["report"][3]) == (9, [12])
    assert (aside.steps[12], "damaged") in [(one.name, one.why) for one in head_of(root).aside]


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def is_one_of_a_store(name: str) -> bool:
    """Whether a file of a local ``checkpoint-N`` is one in a store: the links at its top are not."""
    return "/" in name or name in ("manifest.json", "state.json", "trainer_state.json", "training_args.bin")
