"""A step that can't be what its name says, or holds what can't be applied, is damage: the step before is resumed."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.verify import quick_check
from shardwise.errors import IntegrityError, NoCheckpointError, StateError, VersionError
from tests.harness.hostile import edit_documents, run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with steps 1 and 2."""
    with sw.Checkpointer(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(run(step), step)
    return tmp_path / "run"


def step_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def old_manifest(root: Path) -> None:
    """Came back from a backup."""
    shutil.copyfile(step_path(root, 1) / "manifest.json", step_path(root, 2) / "manifest.json")


def old_step(root: Path) -> None:
    shutil.rmtree(step_path(root, 2))
    shutil.copytree(step_path(root, 1), step_path(root, 2))


def malformed(root: Path) -> None:
    edit_documents(step_path(root, 2), lambda d: d.update(optimizer=[]))


def not_json(root: Path) -> None:
    (step_path(root, 2) / "state.json").write_text("{")


DAMAGE: dict[Callable[[Path], None], str] = {
    old_manifest: "contains step 1, but step 2",
    old_step: "contains step 1, but step 2",
    malformed: "optimizer: expected a mapping",
    not_json: "bytes, expected",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_the_step_before_is_resumed(
    root: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    damage(root)
    assert not sw.verify(step_path(root, 2)).ok
    live = run()
    with caplog.at_level(logging.WARNING), sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(live)
        assert report is not None
        assert report.step == 1
        assert live.extra["label"] == 1
        assert DAMAGE[damage] in report.damaged[2]
        checkpoints.save(live, 2)
    assert DAMAGE[damage] in caplog.text
    assert len([n for n in os.listdir(root) if n.startswith("step-00000002.damaged-")]) == 1
    assert sw.verify(step_path(root, 2)).ok


def test_verify_says_what_a_name_promises(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ("manifest.json: contains step 1, but step 2 was expected",)
    old_step(root)
    assert [p.startswith(said) for p in sw.verify(step_path(root, 2)).problems] == [True]
    monkeypatch.chdir(step_path(root, 2))
    assert [p.startswith(said) for p in sw.verify(".").problems] == [True]
    with pytest.raises(IntegrityError, match="contains step 1, but step 2"):
        quick_check(str(step_path(root, 2)), 2)
    (tmp_path / "link").symlink_to(step_path(root, 1))
    for other in (step_path(root, 1), tmp_path / "link", root.rename(tmp_path / "moved") / "step-00000001"):
        if other.exists():
            assert sw.verify(other).ok


def test_a_directory_that_was_renamed_is_taken_by_its_path(root: Path) -> None:
    """Whoever gives a path says which step is meant, whatever the directory is called."""
    renamed = step_path(root, 2).rename(root / "step-00000009")
    report = sw.restore(run(), renamed)
    assert (report.step, report.exact) == (2, True)
    best = renamed.rename(root.parent / "best")
    assert sw.restore(run(), best).step == 2
    assert sw.verify(best).ok


def test_a_run_whose_only_step_was_renamed_says_its_name(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(run(), 5)
    step_path(tmp_path, 5).rename(step_path(tmp_path, 6))
    with (
        sw.Checkpointer(tmp_path) as checkpoints,
        pytest.raises(NoCheckpointError, match=r"contains step 5, but step 6.*restore its original name"),
    ):
        checkpoints.resume(run())
    assert step_path(tmp_path, 6).is_dir(), "nothing was set aside"


def other_optimizer() -> sw.TrainState:
    state = run()
    state.optimizer = torch.optim.SGD(state.model.parameters(), lr=0.1)  # type: ignore[union-attr]
    state.scheduler = None
    return state


def test_what_is_no_damage_stops_the_resume_and_sets_nothing_aside(root: Path) -> None:
    before = sorted(os.listdir(root))
    with sw.Checkpointer(root) as checkpoints:
        with pytest.raises(StateError, match="contains state for AdamW, but the optimizer is SGD"):
            checkpoints.resume(other_optimizer())
        edit_documents(step_path(root, 2), lambda d: d.update(news={}))
        with pytest.raises(VersionError, match="a document 'news'"):
            checkpoints.resume(run())
    assert sorted(os.listdir(root)) == before


def test_names_that_are_no_steps(root: Path) -> None:
    """One step has one name: others of the same number are not taken for it."""
    for name in ("step-000000003", "step-٠٠٠٠٠٠٠٣", f"step-{10**30}"):
        shutil.copytree(step_path(root, 2), root / name)
    with sw.Checkpointer(root) as checkpoints:
        assert checkpoints.resume(run()).step == 2  # type: ignore[union-attr]


def test_retention_leaves_a_link_and_what_it_points_to(tmp_path: Path) -> None:
    state = sw.TrainState(model=nn.Linear(2, 2))
    with sw.Checkpointer(tmp_path / "run", keep_last=1) as checkpoints:
        checkpoints.save(state, 1)
        kept = step_path(tmp_path / "run", 1).rename(tmp_path / "elsewhere")
        step_path(tmp_path / "run", 1).symlink_to(kept)
        checkpoints.save(state, 2)
    assert sorted(n for n in os.listdir(tmp_path / "run") if "step" in n) == [
        "step-00000001",
        "step-00000002",
    ]
    assert sw.verify(kept).ok
