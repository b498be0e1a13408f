"""Real file systems that fail for a while: full of files, with I/O errors, read-only, with a limit of sizes. As root."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.pool import RankPool
from tests.preemption import _bad_storage_fns as fns

pytestmark = pytest.mark.slow
CODES = {
    "read-only": errno.EROFS,
    "no inodes": errno.ENOSPC,
    "I/O error": errno.EIO,
    "size limit": errno.EFBIG,
}


def _run(*words: str | Path) -> None:
    done = subprocess.run([*map(str, words)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't be had on this machine: {' '.join(map(str, words))}: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path, kind: str) -> Iterator[Path]:
    """A tmpfs; for I/O errors an ext4 on a sparse file that a full tmpfs holds: the block device then fails."""
    disk, backing = tmp_path / "disk", tmp_path / "backing"
    disk.mkdir()
    backing.mkdir()
    mounted: list[Path] = []
    try:
        if kind == "I/O error":
            _run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", backing)
            mounted.append(backing)
            _run("truncate", "-s", "64m", backing / "image")
            _run("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=0", backing / "image")
            _run("mount", "-o", "loop,errors=continue", backing / "image", disk)
        else:
            _run("mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=200", "tmpfs", disk)
        mounted.append(disk)
        yield disk
    finally:
        for place in reversed(mounted):
            subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("kind", fns.FAULTS)
def test_saves_on_it(ranks: RankPool, disk: Path, kind: str) -> None:
    cause = os.strerror(CODES[kind])
    for way in ("warn", "raise"):
        first, second = ranks.run_ranks(2, fns.saves, str(disk), kind, way, timeout_s=100)
        warned = first.pop("warned")
        assert second.pop("warned") == []
        assert first == second, "alike on all ranks"
        said = first["said"]
        assert (said[1], said[4]) == (None, None), "and it goes on when storage works again"
        texts = [said[2], said[3]] if way == "warn" else [said[2][1], said[3][1]]
        assert len(warned) == (2 if way == "warn" else 0)
        for text in [*texts, *warned]:
            assert cause in text, text
            assert str(disk) in text, text
        for text in warned:
            assert "rank " in text, text
        assert first["steps"] == ["step-00000001"], "nothing half published"
        assert (first["resumed"], first["problems"]) == (4, ())
        assert [name for name in first["left"] if name.startswith("step-")] == [
            "step-00000001",
            "step-00000004",
        ]
