"""System calls that take long: which count as progress, for how long, and that none goes past the watch."""

from __future__ import annotations

import ast
import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import CheckpointError
from shardwise.publish import write as direct
from shardwise.publish import write as write_module
from shardwise.publish.write import DirectWriter, FileFiller, FileWriter
from shardwise.ranks import ranks as patience
from shardwise.ranks.ranks import Watch, patiently, remove_tree, watched, write_behind

SOURCE = Path(patience.__file__).parent
MIB = 1024**2

#: What may take as long as the disk or the server wants.
LONG = {
    *(
        "os.fsync",
        "os.fdatasync",
        "os.rename",
        "os.replace",
        "os.unlink",
        "os.remove",
        "os.rmdir",
        "os.mkdir",
        "os.link",
    ),
    *("os.makedirs", "os.truncate", "os.ftruncate", "os.write", "os.pwrite", "os.preadv", "shutil.rmtree"),
}


def test_no_long_call_goes_past_the_watch() -> None:
    """Every one that writes, deletes or renames is an argument of ``patiently``. The demo runs on one's own disk."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        if file.relative_to(SOURCE).parts[0] == "demo":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in LONG:
                found.append(f"{file.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node.func)}")
    assert found == []


@pytest.fixture
def ticks() -> list[float]:
    return []


def test_ticks_while_a_call_goes_on() -> None:
    ticked = threading.Event()
    watch = Watch(ticked.set, 0.01, 60.0)
    with watched(watch):
        assert patiently(ticked.wait, 60)
    watch.end()


def test_ticks_for_a_call_of_a_helper_thread() -> None:
    ticked = threading.Event()
    watch = Watch(ticked.set, 0.01, 60.0)
    results = []

    def help_out() -> None:
        with watched(watch):
            results.append(patiently(ticked.wait, 60))

    thread = threading.Thread(target=help_out)
    thread.start()
    thread.join()
    watch.end()
    assert results == [True]


def wait_for(ticks: list[float], count: int) -> None:
    until = time.monotonic() + 60
    while len(ticks) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_does_not_tick_past_the_limit_nor_for_python(ticks: list[float]) -> None:
    """That a call began, and that it ended, is progress; with a limit of nothing, no more than that."""
    watch = Watch(lambda: ticks.append(0.0), 0.01, 0.0)
    with watched(watch):
        patiently(wait_for, ticks, 1)
        patiently(time.sleep, 0.3)
        wait_for(ticks, 2)
        time.sleep(0.3)
        after = len(ticks)
        assert after <= 4
        time.sleep(0.3)
        assert len(ticks) == after
    watch.end()


def test_many_short_calls_are_progress(ticks: list[float]) -> None:
    watch = Watch(lambda: ticks.append(0.0), 0.01, 0.0)
    with watched(watch):
        until = time.monotonic() + 60
        while len(ticks) < 3:
            assert time.monotonic() < until
            patiently(os.stat, "/")
    watch.end()
    after = len(ticks)
    time.sleep(0.1)
    assert len(ticks) == after


def test_outside_of_work_nothing_is_started() -> None:
    before = threading.active_count()
    assert patiently(os.path.isdir, "/")
    assert threading.active_count() == before


def test_remove_tree(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "file").write_text("x")
    (tree / "link").symlink_to(kept)
    (tree / "a" / "dangling").symlink_to("nowhere")
    remove_tree(str(tree))
    assert not tree.exists()
    assert (kept / "file").read_text() == "mine"
    remove_tree(str(tree))


# ------------------------------------------------------------------------------------------ sync in pieces


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64)]


class _Pages(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent")]


def unwritten_bytes(fd: int) -> int:
    """What a sync of the file would still have to write (cachestat, Linux 6.5)."""
    pages = _Pages()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(451, fd, ctypes.byref(_Range(0, 0)), ctypes.byref(pages), 0):
        pytest.skip(f"no cachestat here: {os.strerror(ctypes.get_errno())}")
    return int(pages.dirty + pages.writeback) * os.sysconf("SC_PAGE_SIZE")


def filler(path: str) -> Any:
    """Fills a file that is there."""

    class Filled:
        def __enter__(self) -> Any:
            Path(path).touch()
            os.truncate(path, 16 * MIB)
            self.inner = FileFiller(os.path.dirname(path))
            self.inner.__enter__()
            self.at = 0
            return self

        def write(self, data: bytes) -> None:
            self.inner.write_at(os.path.basename(path), self.at, memoryview(data))
            self.at += len(data)

        def __exit__(self, *what: Any) -> None:
            self.inner.__exit__(*what)

    return Filled()


@pytest.mark.parametrize("make", [FileWriter, DirectWriter, filler], ids=["file", "large file", "export"])
def test_fsync_finds_little_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[str], Any]
) -> None:
    """Each of 16 MiB is on its way to the disk after a MiB, so that no call has more than two of them to wait for."""
    monkeypatch.setattr(direct, "_O_DIRECT", 0)
    monkeypatch.setattr(direct, "BUFFER_BYTES", MIB // 4)
    for module in ("shardwise.publish.write", "shardwise.engine.engine"):
        monkeypatch.setattr(f"{module}.PIECE_BYTES", MIB, raising=False)
    left, own = [], os.fsync

    def fsync(fd: int) -> None:
        left.append(unwritten_bytes(fd))
        own(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    content = os.urandom(MIB // 4)
    with make(str(tmp_path / "file")) as file:
        for _ in range(64):
            file.write(content)
    assert left
    assert max(left) <= 2 * MIB + 64 * 1024
    assert (tmp_path / "file").read_bytes() == 64 * content


def test_an_error_of_writing_behind_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync would not say it again."""

    def fails(fd: int, *_: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(patience, "libc_function", lambda *_: fails)
    monkeypatch.setattr(write_module, "PIECE_BYTES", 10)
    with (
        pytest.raises(CheckpointError, match="file: write failed after 0 bytes: Input/output error"),
        FileWriter(str(tmp_path / "file")) as file,
    ):
        file.write(bytes(20))


def test_file_systems_without_it(tmp_path: Path) -> None:
    """A pipe can't be synced; nothing is said of that."""
    reader, writer = os.pipe()
    write_behind(writer)
    os.close(reader)
    os.close(writer)
