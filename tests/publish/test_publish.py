"""A step appears once it is whole and on the disk: the order of system calls, and what is not published."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.format.manifest import read_manifest
from shardwise.publish.places import delete_all, seal
from shardwise.publish.write import make_directories


def state() -> sw.TrainState:
    torch.manual_seed(0)
    return sw.TrainState(model=nn.Linear(3, 2))


def test_all_of_a_step_is_synced_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may keep a rename and lose files and names from before it."""
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(fd: int) -> None:
        calls.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def note_rename(source: Any, target: Any) -> None:
        calls.append(("rename", os.fspath(source)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    sw.save(state(), tmp_path / "step")
    (renamed,) = (k for k, (call, _) in enumerate(calls) if call == "rename")
    temporary = calls[renamed][1]
    before = [os.path.relpath(path, temporary) for _, path in calls[:renamed]]
    files = {p.relative_to(tmp_path / "step").as_posix() for p in (tmp_path / "step").rglob("*")}
    assert {"manifest.json", "model", "state.json"} < files
    assert files | {"."} <= set(before)
    # The manifest makes it a step: after all other files, and before the names that make all of them findable.
    assert before.index("manifest.json") > max(map(before.index, files - {"manifest.json", "model", "rank"}))
    synced = {name: k for k, name in enumerate(before)}
    assert min(synced[name] for name in (".", "model", "rank")) > before.index("manifest.json")
    assert calls[renamed + 1] == ("sync", str(tmp_path))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "state.json: lost": lambda path: (path / "state.json").unlink(),
    "state.json: 3 bytes, expected": lambda path: (path / "state.json").write_bytes(b"{} "),
    "model/more: not ours": lambda path: (path / "model" / "more").touch(),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_files_that_are_not_as_written_are_not_published(tmp_path: Path, what: str) -> None:
    sw.save(state(), tmp_path / "step")
    manifest = read_manifest(tmp_path / "step")
    begun = (tmp_path / "step").rename(tmp_path / ".tmp-step")
    (begun / "manifest.json").unlink()
    DAMAGE[what](begun)
    with pytest.raises(CheckpointError, match=what):
        seal(str(begun), manifest.to_text().encode(), manifest.files)
    assert not (begun / "manifest.json").exists()


def test_deleting_goes_on_after_one_that_can_not_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("first", "last"):
        sw.save(state(), tmp_path / name)
    delete_all(str(tmp_path / name) for name in ("first", "gone", "last"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    delete_all([str(tmp_path / "file")], lambda path: bool(os.listdir(path)))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert f"can't delete {tmp_path / 'gone'}: " in caplog.messages[0]
    assert f"can't delete {tmp_path / 'file'}: " in caplog.messages[1]


def test_the_name_of_a_directory_that_was_there_is_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that was killed between mkdir and fsync has made it, and no one else syncs its name."""
    synced: list[str] = []
    failing: list[int] = []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        if failing and synced[-1] == str(tmp_path):
            raise OSError(failing[-1], os.strerror(failing[-1]))

    monkeypatch.setattr(os, "fsync", fsync)
    there = tmp_path / "there"
    there.mkdir()
    make_directories(str(there / "new" / "newest"))
    assert synced == [str(tmp_path), str(there), str(there / "new")]
    for number in (errno.EINVAL, errno.EROFS):  # the directory above a mount point is not ours
        failing.append(number)
        make_directories(str(there))
    failing.append(errno.EIO)
    with pytest.raises(CheckpointError, match="fsync failed"):
        make_directories(str(there))
