"""What opening, saving, retention and a lock delete or write is shardwise's own: other programs' files stay, whatever their names."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.publish import lock as marks
from shardwise.publish import places as publish
from shardwise.ranks.ranks import remove_tree
from tests.faults.calls import record_into, recorded, watched
from tests.faults.disk import CRASHES, Disk, Tree, read_tree, write_tree

NONCE = "0123456789abcdef"


def state() -> sw.TrainState:
    torch.manual_seed(0)
    return sw.TrainState(model=nn.Linear(3, 2))


def precious(path: Path) -> Path:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "thesis").write_text("precious")
    return path


def is_alive(path: Path) -> bool:
    return (path / "inner" / "thesis").read_text() == "precious"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("place", ["run", "mirror", "fallback"])
def test_opening_leaves_what_other_programs_made(tmp_path: Path, place: str) -> None:
    root = tmp_path / place
    mine = precious(tmp_path / "mine")
    folders = [
        f".tmp-step-00000001-{NONCE}",
        f".trash-step-00000001-{NONCE}",
        f".tmp-{NONCE}-view",
        ".tmp-rsync",
    ]
    for name in folders:
        precious(root / name)
    links = [f".tmp-step-00000002-{NONCE}", f".trash-step-00000002-{NONCE}"]
    for name in links:
        (root / name).symlink_to(mine)
    files = [f".tmp-latest-{NONCE}", f".tmp-place-{NONCE}", f".tmp-probe-{NONCE}-0", ".tmp-notes"]
    for name in files:
        (root / name).write_text("precious")
    given = {
        "run": {},
        "mirror": {"mirror": root},
        "fallback": {"failures": sw.FailurePolicy(fallback=root)},
    }
    with sw.Checkpointer(tmp_path / "run", **given[place]) as checkpoints:  # type: ignore[arg-type]
        checkpoints.save(state(), 1)
    assert {*folders, *links, *files} <= set(names(root))
    assert all(is_alive(root / name) for name in folders)
    assert is_alive(mine)
    assert {(root / name).read_text() for name in files} == {"precious"}
    assert publish.leftovers(str(root)) == []


def test_opening_deletes_what_a_killed_run_of_ours_left(tmp_path: Path) -> None:
    root, mine = tmp_path / "run", precious(tmp_path / "mine")
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(state(), 1)
    begun = Path(publish.make_temporary(str(root / "step-00000002"), ["model"]))  # killed while it wrote
    (begun / "model" / "half").write_text("half")
    (begun / "link").symlink_to(mine)
    just_made = root / f".tmp-step-00000002-{NONCE}"
    just_made.mkdir()
    whole = root / f".tmp-step-00000001-{NONCE}"  # killed before its rename
    shutil.copytree(root / "step-00000001", whole)
    half_deleted = root / f".trash-step-00000001-{NONCE}"
    shutil.copytree(root / "step-00000001", half_deleted)
    shutil.rmtree(half_deleted / "model")
    for name, content in ((f".tmp-latest-{NONCE}", "step-000"), (f".tmp-probe-{NONCE}-3", "")):
        (root / name).write_text(content)
    assert len(publish.leftovers(str(root))) == 6
    sw.Checkpointer(root).close()
    assert names(root) == [".lock", "latest", "step-00000001"]
    assert is_alive(mine)


def test_a_deletion_takes_its_proof_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any call, it leaves what the next start tells to be ours."""
    for at in range(1, 40):
        root = tmp_path / str(at)
        with sw.Checkpointer(root) as checkpoints:
            checkpoints.save(state(), 1)
        left = [at]

        def cut(path: str, *, real=os.unlink, left=left) -> None:  # type: ignore[no-untyped-def]
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            real(path)

        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", cut)
            try:
                publish.discard(str(root / "step-00000001"))
            except KeyboardInterrupt:
                pass
            else:
                assert at > 5
                return
        assert len(names(root)) == 3
        sw.Checkpointer(root).close()
        assert names(root) == [".lock", "latest"], at
    raise AssertionError("a deletion makes more calls than were tried")


def _delete_step(root: Path) -> None:
    publish.discard(str(root / "step-00000001"))


def _delete_view(root: Path) -> None:
    """Of a step that several hosts hold: its manifest is not synced, because no view outlives its process."""
    view = root / f".tmp-{NONCE}-view"
    os.mkdir(view)
    marks.mark(str(view))
    fd = os.open(view / "manifest.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, (root / "step-00000001" / "manifest.json").read_bytes())
    os.close(fd)
    marks.remove_ours(str(view))


@pytest.mark.parametrize("delete", [_delete_step, _delete_view])
def test_a_power_loss_in_a_deletion_leaves_a_whole_step_or_what_is_told_to_be_ours(
    tmp_path: Path, delete: Callable[[Path], None]
) -> None:
    """After any call, and whatever of the unsynced names and contents is lost."""
    root, log, draw = tmp_path / "run", tmp_path / "log", random.Random(0)
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(state(), 1)
    before = read_tree(root)
    disk = Disk(before)
    with watched(root, record_into(log, 0)):
        delete(root)
    images: list[Tree] = []
    for call in recorded(log):
        disk.replay(call)
        kinds = [*CRASHES, *["any part of the rest"] * 15]
        images += [image for kind in kinds if (image := disk.crash(kind, draw)) not in images]
    assert disk.now() == read_tree(root)
    for number, image in enumerate(images):
        crashed = tmp_path / str(number)
        write_tree(crashed, image)
        publish.sweep_leftovers(str(crashed))
        left = read_tree(crashed)
        assert left in (before, {name: before[name] for name in (".lock", "latest")}), image.keys()
    assert len(images) > 10


def test_retention_counts_and_deletes_only_steps_of_this_run(tmp_path: Path) -> None:
    root, mine, other = tmp_path / "run", precious(tmp_path / "mine"), tmp_path / "other"
    with sw.Checkpointer(other) as checkpoints:
        checkpoints.save(state(), 3)
        checkpoints.save(state(), 25)
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(state(), 10)
        checkpoints.save(state(), 20)
        checkpoints.save(state(), 30)
    precious(root / "step-00000005")
    (root / "step-00000007").symlink_to(mine)
    for step in (3, 25):
        shutil.copytree(other / f"step-{step:08d}", root / f"step-{step:08d}")
    moved = tmp_path / "other disk" / "step-00000010"  # a step of the run, of which only a link is left
    moved.parent.mkdir()
    (root / "step-00000010").rename(moved)
    (root / "step-00000010").symlink_to(moved)
    with sw.Checkpointer(root, keep_last=2) as checkpoints:
        assert checkpoints.resume(state(), 30) is not None
        checkpoints.save(state(), 40)
    kept = [name for name in names(root) if name.startswith("step-")]
    foreign = ["step-00000003", "step-00000005", "step-00000007", "step-00000025"]
    assert kept == sorted([*foreign, "step-00000010", "step-00000030", "step-00000040"])
    assert is_alive(root / "step-00000005")
    assert is_alive(mine)
    assert (moved / "manifest.json").exists()


@pytest.mark.parametrize("kind", ["link", "hard link", "file"])
def test_a_lock_is_no_file_of_another_program(tmp_path: Path, kind: str) -> None:
    text = "precious " * 20
    theirs, lock = tmp_path / "theirs", tmp_path / "run" / ".lock"
    theirs.write_text(text)
    lock.parent.mkdir()
    if kind == "link":
        lock.symlink_to(theirs)
    elif kind == "hard link":
        lock.hardlink_to(theirs)
    else:
        shutil.copy(theirs, lock)
    with pytest.raises(CheckpointError, match=r"\.lock: can't be locked, because .*; (re)?move it"):
        sw.Checkpointer(lock.parent)
    assert theirs.read_text() == lock.read_text() == text


@pytest.mark.parametrize("left", [b"", bytes(64), b"{", b'{"host', b'{"host": "no', b'{"ho' + bytes(60)])
def test_a_lock_file_that_a_crash_emptied_or_cut_is_taken(tmp_path: Path, left: bytes) -> None:
    (tmp_path / ".lock").write_bytes(left)
    for _ in range(2):
        sw.Checkpointer(tmp_path).close()
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("text", ["{}", '{"hosts": ["a"]}', '{"h" ', "h"])
def test_a_lock_file_that_only_resembles_ours_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / ".lock").write_text(text)
    with pytest.raises(CheckpointError, match="another program wrote it"):
        sw.Checkpointer(tmp_path)
    assert (tmp_path / ".lock").read_text() == text


def test_a_note_of_another_name_proves_nothing(tmp_path: Path) -> None:
    """A note is copied with its directory: only the nonce of the directory's own name makes it ours."""
    begun = Path(publish.make_temporary(str(tmp_path / "step-00000002"), ["model"]))
    (begun / "model" / "half").write_text("half")
    copied = precious(tmp_path / f".tmp-step-00000002-{NONCE}")
    shutil.copy(begun / marks.NOTE_NAME, copied)
    assert marks.has_note(str(begun))
    assert not marks.has_note(str(copied))
    assert not marks.is_ours(str(copied))
    sw.Checkpointer(tmp_path).close()
    assert not begun.exists()
    assert is_alive(copied)


def test_the_hint_replaces_no_link_and_no_other_file(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state(), step)
            assert (tmp_path / "latest").read_text() == f"step-{step:08d}\n"
        (tmp_path / "latest").write_text("global_step100")  # DeepSpeed's
        checkpoints.save(state(), 3)
        assert (tmp_path / "latest").read_text() == "global_step100"
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").symlink_to("step-00000001")
        checkpoints.save(state(), 4)
        assert os.readlink(tmp_path / "latest") == "step-00000001"


def test_a_tree_behind_a_link_is_not_deleted(tmp_path: Path) -> None:
    mine = precious(tmp_path / "mine")
    (tmp_path / "link").symlink_to(mine)
    remove_tree(str(tmp_path / "link"))
    assert is_alive(mine)
    inner = tmp_path / "tree" / "inner"
    inner.mkdir(parents=True)
    (inner / "link").symlink_to(mine)
    remove_tree(str(tmp_path / "tree"))
    assert not (tmp_path / "tree").exists()
    assert is_alive(mine)


def test_a_published_step_holds_no_note(tmp_path: Path) -> None:
    sw.save(state(), tmp_path / "step")
    sw.copy_checkpoint(tmp_path / "step", tmp_path / "copy")
    assert not list(tmp_path.rglob(".shardwise"))
    assert names(tmp_path) == ["copy", "step"]


def test_a_note_that_no_parser_ends_is_no_note(tmp_path: Path) -> None:
    """Nested deeper than Python's parser goes, in 1,000 bytes."""
    folder = tmp_path / f".tmp-step-00000001-{NONCE}"
    folder.mkdir()
    (folder / marks.NOTE_NAME).write_bytes(b"[" * 1000)
    (folder / "precious").write_text("precious")
    assert not marks.is_ours(str(folder))
    with sw.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state(), 1)
    assert (folder / "precious").read_text() == "precious"


def test_the_note_is_on_the_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power loss can keep files of the directory without the note, and no start deletes them."""
    synced: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(marks, "fsync_directory", lambda path: synced.append((path, os.listdir(path))))
    place = tmp_path / ".tmp-step-00000001-0123456789abcdef"
    place.mkdir()
    marks.mark(str(place))
    assert synced == [(str(place), [marks.NOTE_NAME])]
