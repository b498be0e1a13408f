"""Look-ahead asks the kernel for the right ranges, in order and not too far ahead; the bytes are the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise import IOOptions
from shardwise.engine import files as ahead
from shardwise.engine.engine import spans_of
from shardwise.engine.files import AHEAD_BYTES, GAP_BYTES, STEP_BYTES, FileReader, LookAhead, Quicker, steps
from shardwise.errors import IntegrityError, SourceError
from shardwise.planning.plan import StridedLoop, Transfer
from shardwise.planning.proof import Span
from tests.harness.page_cache import cached_bytes, drop, drops_pages, held

MIB = 1024**2


@st.composite
def spans(draw: st.DrawFn, most_bytes: int = 4 * STEP_BYTES) -> list[Span]:
    """Of a few files; mostly forward, with gaps of all lengths, sometimes back."""
    found: list[Span] = []
    for file in range(draw(st.integers(1, 3))):
        at = 0
        for _ in range(draw(st.integers(0, 8))):
            at = max(0, at + draw(st.sampled_from((0, 1, GAP_BYTES, GAP_BYTES + 1, MIB, -1, -STEP_BYTES))))
            nbytes = draw(st.sampled_from((1, 100, STEP_BYTES - 1, STEP_BYTES)) | st.integers(1, most_bytes))
            found.append((f"file {file}", at, at + nbytes))
            at += nbytes
    return found


def pages(all_spans: Sequence[Span]) -> set[tuple[str, int]]:
    """The hundreds of bytes that spans touch."""
    return {(path, k) for path, start, stop in all_spans for k in range(start // 100, -(-stop // 100))}


def short_gaps(all_spans: Sequence[Span]) -> list[Span]:
    """Bytes of a file between two spans, if there are few of them."""
    found, reached = [], ("", 0)
    for path, start, stop in sorted(all_spans):
        if path == reached[0] and 0 < start - reached[1] <= GAP_BYTES:
            found.append((path, reached[1], start))
        reached = (path, max(stop, reached[1]) if path == reached[0] else stop)
    return found


@given(spans())
@example([("file", 0, 2), ("file", 0, 1), ("file", 2 + GAP_BYTES, 3 + GAP_BYTES)])
def test_steps_hold_the_spans_and_at_most_the_short_gaps_between(wanted: list[Span]) -> None:
    found = list(steps(wanted))
    assert all(0 < stop - start <= STEP_BYTES for _, start, stop in found)
    assert pages(wanted) <= pages(found)
    assert pages(found) <= pages(wanted) | pages(short_gaps(wanted))


@given(
    spans(),
    st.sampled_from((STEP_BYTES // 3, STEP_BYTES, 3 * STEP_BYTES)),
    st.sampled_from((1, STEP_BYTES, 5 * STEP_BYTES)),
    st.data(),
)
def test_what_is_read_was_asked_for_once_and_in_order(
    wanted: list[Span], piece_bytes: int, limit: int, data: st.DataObject
) -> None:
    """A reader that begins anywhere: each of its reads begins in what was asked for."""
    first = data.draw(st.integers(0, max(0, len(wanted) - 1)))
    asked: list[Span] = []
    with patch.object(ahead, "AHEAD_BYTES", limit):
        look = LookAhead(iter(wanted), lambda *span: asked.append(span))
        for path, start, stop in wanted[first:]:
            for at in range(start, stop, piece_bytes):
                look.reading(path, at)
                assert any(p == path and a <= at < b for p, a, b in asked)
    every = steps(wanted)
    assert all(span in every for span in asked), "each step once, in their order"


def test_it_stays_within_its_limit() -> None:
    asked: list[Span] = []
    look = LookAhead([("x", 0, 1024 * MIB)], lambda *span: asked.append(span))
    for at in (0, 1, MIB, 100 * MIB, 100 * MIB + 1, 1000 * MIB, 1024 * MIB - 1):
        look.reading("x", at)
        asked_to = asked[-1][2]
        assert min(at + AHEAD_BYTES - STEP_BYTES, 1024 * MIB) <= asked_to <= at + AHEAD_BYTES + STEP_BYTES


def test_an_unexpected_read_asks_for_nothing() -> None:
    asked: list[Span] = []
    look = LookAhead([("x", 0, MIB)], lambda *span: asked.append(span))
    look.reading("y", 0)
    look.reading("x", 0)
    assert not asked


def transfer(offset_bytes: int, *loops: tuple[int, int]) -> Transfer:
    return Transfer(
        "w", "s", "x", offset_bytes, "F32", "F32", 0, tuple(StridedLoop(n, k, 1) for n, k in loops)
    )


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (transfer(8, (1000, 1)), [(8, 4008)]),
        (transfer(8), [(8, 12)]),
        (transfer(0, (3, 2000), (1000, 1)), [(0, 20000)]),  # gaps of 4 KB
        (transfer(0, (3, 100_000), (1000, 1)), [(0, 4000), (400_000, 404_000), (800_000, 804_000)]),
        (transfer(0, (2, 100_000), (2, 2000), (1000, 1)), [(0, 12000), (400_000, 412_000)]),
        (transfer(0, (3, 100_000), (10, 1)), [(0, 800_040)]),  # so short that the span is read whole
    ],
)
def test_spans_of_a_transfer(given_: Transfer, expected: list[tuple[int, int]]) -> None:
    assert list(spans_of([given_])) == [("x", start, stop) for start, stop in expected]


def test_the_quicker_way_goes_on() -> None:
    """Seconds for each MiB, by way; and for a while after a change, what the other way has fetched."""
    choice, seconds = Quicker(), {"ahead": 1.0, "plain": 3.0}
    used: dict[str, int] = {"ahead": 0, "plain": 0}

    def read_mib(count: int) -> None:
        for _ in range(count):
            used[choice.kind] += 1
            choice.took(MIB, seconds[choice.kind])

    assert choice.describe() == ""
    read_mib(1000)
    assert choice.kind == "ahead"
    assert used["plain"] == 48, "32 MiB that were asked for before, 16 MiB that are timed"
    assert choice.describe() == "; plain took 3.00 times as long"
    seconds["ahead"] = 4.0
    read_mib(100)
    assert choice.kind == "plain"
    assert choice.describe() == "; ahead took 1.33 times as long"


def test_the_first_bytes_after_a_change_do_not_count() -> None:
    choice = Quicker()
    choice.took(AHEAD_BYTES, 1000.0)
    choice.took(16 * MIB, 16.0)
    assert choice.kind == "plain"
    choice.took(AHEAD_BYTES, 0.0)
    choice.took(16 * MIB, 32.0)
    assert choice.kind == "ahead"
    assert choice.describe() == "; plain took 2.00 times as long"


# --- real files -------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """48 MiB that are not in the page cache."""
    if not drops_pages(tmp_path):
        pytest.skip("files in the temporary directory can't leave the page cache")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(48 * MIB))
    drop(path)
    return path


def read(reader: FileReader, wanted: Sequence[Span]) -> bytes:
    """The spans, each by one read."""
    found = bytearray()
    with reader.expecting(wanted):
        for path, start, stop in wanted:
            part = bytearray(stop - start)
            reader.read_into(path, start, memoryview(part))
            found += part
    return bytes(found)


@pytest.mark.parametrize("reads", ["auto", "ahead", "plain"])
def test_cold_bytes_are_the_same(file: Path, reads: Any) -> None:
    wanted = [(str(file), start, min(start + 1_234_567, 48 * MIB)) for start in range(0, 48 * MIB, 1_234_567)]
    with FileReader(reads=reads) as reader:
        found = read(reader, wanted)
    assert found == file.read_bytes()
    expected = {
        "auto": "some bytes weren't in the page cache, starting at byte 0 of the load",
        "ahead": "asked for",
        "plain": "asked for",
    }
    kind, _, reason = reader.describe_reads().partition(": ")
    assert kind in (("ahead", "plain") if reads == "auto" else (reads,))
    assert reason.partition(";")[0] == expected[reads]


def test_cached_bytes_are_read_without_advice(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = file.read_bytes()
    asked: list[int] = []
    advise = os.posix_fadvise
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, at, n, kind: (asked.append(kind), advise(fd, at, n, kind))
    )
    with held(file, 4 * MIB), FileReader(reads="auto") as reader:
        asked.clear()
        assert read(reader, [(str(file), 0, 4 * MIB)]) == content[: 4 * MIB]
    assert reader.describe_reads() == "plain: all bytes were in the page cache"
    assert os.POSIX_FADV_WILLNEED not in asked


def test_it_begins_where_the_cache_ends(file: Path) -> None:
    content = file.read_bytes()
    drop(file)
    with held(file, 4 * MIB), FileReader(reads="auto") as reader:
        assert read(reader, [(str(file), k * MIB, (k + 1) * MIB) for k in range(48)]) == content
    assert (
        reader.describe_reads()
        == f"ahead: some bytes weren't in the page cache, starting at byte {4 * MIB} of the load"
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that the kernel is asked for, as they come. (The process's own counter of storage also counts pages of its
    code that the system had dropped.)"""
    found: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def noted(fd: int, start: int, nbytes: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            found.append((start, start + nbytes))
        advise(fd, start, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    return found


def test_nothing_is_read_that_is_not_wanted(file: Path, asked: list[tuple[int, int]]) -> None:
    """64 KiB of each MiB."""
    wanted = [(start, start + MIB // 16) for start in range(0, 48 * MIB, MIB)]
    with FileReader(reads="ahead") as reader:
        read(reader, [(str(file), *span) for span in wanted])
    assert asked == wanted
    assert cached_bytes(file) <= 1.02 * 3 * MIB


def test_it_asks_ahead_of_the_reader(file: Path, asked: list[tuple[int, int]]) -> None:
    """While the first bytes are read, the next 32 MiB are on their way, and not the whole file."""
    with FileReader(reads="ahead") as reader, reader.expecting([(str(file), 0, 48 * MIB)]):
        reader.read_into(str(file), 0, memoryview(bytearray(4096)))
        assert asked == [(start, start + STEP_BYTES) for start in range(0, AHEAD_BYTES, STEP_BYTES)]
        assert cached_bytes(file) <= AHEAD_BYTES + 2 * MIB


def test_pages_are_given_back_although_asked_for(file: Path) -> None:
    wanted = [(str(file), start, start + MIB) for start in range(0, 48 * MIB, MIB)]
    with FileReader(reads="ahead", page_cache="release") as reader:
        read(reader, wanted)
        assert cached_bytes(file) >= MIB
    assert cached_bytes(file) == 0
    with FileReader(reads="ahead", page_cache="release") as reader:
        read(reader, wanted[:1])
    assert cached_bytes(file) == 0


def test_files_that_are_closed_on_the_way(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking opens the next files, and may close the one that is read."""
    monkeypatch.setattr("shardwise.engine.files._MOST_OPEN", 1)
    names = [file.with_name(f"file-{k}") for k in range(6)]
    for name in names:
        name.write_bytes(os.urandom(MIB + 7))
    drop(*names)
    wanted = [(str(name), start, start + MIB // 2) for name in names for start in (7, 7 + MIB // 2)]
    with FileReader(reads="auto") as reader:
        found = read(reader, wanted)
    assert found == b"".join(name.read_bytes()[7:] for name in names)


def test_errors_are_those_of_the_read(file: Path, tmp_path: Path) -> None:
    """A file that is lost or short is named when its turn comes, not while others are read."""
    short, lost = tmp_path / "short", tmp_path / "gone"
    short.write_bytes(bytes(1000))
    drop(short)
    wanted = [(str(file), 0, MIB), (str(short), 500, 1500), (str(lost), 0, 10)]
    with FileReader(reads="auto") as reader, reader.expecting(wanted):
        reader.read_into(str(file), 0, memoryview(bytearray(MIB)))
        text = "short: ends at byte 1000, but 1000 bytes were expected at 500: truncated"
        with pytest.raises(IntegrityError, match=text):
            reader.read_into(str(short), 500, memoryview(bytearray(1000)))
        with pytest.raises(IntegrityError, match="gone: lost: no such file"):
            reader.read_into(str(lost), 0, memoryview(bytearray(10)))


@pytest.mark.parametrize("reads", ["auto", "ahead"])
def test_a_disk_that_fails(file: Path, monkeypatch: pytest.MonkeyPatch, reads: Any) -> None:
    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "posix_fadvise", fail)
    with (
        FileReader(reads=reads) as reader,
        pytest.raises(SourceError, match="reading 10 bytes at 5 failed: Input/output error"),
    ):
        read(reader, [(str(file), 5, 15)])


def test_a_file_system_that_always_waits(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RWF_NOWAIT nothing says what is cached: the kernel is asked for everything."""
    preadv = os.preadv

    def waits(fd: int, views: Any, at: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", waits)
    with FileReader(reads="auto") as reader:
        assert read(reader, [(str(file), 0, 48 * MIB)]) == file.read_bytes()
    assert ": the file system does not say what is in the page cache" in reader.describe_reads()


def test_blocks_in_blocks(file: Path, asked: list[tuple[int, int]]) -> None:
    """A conversion reads its sources in the middle of a plan; then the plan goes on."""
    wanted = [(str(file), k * MIB, (k + 1) * MIB) for k in range(4)]
    with FileReader(reads="ahead") as reader, reader.expecting(wanted):
        view = memoryview(bytearray(MIB))
        reader.read_into(*wanted[0][:2], view)
        assert (asked[0][0], asked[-1][1], sum(b - a for a, b in asked)) == (0, 4 * MIB, 4 * MIB)
        before = len(asked)
        read(reader, [(str(file), 40 * MIB, 41 * MIB)])
        assert (asked[before][0], asked[-1][1]) == (40 * MIB, 41 * MIB)
        before = len(asked)
        for path, start, _ in wanted[1:]:
            reader.read_into(path, start, view)
    assert len(asked) == before, "nothing is asked for twice"
    assert reader.bytes_read == 5 * MIB


def test_reads_that_no_block_expects_are_plain(file: Path) -> None:
    with FileReader(reads="auto") as reader:
        reader.read_into(str(file), 0, memoryview(bytearray(MIB)))
    assert reader.describe_reads() == "plain: all bytes were in the page cache"


def test_options() -> None:
    with pytest.raises(ValueError, match="reads must be 'auto', 'ahead' or 'plain', got 'direct'"):
        IOOptions(reads="direct")  # type: ignore[arg-type]
    assert IOOptions().reads == "auto"
