"""A store as the fall-back of a run: it takes the steps that the run's own directory can't, and a resume finds them there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.format.header import HEAD_NAME, parse_head
from shardwise.storage import folders_in, read_whole
from tests.harness.models import build_reference
from tests.harness.object_store import BUCKET, Asked, Do, Proxy
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.storage import _fallback_fns as fns


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub")
    build_reference("qwen3-tied").save_pretrained(path)
    return path


@pytest.fixture
def fallback() -> str:
    return f"s3://{BUCKET}/fallback/{os.urandom(6).hex()}"


@pytest.mark.parametrize("mode", ["sync", *nightly("async")])
def test_own_loop(ranks: RankPool, proxy: Proxy, tmp_path: Path, fallback: str, mode: str) -> None:
    root = tmp_path / "run"
    found = ranks.run_ranks(2, fns.own_loop, proxy.endpoint, str(root), fallback, mode, timeout_s=100)
    # After a failed async save the next one goes elsewhere.
    newest, failed = (4, 0) if mode == "sync" else (4, 1)
    for one in found:
        assert one["failures"] == [None] * 4
        assert one["failed"] == failed
        assert one["paths"][1] == str(root / "step-00000002")
        assert one["paths"][3].startswith(f"{fallback}/step-00000004.")
        step, path, exact = one["resumed"]
        assert (step, path, exact) == (newest, one["paths"][3], True)
        assert one["after"] == one["losses"][4:], "bitwise"
    head = parse_head(read_whole(f"{fallback}/{HEAD_NAME}", 10**6), fallback)
    assert sorted(head.steps) == ([3, 4] if mode == "sync" else [4])
    assert all(sw.verify(f"{fallback}/{name}").ok for name in head.steps.values())
    assert (root / "step-00000006/manifest.json").is_file(), "the directory takes steps again"


@pytest.mark.nightly
@pytest.mark.parametrize("automatic", [False, True])
def test_accelerate(ranks: RankPool, proxy: Proxy, tmp_path: Path, fallback: str, automatic: bool) -> None:
    root = tmp_path / "run"
    own = f"{root}/checkpoints" if automatic else str(root)
    names = [f"checkpoint_{k}" if automatic else f"step-{k + 1}" for k in range(5)]
    for one in ranks.run_ranks(
        2, fns.accelerate, proxy.endpoint, str(root), fallback, automatic, timeout_s=100
    ):
        places = [own, own, fallback, fallback]
        assert one["paths"] == [f"{p}/{name}" for p, name in zip(places, names[:4], strict=True)]
        assert one["resumed"] == (4, f"{fallback}/{names[3]}"), "the newest of both"
        assert one["after"] == one["losses"][4:], "bitwise"
        assert one["next"] == f"{own}/{names[4] if automatic else 'step-6'}"
    assert set(folders_in(fallback)) == set(names[2:4])
    assert all(sw.verify(f"{fallback}/{name}").ok for name in names[2:4])


@pytest.mark.slow
def test_trainer(ranks: RankPool, hub: Path, proxy: Proxy, tmp_path: Path, fallback: str) -> None:
    for one in ranks.run_ranks(
        2, fns.trainer, proxy.endpoint, str(hub), str(tmp_path), fallback, timeout_s=200
    ):
        assert set(one["first"]["failures"].values()) == {None}
        assert one["first"]["names"] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
        assert one["again"]["resumed"] == 10, "the newest of both"
        assert one["again"]["losses"] == one["whole"]["losses"], "bitwise"
    head = parse_head(read_whole(f"{fallback}/{HEAD_NAME}", 10**6), fallback)
    assert sorted(head.steps) == [8, 10]
    assert all(sw.verify(f"{fallback}/{name}").ok for name in head.steps.values())


@pytest.mark.nightly
def test_one_that_can_take_nothing_is_refused_at_the_start(
    ranks: RankPool, proxy: Proxy, tmp_path: Path, fallback: str
) -> None:
    """Not when the first save fails, days later."""

    def decide(asked: Asked) -> Do | None:
        return Do(status=403) if "/denied" in asked.path else None

    proxy.reset(decide)
    for url, says in ((f"nosuch://{BUCKET}/x", "Protocol not known"), (f"{fallback}/denied", "denied")):
        first, second = ranks.run_ranks(2, fns.refused, proxy.endpoint, str(tmp_path / "run"), url)
        assert first == second
        for how, (kind, text) in first.items():
            assert kind in ("CheckpointError", "SourceError", "RankError"), (how, kind, text)
            assert says in text, (how, text)


@pytest.mark.nightly
def test_a_store_without_conditional_writes_is_refused(
    ranks: RankPool, proxy: Proxy, tmp_path: Path, fallback: str
) -> None:
    proxy.reset(lambda asked: Do(without=("if-none-match", "if-match")))
    for one in ranks.run_ranks(2, fns.without_conditions, proxy.endpoint, str(tmp_path / "run"), fallback):
        for how, (kind, text) in one.items():
            assert kind == "CheckpointError", (how, kind, text)
            assert "support conditional writes" in text, (how, text)
    assert not (tmp_path / "run").is_dir() or not list((tmp_path / "run").glob("step-*")), (
        "before anything is saved"
    )
