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
from shardwise.errors import CheckpointError, NoCheckpointError, SourceError
from shardwise.publish import line as head_line
from shardwise.storage import files_below, names_in
from tests.harness.object_store import Do, Proxy, S3Server
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but
from tests.storage.test_runs import ROOT, digest_of_seed, head_of
from tests.storage.test_saves import small_state, use


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    with Proxy(server.port) as found:
        use(found.endpoint)
        yield found


@pytest.fixture(autouse=True)
def no_error_of_the_thread(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """It raises into no test: it logs."""
    yield
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


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


def resumed(root: Any, mirror: Any, step: int | None = None) -> sw.reports.ResumeReport:
    with sw.Checkpointer(root, mirror=mirror) as checkpoints:
        report = checkpoints.resume(small_state(99), step)
        assert report is not None
        return report


@pytest.mark.parametrize("mode", nightly_but(("sync", "async"), "async"))
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
    with pytest.raises(CheckpointError, match="steps from a different run than"):
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
        assert "copying to the mirror failed" in caplog.text
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


def damage(root: Path, step: int, name: str = "model/*.safetensors") -> None:
    file = next((root / f"step-{step:08d}").glob(name))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def test_a_mirror_of_another_run_where_the_newest_step_is_damaged(
    proxy: Proxy, mirror: str, tmp_path: Path
) -> None:
    save_each(tmp_path / "one", mirror, 5)
    save_each(tmp_path / "two", f"{mirror}-2", 1, 2)
    damage(tmp_path / "two", 2, "manifest.json")
    with pytest.raises(CheckpointError, match="steps from a different run than"):
        resumed(tmp_path / "two", mirror)


def test_a_mirror_whose_head_was_deleted(
    proxy: Proxy, mirror: str, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, and nothing of it is taken for leftovers."""
    root = tmp_path / "run"
    save_each(root, mirror, 1, 2)
    before = files_below(mirror).keys() - {"head.json"}
    server.call("DELETE", f"/{mirror.removeprefix('s3://')}/head.json")
    monkeypatch.setattr(head_line, "LEFT_AFTER_S", -1.0)
    with pytest.raises(NoCheckpointError, match=r"no head\.json"):
        resumed(root, mirror)
    with sw.Checkpointer(root, mirror=mirror) as checkpoints, pytest.raises(CheckpointError):
        checkpoints.save(small_state(3), 3)
    assert files_below(mirror).keys() == before


def test_steps_that_were_saved_anew_without_the_mirror(proxy: Proxy, mirror: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_each(root, mirror, 1, 2, 3)
    with sw.Checkpointer(root) as checkpoints:
        assert checkpoints.resume(small_state(99), step=1) is not None
        checkpoints.save(small_state(12), 2)
    for superseded in root.glob("*.superseded-*"):
        shutil.rmtree(superseded)
    damage(root, 2)
    assert resumed(root, mirror).step == 1  # not the mirror's 2 and 3
    with sw.Checkpointer(root, mirror=mirror) as checkpoints:
        assert checkpoints.resume(small_state(99)) is not None
        checkpoints.save(small_state(13), 3)
    head = head_of(mirror)
    assert sorted(head.steps) == [1, 3]
    assert sw.restore(small_state(9), f"{mirror}/{head.steps[3]}").digest == digest_of_seed(tmp_path, 13)


def test_a_resume_without_the_mirror_supersedes_its_steps(proxy: Proxy, mirror: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_each(root, mirror, 1, 2, 3)
    with sw.Checkpointer(root) as checkpoints:
        assert checkpoints.resume(small_state(99), step=1) is not None
    assert resumed(root, mirror).step == 1
    assert sorted(head_of(mirror).steps) == [1]


def test_a_resume_that_fails_at_the_mirror_changes_nothing(proxy: Proxy, mirror: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_each(root, mirror, 1, 2)
    proxy.reset(lambda asked: Do(status=403) if asked.method == "PUT" and "head.json" in asked.path else None)
    with pytest.raises(CheckpointError, match="403"):
        resumed(root, mirror, step=1)
    proxy.reset()
    report = resumed(root, mirror)
    assert (report.step, report.path) == (2, str(root / "step-00000002"))


def test_a_copy_that_fails_leaves_nothing(
    proxy: Proxy, mirror: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    save_each(root, mirror, 1)
    proxy.reset(
        lambda asked: Do(status=403) if asked.method == "PUT" and "state.json" in asked.path else None
    )
    with sw.Checkpointer(root, mirror=mirror) as checkpoints:
        assert checkpoints.resume(small_state(99)) is not None
        checkpoints.save(small_state(2), 2)
    assert "copying to the mirror failed" in caplog.text
    proxy.reset()
    assert set(names_in(mirror)) == {"head.json", *head_of(mirror).steps.values()}


def test_places_that_are_none(tmp_path: Path) -> None:
    for root, mirror in (
        (tmp_path, tmp_path),
        ("s3://bucket/x", "s3://bucket/x/"),
        (tmp_path, tmp_path / "."),
    ):
        with pytest.raises(ValueError, match="the run's own directory"):
            sw.Checkpointer(root, mirror=mirror)
    with pytest.raises(SourceError, match="one slash"):
        sw.Checkpointer(Path("s3://bucket/x"))


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
