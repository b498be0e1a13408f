"""Files that are written past the page cache: the same bytes as any, and every error."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import CheckpointError
from shardwise.publish import write as direct
from shardwise.publish.write import DirectWriter, FileFiller
from tests.harness.open_files import open_below

BUFFER = 3 * 4096


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BUFFER_BYTES", BUFFER)


def no_thread_is_left() -> bool:
    """The thread has said that it is done; it may still have to return."""
    for thread in threading.enumerate():
        if thread.name == "shardwise-write":
            thread.join(60)
            if thread.is_alive():
                return False
    return True


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [4096],
        [BUFFER],
        [BUFFER, 1],
        [BUFFER + 1],
        [100_001],
        [7, 4095, 3, 50_000, 2],
        [BUFFER] * 4,
    ],
    ids=str,
)
@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "buffered"])
def test_bytes_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], is_direct: bool
) -> None:
    if not is_direct:
        monkeypatch.setattr(direct, "_O_DIRECT", 0)
    pieces = [os.urandom(n) for n in sizes]
    told: list[int] = []
    with DirectWriter(str(tmp_path / "file"), told.append) as file:
        for piece in pieces:
            file.write(piece)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert file.nbytes == sum(told) == sum(sizes)
    assert no_thread_is_left()


def test_goes_past_the_page_cache_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks with O_DIRECT, from aligned memory; only the end of the file without."""
    seen: list[tuple[bool, int]] = []
    own = os.write

    def write(fd: int, data: Any) -> int:
        seen.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return own(fd, data)

    monkeypatch.setattr(os, "write", write)
    with DirectWriter(str(tmp_path / "file")) as file:
        file.write(bytes(BUFFER + 5000))
    if not seen[0][0]:
        pytest.skip("the file system of the temporary directory takes no O_DIRECT")
    assert seen == [(True, BUFFER), (True, 4096), (False, 5000 - 4096)]


def failing(at: int, code: int) -> Callable[..., int]:
    own, calls = os.write, []

    def write(fd: int, data: Any) -> int:
        calls.append(fd)
        if len(calls) == at:
            raise OSError(code, os.strerror(code))
        return own(fd, data)

    return write


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_error_of_the_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(os, "write", failing(at, errno.ENOSPC))
    with (
        pytest.raises(CheckpointError, match=f"file: write failed after {(at - 1) * BUFFER} bytes: No space"),
        DirectWriter(str(tmp_path / "file")) as file,
    ):
        file.write(bytes(5 * BUFFER))
    assert no_thread_is_left()
    assert open_below(tmp_path) == []


@pytest.mark.parametrize("at", [1, 3])
def test_blocks_that_the_system_refuses_are_written_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(os, "write", failing(at, errno.EINVAL))
    content = os.urandom(4 * BUFFER)
    with DirectWriter(str(tmp_path / "file")) as file:
        file.write(content)
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("took", [1, 4096, 5000])
def test_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took: int) -> None:
    own = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: own(fd, data[:took]))
    content = os.urandom(2 * BUFFER + 77)
    with DirectWriter(str(tmp_path / "file")) as file:
        file.write(content)
    assert (tmp_path / "file").read_bytes() == content


def test_what_the_caller_raises_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)

    def raise_amid_writing() -> None:
        with DirectWriter(str(tmp_path / "file")) as file:
            file.write(bytes(3 * BUFFER))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        raise_amid_writing()
    assert synced == []
    assert no_thread_is_left()


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with (
        pytest.raises(CheckpointError, match="can't be created: File exists"),
        DirectWriter(str(tmp_path / "file")),
    ):
        pass
    assert (tmp_path / "file").read_bytes() == b"old"
    assert no_thread_is_left()


def test_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a process, from Python 3.12 on, where a save that goes on behind is still written."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    content = os.urandom(3 * BUFFER + 5)
    with DirectWriter(str(tmp_path / "file")) as file:
        file.write(content)
    assert (tmp_path / "file").read_bytes() == content
    monkeypatch.setattr(os, "write", failing(2, errno.ENOSPC))
    with pytest.raises(CheckpointError, match="No space"), DirectWriter(str(tmp_path / "full")) as file:
        file.write(content)


# --- files that several ranks fill -----------------------------------------------------------------------


@pytest.fixture
def whole_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each write past the page cache, of fills that have two blocks or more."""
    monkeypatch.setattr(direct, "_LEAST_DIRECT_BYTES", 1)
    seen: list[int] = []
    own = os.pwrite

    def pwrite(fd: int, data: Any, at: int) -> int:
        count = own(fd, data, at)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            assert at % 4096 == 0
            seen.append(count)
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    return seen


def fill_in_turns(folder: Path, content: bytes, seed: int) -> int:
    """Two fillers write the ranges of a file in turns, in any order; returns how many bytes they say they wrote."""
    draw = random.Random(seed)
    cuts = sorted({0, len(content), *(draw.randrange(len(content)) for _ in range(draw.randrange(12)))})
    ranges = list(pairwise(cuts))
    draw.shuffle(ranges)
    (folder / "file").touch()
    os.truncate(folder / "file", len(content))
    told: list[int] = []
    fillers = [FileFiller(str(folder), told.append) for _ in range(2)]
    with fillers[0], fillers[1]:
        for k, (start, stop) in enumerate(ranges):
            fillers[k % 2].write_at("file", start, memoryview(content)[start:stop])
    assert sum(told) == sum(filler.bytes_written for filler in fillers)
    return sum(told)


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "buffered"])
def test_ranges_that_share_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_blocks: list[int], is_direct: bool
) -> None:
    """Ranges that begin and end anywhere leave each other's bytes alone, whichever way each of their blocks is written."""
    if not is_direct:
        monkeypatch.setattr(direct, "_O_DIRECT", 0)
    for seed in range(60):
        content = random.Random(seed).randbytes(20 * 4096 + seed)
        assert fill_in_turns(tmp_path, content, seed) == len(content)
        assert (tmp_path / "file").read_bytes() == content
        (tmp_path / "file").unlink()
    if is_direct and not whole_blocks:
        pytest.skip("the file system of the temporary directory takes no O_DIRECT")
    assert (sum(whole_blocks) > 30 * 20 * 4096) is is_direct
    assert set(whole_blocks) <= {4096, 2 * 4096, BUFFER}


@pytest.mark.parametrize(("code", "named"), [(errno.EINVAL, ""), (errno.ENOSPC, "No space")])
def test_blocks_that_can_not_be_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_blocks: list[int], code: int, named: str
) -> None:
    """What refuses only the way is written the other way; anything else is an error."""
    own = os.pwrite

    def pwrite(fd: int, data: Any, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and at > BUFFER:
            raise OSError(code, os.strerror(code))
        return own(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    content = os.urandom(5 * BUFFER + 3)
    if named:
        with pytest.raises(CheckpointError, match=f"file: write failed: {named}"):
            fill_in_turns(tmp_path, content, 0)
    else:
        assert fill_in_turns(tmp_path, content, 0) == len(content)
        assert (tmp_path / "file").read_bytes() == content
    assert open_below(tmp_path) == []


@pytest.mark.parametrize("took", [1000, 4096, 5000])
def test_short_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_blocks: list[int], took: int
) -> None:
    own = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: own(fd, data[: took // 512 * 512], at))
    content = os.urandom(2 * BUFFER + 77)
    assert fill_in_turns(tmp_path, content, 1) == len(content)
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("block", [1024**2, 3 * 4096, 5 * 4096])
def test_blocks_of_network_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_blocks: list[int], block: int
) -> None:
    """Whole ones of theirs alone, since a client may read the rest of one to write a part."""
    monkeypatch.setattr(direct, "_block_bytes", lambda fd: 0 if BUFFER % block else block)
    content = os.urandom(40 * 4096)
    for seed in range(10):
        fill_in_turns(tmp_path, content, seed)
        assert (tmp_path / "file").read_bytes() == content
    assert set(whole_blocks) <= ({block} if BUFFER % block == 0 else set())


def test_small_ranges_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also ranges of two bytes, and empty ones."""
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 100_000)
    with FileFiller(str(tmp_path)) as filler:
        for at in range(0, 100_000, 2):
            filler.write_at("file", at, memoryview(at.to_bytes(4, "little")[:2]))
            filler.write_at("file", at, memoryview(b""))
            assert len(filler._small) <= BUFFER // 256 + 1
    expected = b"".join(at.to_bytes(4, "little")[:2] for at in range(0, 100_000, 2))
    assert (tmp_path / "file").read_bytes() == expected


def test_few_files_are_open_at_once(tmp_path: Path, whole_blocks: list[int]) -> None:
    """One descriptor for each file, and one more."""
    names = [f"file-{k}" for k in range(20)]
    with FileFiller(str(tmp_path)) as filler:
        for name in names:
            (tmp_path / name).touch()
            os.truncate(tmp_path / name, 3 * BUFFER)
            filler.write_at(name, 0, memoryview(bytes(3 * BUFFER)))
        assert len(open_below(tmp_path)) <= len(names) + 1
    assert open_below(tmp_path) == []


def fill_some(folder: Path) -> None:
    (folder / "file").touch()
    with FileFiller(str(folder)) as filler:
        filler.write_at("file", 0, memoryview(bytes(BUFFER)))


def write_some(folder: Path) -> None:
    with DirectWriter(str(folder / "file")) as file:
        file.write(bytes(BUFFER))


@pytest.mark.parametrize("work", [fill_some, write_some])
def test_an_interrupt_of_the_last_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_blocks: list[int], work: Callable[[Path], None]
) -> None:
    """What the thread is still writing goes to no other file, though one may be opened at once."""
    ends = [threading.Event()]
    goes_on = threading.Event()
    own_write, own_pwrite, own_wait = os.write, os.pwrite, threading.Event.wait

    def held(own: Callable[..., int]) -> Callable[..., int]:
        def write(*args: Any) -> int:
            if threading.current_thread().name == "shardwise-write":
                own_wait(goes_on, 60)
            return own(*args)

        return write

    def wait(event: threading.Event, timeout: float | None = None) -> bool:
        if sys._getframe(1).f_code.co_name == "close":
            ends[0] = event
            raise KeyboardInterrupt
        return own_wait(event, timeout)

    monkeypatch.setattr(os, "write", held(own_write))
    monkeypatch.setattr(os, "pwrite", held(own_pwrite))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            work(tmp_path)
    victims = [os.open(tmp_path / f"victim-{k}", os.O_WRONLY | os.O_CREAT) for k in range(8)]
    goes_on.set()
    assert ends[0].wait(60)
    assert [os.fstat(fd).st_size for fd in victims] == [0] * 8
    for fd in victims:
        os.close(fd)
