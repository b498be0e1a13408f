"""The parts of the memory tier: units that prove themselves, hosts that copy from each other, and what one host reads of another."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from shardwise.engine.files import FileReader, arriving
from shardwise.errors import CheckpointError, FormatError, IntegrityError
from shardwise.format.manifest import BLOCK_BYTES, FileEntry, units_of
from shardwise.publish.hosts import (
    Reader,
    RemoteFiles,
    Server,
    are_all,
    copy_units,
    proved_units,
    runs_of,
)
from shardwise.publish.ring import Maps, Ring, copy_tensors
from shardwise.publish.sites import Sites

HEADER, LAST = 100, 1000
NBYTES = HEADER + BLOCK_BYTES + LAST


@pytest.fixture(name="content", scope="module")
def _content() -> bytes:
    return random.Random(0).randbytes(NBYTES)


@pytest.fixture(name="entry", scope="module")
def _entry(content: bytes) -> FileEntry:
    parts = (content[:HEADER], content[HEADER : HEADER + BLOCK_BYTES], content[HEADER + BLOCK_BYTES :])
    header, *blocks = map(xxhash.xxh3_64_hexdigest, parts)
    return FileEntry(NBYTES, HEADER, header, tuple(blocks))


@pytest.mark.parametrize("blocks", [(), ("0" * 16,) * 3])
def test_a_manifest_with_other_checksums_than_blocks_proves_nothing(
    tmp_path: Path, content: bytes, entry: FileEntry, blocks: tuple[str, ...]
) -> None:
    file = tmp_path / "slices"
    file.write_bytes(content)
    wrong = replace(entry, blocks=blocks)
    assert proved_units(str(file), wrong, lambda: None) == []
    with pytest.raises(
        FormatError, match=rf"slices: the manifest has {len(blocks)} block checksums, expected 2"
    ):
        units_of(wrong, path="slices")
    with pytest.raises(FormatError, match="expected 274877906944"):
        units_of(replace(entry, nbytes=2**62))


@pytest.mark.parametrize(
    ("at", "proved"),
    [
        (0, [1, 2]),
        (HEADER - 1, [1, 2]),
        (HEADER, [0, 2]),
        (HEADER + BLOCK_BYTES, [0, 1]),
        (NBYTES - 1, [0, 1]),
    ],
)
def test_a_flipped_bit_takes_the_proof_of_its_unit_alone(
    tmp_path: Path, content: bytes, entry: FileEntry, at: int, proved: list[int]
) -> None:
    file = tmp_path / "slices"
    file.write_bytes(content)
    assert proved_units(str(file), entry, lambda: None) == [0, 1, 2]
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([content[at] ^ 16]))
    assert proved_units(str(file), entry, lambda: None) == proved


def test_nothing_of_a_file_that_is_lost_or_has_another_size(
    tmp_path: Path, content: bytes, entry: FileEntry
) -> None:
    for name, found in (("short", content[:-1]), ("long", content + b"\0"), ("empty", b"")):
        (tmp_path / name).write_bytes(found)
        assert proved_units(str(tmp_path / name), entry, lambda: None) == []
    assert proved_units(str(tmp_path / "lost"), entry, lambda: None) == []


@pytest.mark.parametrize("numbers", [c for n in range(6) for c in itertools.combinations(range(5), n)])
def test_units_in_runs(numbers: tuple[int, ...]) -> None:
    runs = runs_of(numbers)
    assert [n for first, stop in runs for n in range(first, stop)] == [*numbers]
    assert len(runs) == sum(n - 1 not in numbers for n in numbers)
    others = runs_of(n for n in range(5) if n not in numbers)
    assert are_all([*reversed(runs), *others], 5)
    assert are_all(runs, 5) == (len(numbers) == 5)
    assert are_all([*runs, [0, 1], [0, 4]], 5) == (4 in numbers)


@pytest.mark.parametrize("hosts", ["abcd", "aabb", "aabbb", "abab"])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_each_slice_lies_on_as_many_hosts_as_there_are_copies(hosts: str, copies: int) -> None:
    places = Sites.of_hosts(hosts, 0)
    for rank, host in enumerate(hosts):
        others = [hosts[one] for one in places.holders_of(rank, copies)]
        assert len({host, *others}) == min(copies, len(set(hosts))) == 1 + len(others)
        assert {one for one in range(len(hosts)) if rank in places.sources_of(one, copies)} == set(
            places.holders_of(rank, copies)
        )


@pytest.fixture(name="ring")
def _ring(tmp_path: Path, content: bytes) -> Ring:
    ring = Ring(str(tmp_path), "run")
    (Path(ring.path) / "own-0").mkdir()
    (Path(ring.path) / "own-0" / "slices").write_bytes(content)
    (Path(ring.path) / "lines").write_text("secret")
    return ring


@pytest.fixture(name="server")
def _server(ring: Ring) -> Iterator[Server]:
    with closing(Server(ring, b"word", "127.0.0.1", 5.0)) as server:
        yield server


def _reader(server: Server, secret: bytes) -> closing[Reader]:
    return closing(Reader("there", "127.0.0.1", server.port, secret, 5.0))


def test_units_come_over_the_wire_and_damage_is_found_when_they_arrive(
    tmp_path: Path, ring: Ring, server: Server, content: bytes, entry: FileEntry
) -> None:
    here = tmp_path / "here"
    here.write_bytes(bytes(NBYTES))
    with _reader(server, b"word") as reader:
        copy_units(reader, "own-0/slices", units_of(entry), str(here), lambda: None)
        assert here.read_bytes() == content
        with (Path(ring.path) / "own-0" / "slices").open("r+b") as opened:
            opened.seek(HEADER + 5)
            opened.write(bytes([content[HEADER + 5] ^ 1]))
        with pytest.raises(
            IntegrityError, match=f"bytes {HEADER} to {HEADER + BLOCK_BYTES} arrived corrupted"
        ):
            copy_units(reader, "own-0/slices", units_of(entry), str(here), lambda: None)
        assert proved_units(str(here), entry, lambda: None) == [0, 2]


def test_a_unit_comes_in_small_pieces_and_the_rest_of_an_unwanted_one_is_lost(
    server: Server, content: bytes
) -> None:
    with _reader(server, b"word") as reader:
        found = [bytes(piece) for piece in reader.pieces("own-0/slices", HEADER, BLOCK_BYTES)]
        assert max(map(len, found)) == 256 * 1024
        assert b"".join(found) == content[HEADER : HEADER + BLOCK_BYTES]
        next(reader.pieces("own-0/slices", 0, BLOCK_BYTES))
        assert b"".join(map(bytes, reader.pieces("own-0/slices", 50, 100))) == content[50:150]


def test_a_unit_that_arrives_damaged_once_is_read_again(
    tmp_path: Path, server: Server, content: bytes, entry: FileEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.write_bytes(bytes(NBYTES))
    pieces, calls = Reader.pieces, 0

    def garbled_once(self: Reader, name: str, start: int, nbytes: int) -> Iterator[memoryview]:
        nonlocal calls
        calls += 1
        for piece in pieces(self, name, start, nbytes):
            if calls == 2:
                piece[0] ^= 1
            yield piece

    monkeypatch.setattr(Reader, "pieces", garbled_once)
    with _reader(server, b"word") as reader:
        copy_units(reader, "own-0/slices", units_of(entry), str(here), lambda: None)
    assert here.read_bytes() == content
    assert calls == len(units_of(entry)) + 1


def test_a_stranger_reads_nothing(server: Server) -> None:
    with (
        _reader(server, b"another word") as stranger,
        pytest.raises(CheckpointError, match="host there"),
    ):
        stranger.read_whole("own-0/slices")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5.0) as link:
        assert len(link.recv(16)) == 16
        link.sendall(bytes(32 + 16))  # no proof, and no wish for the server's
        assert link.recv(1) == b""
    with _reader(server, b"word") as reader:
        for name in ("lines", "own-0/../lines", "../run", "/etc/hostname", "own-0/lost"):
            with pytest.raises(CheckpointError, match="doesn't have"):
                reader.read_whole(name)
        assert len(reader.read_whole("own-0/slices")) == NBYTES
    server.close()
    with _reader(server, b"word") as late, pytest.raises(CheckpointError, match="host there"):
        late.read_whole("own-0/slices")


def _bytes(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def test_a_slot_stays_mapped_and_a_new_file_is_mapped_anew(ring: Ring) -> None:
    maps, slot = Maps(), ring.slot("own-1")
    first = maps.of(slot, {"a": 10, "b": 20})
    assert copy_tensors([(_bytes(b"0123456789"), first["a"], 0)]) == 10
    assert (Path(slot.path) / "a").read_bytes() == b"0123456789"
    again = maps.of(slot, {"a": 10, "b": 30})
    assert again["a"].data_ptr() == first["a"].data_ptr()
    assert again["b"].numel() == 30
    (Path(slot.path) / "a").unlink()
    copy_tensors([(_bytes(b"aXbXc")[::2], maps.of(slot, {"a": 10})["a"], 4)])
    assert (Path(slot.path) / "a").read_bytes() == b"\0\0\0\0abc\0\0\0"


def test_bytes_come_from_elsewhere_or_from_the_file(tmp_path: Path) -> None:
    file, asked = tmp_path / "slices", []
    file.write_bytes(bytes(range(100)))

    def arrive(path: str, start: int, view: memoryview) -> bool:
        asked.append((path, start, view.nbytes))
        if start < 50:
            view[:] = bytes(range(200, 200 + view.nbytes))
        return start < 50

    told: list[int] = []
    found = memoryview(bytearray(10))
    with arriving(arrive), FileReader(told.append) as reader:
        reader.read_into(str(file), 20, found)
        assert bytes(found) == bytes(range(200, 210))
        reader.read_into(str(file), 60, found)
        assert bytes(found) == bytes(range(60, 70))
        assert (reader.bytes_read, sum(told)) == (20, 20)
        assert reader.describe_reads() == "plain: asked for; 10 bytes from other hosts"
    assert asked == [(str(file), 20, 10), (str(file), 60, 10)]
    with FileReader() as reader:
        reader.read_into(str(file), 0, found)
    assert bytes(found) == bytes(range(10))
    assert len(asked) == 2, "only readers that are made in the block ask"


@pytest.fixture(name="servers")
def _servers(tmp_path: Path, content: bytes) -> Iterator[list[Server]]:
    """Two hosts with the same file. The last byte of all is damaged at the first one."""
    with ExitStack() as opened:
        found = []
        for number in range(2):
            ring = Ring(str(tmp_path), f"host-{number}")
            (Path(ring.path) / "own-0").mkdir()
            damaged = content[:-1] + bytes([content[-1] ^ 1]) if number == 0 else content
            (Path(ring.path) / "own-0" / "slices").write_bytes(damaged)
            found.append(opened.enter_context(closing(Server(ring, b"word", "127.0.0.1", 5.0))))
        yield found


def _remote(
    servers: list[Server],
    entry: FileEntry,
    holders: Sequence[int] = (0, 1),
    on_progress: Callable[[], object] = lambda: None,
) -> RemoteFiles:
    def reader_of(rank: int) -> Reader:
        return Reader(f"host-{rank}", "127.0.0.1", servers[rank].port, b"word", 5.0)

    holdings = {"slices": [(rank, "own-0", [[0, 3]]) for rank in holders]}
    return RemoteFiles({"slices": entry}, holdings, reader_of, on_progress)


def test_a_file_is_read_from_its_holders(servers: list[Server], content: bytes, entry: FileEntry) -> None:
    told: list[int] = []
    files = _remote(servers, entry, holders=(1, 0), on_progress=lambda: told.append(1))
    found = memoryview(bytearray(NBYTES))
    step = 3 * 1024**2
    for at in range(0, NBYTES, step):
        files.read_into("slices", at, found[at : at + step])
    assert bytes(found) == content
    assert files.taken == {1: NBYTES}, "each unit came once"
    assert len(told) == 3 + NBYTES // step, "progress after each part of a unit"
    files.read_into("slices", NBYTES, found[:0])
    with pytest.raises(IntegrityError, match=f"ends before byte {NBYTES + 1}: truncated"):
        files.read_into("slices", NBYTES - 5, found[:6])
    for at, nbytes in ((HEADER + 5, 1), (HEADER + BLOCK_BYTES - 2, 2), (HEADER - 1, 3)):
        part = memoryview(bytearray(nbytes))
        files.read_into("slices", at, part)
        assert bytes(part) == content[at : at + nbytes]


def test_short_reads_come_alone_until_there_are_many(
    servers: list[Server], content: bytes, entry: FileEntry
) -> None:
    files, part = _remote(servers, entry), memoryview(bytearray(10))
    for turn in range(20):
        files.read_into("slices", HEADER + 1000 * turn, part)
        assert bytes(part) == content[HEADER + 1000 * turn :][:10]
        assert files.taken[0] == (10 * (turn + 1) if turn < 8 else 80 + BLOCK_BYTES)
    files.close()
    files.read_into("slices", HEADER, part)
    assert bytes(part) == content[HEADER:][:10]
    files, half = _remote(servers, entry), memoryview(bytearray(512 * 1024))
    for turn in range(3):
        files.read_into("slices", HEADER, half)
        assert files.taken[0] == (half.nbytes * (turn + 1) if turn < 2 else 2 * half.nbytes + BLOCK_BYTES)


def test_a_unit_that_arrives_damaged_comes_from_the_next_holder(
    servers: list[Server], content: bytes, entry: FileEntry
) -> None:
    files, part = _remote(servers, entry), memoryview(bytearray(LAST))
    for _ in range(8):  # the holder had proved the unit, and says what it sends now
        files.read_into("slices", NBYTES - 1, part[:1])
    files.read_into("slices", NBYTES - LAST, part)
    assert bytes(part) == content[-LAST:]
    assert files.taken[1] == LAST
    files, large = _remote(servers, entry, holders=(0,)), memoryview(bytearray(2_000_000))
    files.read_into("slices", HEADER, large)
    for _ in range(8):
        files.read_into("slices", NBYTES - 1, part[:1])
    with pytest.raises(IntegrityError, match=f"bytes {HEADER + BLOCK_BYTES} to {NBYTES} arrived corrupted"):
        files.read_into("slices", NBYTES - 1, part[:1])
    files.read_into("slices", HEADER, large)
    assert bytes(large) == content[HEADER:][:2_000_000], "what came damaged is not read as another unit"
    with pytest.raises(CheckpointError, match="no host has all of it"):
        _remote(servers, entry, holders=()).read_into("slices", 0, part)


def test_a_short_read_that_arrives_damaged_is_read_again(
    servers: list[Server], content: bytes, entry: FileEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, garbled = Reader._take, 0

    def garble(self: Reader, view: memoryview, until: float) -> None:
        nonlocal garbled
        take(self, view, until)
        if garbled:
            view[0] ^= 1
            garbled -= 1

    monkeypatch.setattr(Reader, "_take", garble)
    files, part = _remote(servers, entry), memoryview(bytearray(10))
    for times, sender in ((1, 0), (2, 0), (3, 1)):
        garbled = times
        files.taken.clear()
        files.read_into("slices", HEADER, part)
        assert bytes(part) == content[HEADER:][:10]
        assert files.taken == {sender: 10}
    garbled = 6
    with pytest.raises(IntegrityError, match=f"bytes {HEADER} to {HEADER + 10} arrived corrupted"):
        files.read_into("slices", HEADER, part)


def test_a_host_that_is_away_is_asked_last(servers: list[Server], content: bytes, entry: FileEntry) -> None:
    asked: list[int] = []
    files, found = _remote(servers, entry), memoryview(bytearray(NBYTES))
    reader_of = files._reader_of
    files._reader_of = lambda rank: (asked.append(rank), reader_of(rank))[1]  # type: ignore[func-returns-value]
    servers[0].close()
    files.read_into("slices", 0, found)
    files.read_into("slices", 0, found[:HEADER])
    assert bytes(found) == content
    assert asked == [0, 1, 1, 1, 1]
    servers[1].close()
    with pytest.raises(CheckpointError, match="host host-0"):  # the last that was asked
        files.read_into("slices", 5, found[:1])


def test_a_thousand_ranks_read_from_one_host(servers: list[Server], content: bytes, entry: FileEntry) -> None:
    """What all ranks read lies on one host, which answers 64 at a time: no rank may keep its connection while it does other things."""

    def read(number: int) -> bytes:
        part = memoryview(bytearray(4))
        every[number].read_into("slices", HEADER + number, part)
        return bytes(part)

    every = [_remote(servers, entry, holders=(1,)) for _ in range(1000)]
    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(read, range(1000)))
    assert found == [content[HEADER + number :][:4] for number in range(1000)]


def test_marks_of_a_tensor_are_copied() -> None:
    marked = [torch.tensor([1 + 2j, 3 - 4j]).conj(), torch.tensor([1 + 2j]).conj().imag, torch.ones(2)]
    target = torch.zeros(16 + 4 + 8, dtype=torch.uint8)
    copy_tensors(list(zip(marked, [target] * 3, (0, 16, 20), strict=True)))
    assert target[:16].view(torch.complex64).tolist() == [1 - 2j, 3 + 4j]
    assert target[16:20].view(torch.float32).tolist() == [-2.0]
