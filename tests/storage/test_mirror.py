"""``Checkpointer(root, mirror=…)``: each step is copied, proved, kept and taken by a resume where the first place fails."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.storage import files_below
from tests.harness.object_store import Do, Proxy, S3Server
from tests.harness.pool import RankPool
from tests.storage.test_runs import ROOT, digest_of_seed, head_of
from tests.storage.test_saves import small_state, use


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    with Proxy(server.port) as found:
        use(found.endpoint)
        yield found


@pytest.fixture
def mirror() -> str:
    return f"{ROOT}/mirror-{os.urandom(6).hex()}"


def save_each(root: Any, mirror: Any, *steps: int, resumes: bool = False, **options: Any) -> None:
    """A run that saves these steps, waiting for the mirror after each. The state of step N has the seed N."""
    with sw.Checkpointer(root, mirror=mirror, **options) as checkpoints:
        if resumes:
            assert checkpoints.resume(small_state(99)) is not None
        for step in steps:
            checkpoints.save(small_state(step), step)
            checkpoints.wait()
            assert checkpoints._steps.mirror is not None
            checkpoints._steps.mirror.wait()
            assert checkpoints.mirrored == step


def resumed(root: Any, mirror: Any, step: int | None = None) -> sw.ResumeReport:
    with sw.Checkpointer(root, mirror=mirror) as checkpoints:
        report = checkpoints.resume(small_state(99), step)
        assert report is not None
        return report


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_first_place_is_lost(proxy: Proxy, mirror: str, tmp_path: Path, mode: str) -> None:
    root = tmp_path / "run"
    save_each(root, mirror, 1, 2, 3, 4, keep_last=2, keep_every=2, mode=mode)
    head = head_of(mirror)
    assert sorted(head.steps) == [2, 3, 4]
    for step, name in head.steps.items():
        there, here = f"{mirror}/{name}", root / f"step-{step:08d}"
        assert sw.verify(there).ok
        assert sw.diff(there, here).changed == ()
        assert files_below(there).keys() == files_below(str(here)).keys()
    shutil.rmtree(root)
    report = resumed(root, mirror)
    assert (report.step, report.digest) == (4, digest_of_seed(tmp_path, 4))
    assert report.path == f"{mirror}/{head.steps[4]}"
    save_each(root, mirror, 5, keep_last=2, resumes=True)
    assert sorted(head_of(mirror).steps) == [4, 5]
    assert resumed(root, mirror).path == str(root / "step-00000005")


def test_the_newest_step_is_damaged_in_the_first_place(proxy: Proxy, mirror: str, tmp_path: Path) -> None:
    """The mirror's copy of the same step is taken, before an older one."""
    root = tmp_path / "run"
    save_each(root, mirror, 1, 2)
    weights = next((root / "step-00000002" / "model").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    report = resumed(root, mirror)
    assert (report.step, report.digest) == (2, digest_of_seed(tmp_path, 2))
    assert report.path.startswith(mirror)
    assert list(report.damaged) == [2]
    assert sorted(p.name.partition("-0000000")[2][:9] for p in root.glob("step-*")) == ["1", "2.damaged"]
    save_each(root, mirror, 3, resumes=True)
    assert sorted(head_of(mirror).steps) == [1, 2, 3]


def test_superseded_in_both_places(proxy: Proxy, mirror: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_each(root, mirror, 1, 2, 3)
    assert resumed(root, mirror, step=1).superseded == (3, 2)
    shutil.rmtree(root)
    report = resumed(root, mirror)
    assert report.step == 1
    assert [one.why for one in head_of(mirror).aside] == ["superseded", "superseded"]


def test_a_mirror_of_another_run(proxy: Proxy, mirror: str, tmp_path: Path) -> None:
    save_each(tmp_path / "one", mirror, 1)
    with pytest.raises(CheckpointError, match="did not resume from"):
        save_each(tmp_path / "two", mirror, 2)
    save_each(tmp_path / "two", f"{mirror}-2", 2)
    with pytest.raises(CheckpointError, match="the steps of another run than"):
        resumed(tmp_path / "two", mirror)


def test_a_store_that_is_away_for_a_while(
    proxy: Proxy, mirror: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The saves go on; the mirror catches up after the next save, the newest step first."""
    with sw.Checkpointer(tmp_path / "run", mirror=mirror) as checkpoints:
        checkpoints.save(small_state(1), 1)
        assert checkpoints._steps.mirror is not None
        checkpoints._steps.mirror.wait()
        proxy.reset(lambda asked: Do(status=403))
        with caplog.at_level(logging.WARNING):
            checkpoints.save(small_state(2), 2)
            checkpoints._steps.mirror.wait()
        assert "the mirror does not follow" in caplog.text
        assert checkpoints.mirrored == 1
        proxy.reset()
        checkpoints.save(small_state(3), 3)
    assert checkpoints.mirrored == 3
    assert sorted(head_of(mirror).steps) == [1, 2, 3]


def test_a_directory_mirrors_a_store(proxy: Proxy, mirror: str, tmp_path: Path) -> None:
    save_each(mirror, tmp_path / "mirror", 1, 2, keep_last=1)
    assert (tmp_path / "mirror" / "step-00000002" / "manifest.json").is_file()
    assert not (tmp_path / "mirror" / "step-00000001").exists()
    assert resumed(tmp_path / "elsewhere", tmp_path / "mirror").path == str(
        tmp_path / "mirror" / "step-00000002"
    )


def save_on_ranks(root: str, mirror: str, endpoint: str) -> list[int | None]:
    use(endpoint)
    with sw.Checkpointer(root, mirror=mirror, mode="async") as checkpoints:
        for step in (1, 2):
            checkpoints.save(small_state(step), step)
    return [checkpoints.mirrored]


def resume_on_ranks(root: str, mirror: str, endpoint: str) -> tuple[int, str]:
    use(endpoint)
    report = resumed(root, mirror)
    return report.step, report.digest


@pytest.mark.slow
def test_on_ranks(proxy: Proxy, mirror: str, ranks: RankPool, tmp_path: Path) -> None:
    given = {"mirror": mirror, "endpoint": proxy.endpoint}
    assert ranks.run_ranks(2, save_on_ranks, root=str(tmp_path / "run"), **given) == [[2], [None]]
    found = ranks.run_ranks(3, resume_on_ranks, root=str(tmp_path / "lost"), **given)
    assert set(found) == {(2, digest_of_seed(tmp_path, 2))}
