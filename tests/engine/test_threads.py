"""Threads that share a read: the same bytes, the same errors, and no byte written after the return."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise import IOOptions
from shardwise.engine.files import LEAST_BYTES, MOST_THREADS, FileReader, Threads, threads_of_this_rank
from shardwise.errors import IntegrityError, SourceError
from tests.harness.on_ranks import on_ranks
from tests.harness.page_cache import drop

MIB = 1024**2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("threads") / "file"
    path.write_bytes(os.urandom(9 * MIB + 123))
    return path


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_bytes_are_the_same(file: Path, count: int) -> None:
    content = file.read_bytes()
    fd = os.open(file, os.O_RDONLY)
    threads = Threads(count)
    shared = 0
    for nbytes in (
        0,
        1,
        LEAST_BYTES,
        2 * LEAST_BYTES - 1,
        2 * LEAST_BYTES,
        3 * LEAST_BYTES + 17,
        8 * MIB + 1,
    ):
        for at in (0, 1, 4097, MIB):
            view = bytearray(nbytes)
            assert threads.preadv(fd, memoryview(view), at) == nbytes
            assert view == content[at : at + nbytes], (nbytes, at)
            shared += nbytes if count > 1 and nbytes >= 2 * LEAST_BYTES else 0
    assert threads.shared_bytes == shared
    threads.close()
    os.close(fd)


@pytest.mark.parametrize("missing", [1, LEAST_BYTES, 3 * LEAST_BYTES, 5 * LEAST_BYTES + 1])
def test_what_ends_early_counts_up_to_the_first_gap(file: Path, missing: int) -> None:
    """The last parts lie behind the end of the file."""
    content = file.read_bytes()
    at = len(content) - 6 * LEAST_BYTES + missing
    view = bytearray(6 * LEAST_BYTES)
    fd = os.open(file, os.O_RDONLY)
    threads = Threads(4)
    done = threads.preadv(fd, memoryview(view), at)
    assert done == 6 * LEAST_BYTES - missing
    assert view[:done] == content[at:]
    threads.close()
    os.close(fd)


def test_a_part_that_is_short_ends_the_count(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may return less than was asked for, anywhere: the reader asks again from there."""
    content, preadv = file.read_bytes(), os.preadv

    def some(fd: int, views: Sequence[memoryview], at: int, flags: int = 0) -> int:
        return preadv(fd, [views[0][: max(1, len(views[0]) // 3)]], at, flags)

    monkeypatch.setattr(os, "preadv", some)
    progress: list[int] = []
    with FileReader(progress.append, threads=3) as reader:
        view = bytearray(8 * MIB)
        reader.read_into(str(file), 77, memoryview(view))
    assert view == content[77 : 77 + 8 * MIB]
    assert sum(progress) == reader.bytes_read == 8 * MIB
    assert len(progress) > 10


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_no_thread_writes_after_a_failure(file: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    preadv, ended = os.preadv, []

    def fails(fd: int, views: Any, at: int, flags: int = 0) -> int:
        if at // (2 * MIB) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.2)
        ended.append(at)
        return preadv(fd, views, at, flags)

    monkeypatch.setattr(os, "preadv", fails)
    with FileReader(threads=3) as reader:
        with pytest.raises(SourceError, match=f"reading {6 * MIB} bytes at 0 failed: Input/output error"):
            reader.read_into(str(file), 0, memoryview(bytearray(6 * MIB)))
        assert len(ended) == 2, "the other parts have ended"


def test_a_file_that_is_too_short_is_named(file: Path) -> None:
    size = file.stat().st_size
    with (
        FileReader(threads=4) as reader,
        pytest.raises(
            IntegrityError, match=f"ends at byte {size}, but {8 * MIB} bytes were expected at {4 * MIB}"
        ),
    ):
        reader.read_into(str(file), 4 * MIB, memoryview(bytearray(8 * MIB)))


@pytest.mark.parametrize("reads", ["auto", "ahead", "plain"])
def test_cold_files(file: Path, reads: Any) -> None:
    content = file.read_bytes()
    drop(file)
    found = bytearray(len(content))
    with FileReader(reads=reads, threads=2) as reader, reader.expecting([(str(file), 0, len(content))]):
        reader.read_into(str(file), 0, memoryview(found))
        assert reader.describe_reads().endswith("; using 2 threads")
    assert found == content


def test_threads_end_with_the_reader(file: Path) -> None:
    def readers() -> int:
        return sum(thread.name.startswith("shardwise-read") for thread in threading.enumerate())

    with FileReader(threads=4) as reader:
        reader.read_into(str(file), 0, memoryview(bytearray(100)))
        assert (readers(), reader.describe_reads()) == (0, "plain: asked for"), "no thread for a small read"
        reader.read_into(str(file), 0, memoryview(bytearray(8 * MIB)))
        assert 1 <= readers() <= 3
        assert reader.describe_reads() == "plain: asked for; using 4 threads"
    assert readers() == 0


@pytest.mark.parametrize(
    ("variables", "cores", "bound", "expected"),
    [
        ({}, 2, 2, 2),
        ({}, 96, 96, MOST_THREADS),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "64"}, 96, 96, MOST_THREADS),
        ({"LOCAL_WORLD_SIZE": "8"}, 24, 24, 3),
        ({"LOCAL_WORLD_SIZE": "8"}, 96, 2, 2),  # bound to two cores
        ({"LOCAL_WORLD_SIZE": "4"}, 2, 2, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 2, 2, 2),
        ({"LOCAL_WORLD_SIZE": "many"}, 2, 2, 2),
    ],
)
def test_as_many_as_there_are_cores_for_a_rank(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cores: int, bound: int, expected: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(bound))
    assert threads_of_this_rank() == expected


@on_ranks(2)
def test_without_a_launcher_all_ranks_may_be_on_this_host() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("LOCAL_WORLD_SIZE")
        patched.setattr(os, "cpu_count", lambda: 6)
        patched.setattr(os, "sched_getaffinity", lambda _: range(6))
        assert threads_of_this_rank() == 3


def test_options() -> None:
    with pytest.raises(ValueError, match="read_threads must be at least 1, got 0"):
        IOOptions(read_threads=0)


def test_without_threads_the_caller_reads_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three threads can't start, while the first one reads. No thread writes into the memory later."""
    content, started, start, preadv = file.read_bytes(), [], threading.Thread.start, os.preadv
    refused = threading.Event()

    def first_alone(thread: threading.Thread) -> None:
        if started:
            refused.set()
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def late(*args: Any) -> int:
        if threading.current_thread() in started:
            assert refused.wait(60)
            time.sleep(0.2)
        return preadv(*args)

    monkeypatch.setattr(threading.Thread, "start", first_alone)
    monkeypatch.setattr(os, "preadv", late)
    fd = os.open(file, os.O_RDONLY)
    threads = Threads(4)
    for _ in range(2):
        view = bytearray(8 * MIB + 1)
        assert threads.preadv(fd, memoryview(view), 5) == len(view)
        assert not started[0].is_alive(), "it may still write"
        assert view == content[5 : 5 + len(view)]
    assert len(started) == 1
    assert threads.shared_bytes == 0
    threads.close()
    os.close(fd)


def test_an_idle_thread_reads_its_part_before_the_caller_reads_all(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread is there from a read before; no other one can start."""
    content, fd = file.read_bytes(), os.open(file, os.O_RDONLY)
    threads = Threads(4)
    assert threads.preadv(fd, memoryview(bytearray(2 * MIB)), 0) == 2 * MIB

    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    for _ in range(2):
        view = bytearray(8 * MIB + 1)
        assert threads.preadv(fd, memoryview(view), 5) == len(view)
        assert view == content[5 : 5 + len(view)]
    assert threads.shared_bytes == 2 * MIB
    threads.close()
    os.close(fd)
