"""Real file systems that fail for a while: full of files, with I/O errors, read-only, with a limit of sizes. As root."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise as sw
from tests.harness.pool import RankPool
from tests.ranks import _bad_storage_fns as fns

pytestmark = pytest.mark.nightly
CODES = {
    "no inodes": errno.ENOSPC,
    "full device": errno.ENOSPC,
    "size limit": errno.EFBIG,
    "read-only": errno.EROFS,
    "shut down": errno.EIO,
}
ON_A_DEVICE = ("full device", *fns.FOR_GOOD)


def _run(*words: str | Path) -> None:
    done = subprocess.run([*map(str, words)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't be had on this machine: {' '.join(map(str, words))}: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path, kind: str) -> Iterator[Path]:
    """A tmpfs; or an ext4 on a sparse file in a small tmpfs."""
    disk, backing = tmp_path / "disk", tmp_path / "backing"
    disk.mkdir()
    backing.mkdir()
    mounted: list[Path] = []
    try:
        if kind in ON_A_DEVICE:
            _run("mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", backing)
            mounted.append(backing)
            _run("truncate", "-s", "64m", backing / "image")
            journal = [] if kind in fns.FOR_GOOD else ["-O", "^has_journal"]
            _run("mkfs.ext4", "-q", *journal, "-E", "lazy_itable_init=0", backing / "image")
            _run("mount", "-o", "loop,errors=continue", backing / "image", disk)
        else:
            _run("mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=200", "tmpfs", disk)
        mounted.append(disk)
        yield disk
    finally:
        for place in reversed(mounted):
            # Lazily: a test beside this one may have copied the mount into a namespace of its own.
            subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("way", ["warn", "raise"])
@pytest.mark.parametrize("kind", fns.FAULTS)
def test_saves_on_it(ranks: RankPool, disk: Path, kind: str, way: str) -> None:
    first, second = ranks.run_ranks(2, fns.saves, str(disk), kind, way, timeout_s=60)
    warned = first.pop("warned")
    assert second.pop("warned") == []
    assert first == second, "alike on all ranks"
    said = first["said"]
    assert said[1] is None
    texts = [said[2], said[3]] if way == "warn" else [said[2][1], said[3][1]]
    assert len(warned) == (2 if way == "warn" else 0)
    for text in [*texts, *warned]:
        assert os.strerror(CODES[kind]) in text, text
        assert str(disk) in text, text
    for text in warned:
        assert "rank " in text, text
    if kind in fns.FOR_GOOD:
        _look_at_what_is_left(disk.parent / "backing" / "image", disk.parent / "left")
        return
    assert said[4] is None, "it goes on when storage works again"
    assert first["steps"] == ["step-00000001"], "nothing half published"
    assert (first["resumed"], first["problems"]) == (4, ())
    assert [name for name in first["left"] if name.startswith("step-")] == ["step-00000001", "step-00000004"]


def _look_at_what_is_left(image: Path, place: Path) -> None:
    """Mount a copy of the device, as after a restart of the host: its journal is replayed."""
    place.mkdir()
    _run("cp", "--sparse=always", image, place.parent / "copy")
    _run("mount", "-o", "loop", place.parent / "copy", place)
    try:
        (step,) = place.glob("run-*/step-*")
        assert step.name == "step-00000001", "nothing half published"
        assert not sw.verify(step).problems
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
