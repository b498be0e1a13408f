"""A run's memory is that of one directory: under another path it stays the run's, and no copy, branch or successor of it ever takes it."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwise as sw

COPIES = {
    "cp -r": lambda old, new: subprocess.run(["cp", "-r", old, new], check=True),
    "cp -a": lambda old, new: subprocess.run(["cp", "-a", old, new], check=True),
    "cp -al": lambda old, new: subprocess.run(["cp", "-al", old, new], check=True),
    "copytree": shutil.copytree,
}


@pytest.fixture(name="hosts")
def _hosts(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir(0o700)
    return folder


def state_of(value: float) -> sw.TrainState:
    model = torch.nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return sw.TrainState(model=model)


def opened(root: Path, hosts: Path) -> sw.Checkpointer:
    return sw.Checkpointer(root, memory=sw.InMemoryCheckpoints(every=1, copies=1, directory=str(hosts)))


def keep(checkpoints: sw.Checkpointer, state: sw.TrainState, step: int, value: float) -> None:
    with torch.no_grad():
        state.model.weight.fill_(value)
    assert checkpoints.remember(state, step) > 0
    assert checkpoints.wait_for_memory() == step


def train(root: Path, hosts: Path, *, first: int = 1) -> None:
    """Save a step on disk and keep the next two in memory; the values of a step are its number."""
    state = state_of(first)
    with opened(root, hosts) as checkpoints:
        checkpoints.save(state, first)
        for step in (first + 1, first + 2):
            keep(checkpoints, state, step, step)


def resumed(root: Path, hosts: Path) -> tuple[int, float, bool] | None:
    """The resumed step, its value, and whether it came from memory."""
    state = state_of(-1)
    with opened(root, hosts) as checkpoints:
        report = checkpoints.resume(state)
    if report is None:
        assert state.model.weight[0, 0] == -1
        return None
    return report.step, state.model.weight[0, 0].item(), report.from_memory


def branch_out(root: Path, hosts: Path) -> None:
    """Resume what the directory offers, and keep the next step, with a value that only this branch has."""
    state = state_of(-1)
    with opened(root, hosts) as checkpoints:
        report = checkpoints.resume(state)
        assert report is not None
        keep(checkpoints, state, report.step + 1, 777)


@pytest.mark.parametrize("how", COPIES)
def test_a_copied_directory_starts_from_disk_and_leaves_the_memory_of_its_original(
    tmp_path: Path, hosts: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "run", tmp_path / "copy"
    train(old, hosts)
    COPIES[how](old, new)
    with caplog.at_level(logging.WARNING, "shardwise"):
        branch_out(new, hosts)
    assert "is a copy of another run's directory" in caplog.text
    # Hard links change the mark of the original, too: it then falls back to its step on disk.
    assert resumed(old, hosts) == ((1, 1, False) if how == "cp -al" else (3, 3, True))
    assert resumed(new, hosts) == (2, 777, True)


def test_a_copy_starts_while_its_original_trains_on(tmp_path: Path, hosts: Path) -> None:
    old, new, state = tmp_path / "run", tmp_path / "copy", state_of(1)
    with opened(old, hosts) as checkpoints:
        checkpoints.save(state, 1)
        keep(checkpoints, state, 2, 2)
        shutil.copytree(old, new)
        branch_out(new, hosts)
        keep(checkpoints, state, 3, 3)
        branch_out(new, hosts)
    assert resumed(old, hosts) == (3, 3, True)
    assert resumed(new, hosts) == (3, 777, True)
    assert resumed(old, hosts) == (3, 3, True)


def test_a_copy_that_is_copied_again_and_an_older_copy_that_comes_back(tmp_path: Path, hosts: Path) -> None:
    run, backup, third = tmp_path / "run", tmp_path / "backup", tmp_path / "third"
    train(run, hosts)
    shutil.copytree(run, backup)
    assert resumed(run, hosts) == (3, 3, True)
    shutil.rmtree(run)
    shutil.copytree(backup, run)  # perhaps with the numbers of the deleted files
    assert resumed(run, hosts) == (1, 1, False)
    branch_out(run, hosts)
    shutil.copytree(run, third)
    assert resumed(third, hosts) == (1, 1, False)
    assert resumed(run, hosts) == (2, 777, True)


@pytest.mark.parametrize("move", ["renamed", "linked"])
def test_a_directory_under_another_path_keeps_its_memory(tmp_path: Path, hosts: Path, move: str) -> None:
    old, new = tmp_path / "run", tmp_path / "elsewhere" / "renamed"
    train(old, hosts)
    new.parent.mkdir()
    if move == "renamed":
        old.rename(new)
    else:
        new.symlink_to(old)
    assert resumed(new, hosts) == (3, 3, True)
    branch_out(new, hosts)
    assert resumed(new, hosts) == (4, 777, True)


def test_a_branch_from_a_step(tmp_path: Path, hosts: Path) -> None:
    """As docs/howto/memory-tier.md says: a directory of its own, which begins with a step of the first run."""
    old, new = tmp_path / "run", tmp_path / "branch"
    train(old, hosts)
    state = state_of(-1)
    with opened(new, hosts) as checkpoints:
        assert checkpoints.resume(state) is None
        report = sw.restore(state, old / "step-00000001")
        assert (report.step, state.model.weight[0, 0].item()) == (1, 1)
        keep(checkpoints, state, 2, 777)
    assert resumed(old, hosts) == (3, 3, True)
    assert resumed(new, hosts) == (2, 777, True)


def test_two_runs_with_one_name(tmp_path: Path, hosts: Path) -> None:
    for place, first in (("a", 1), ("b", 10)):
        (tmp_path / place).mkdir()
        train(tmp_path / place / "run", hosts, first=first)
    assert resumed(tmp_path / "a" / "run", hosts) == (3, 3, True)
    assert resumed(tmp_path / "b" / "run", hosts) == (12, 12, True)


def delete_what_is_listed(root: Path) -> None:
    subprocess.run(f"rm -rf '{root}'/*", shell=True, check=True)
    assert (root / ".memory.json").exists(), "hidden files stay"


@pytest.mark.parametrize("delete", [shutil.rmtree, delete_what_is_listed])
def test_a_run_that_was_deleted_leaves_nothing_to_its_successor(
    tmp_path: Path, hosts: Path, delete: Callable[[Path], object]
) -> None:
    root = tmp_path / "run"
    train(root, hosts)
    delete(root)
    assert resumed(root, hosts) is None
    train(root, hosts, first=20)
    assert resumed(root, hosts) == (22, 22, True)


@pytest.mark.parametrize("damage", [lambda mark: mark.unlink(), lambda mark: mark.write_text("other")])
def test_a_lost_or_changed_mark_costs_the_steps_in_memory(
    tmp_path: Path, hosts: Path, damage: Callable[[Path], object]
) -> None:
    root = tmp_path / "run"
    train(root, hosts)
    damage(root / "memory-id")
    assert resumed(root, hosts) == (1, 1, False)
    branch_out(root, hosts)
    assert resumed(root, hosts) == (2, 777, True)


def test_a_linked_mark_is_replaced(tmp_path: Path, hosts: Path) -> None:
    old, new = tmp_path / "run", tmp_path / "copy"
    train(old, hosts)
    shutil.copytree(old, new)
    (new / "memory-id").unlink()
    (new / "memory-id").symlink_to(old / "memory-id")
    branch_out(new, hosts)
    assert not (new / "memory-id").is_symlink()
    assert resumed(old, hosts) == (3, 3, True)


def test_a_store_is_no_place_for_it() -> None:
    with pytest.raises(ValueError, match="needs a directory for the run's steps, not a URL"):
        sw.Checkpointer("s3://bucket/run", memory=sw.InMemoryCheckpoints(every=1))
