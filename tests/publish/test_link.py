"""Attacks on the connection between hosts: by who can reach the port, by who stands between two hosts, and by what lies in a slot."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from shardwise.errors import CheckpointError, IntegrityError, ShardwiseError
from shardwise.format.manifest import FileEntry, Unit
from shardwise.publish.hosts import Reader, Server, own_address, proved_units, receive
from shardwise.publish.ring import Ring

SECRET, CONTENT = b"word", os.urandom(700_000)
NAME = "own-0/model/slices"
SILENT = 64


@pytest.fixture(name="ring")
def _ring(tmp_path: Path) -> Ring:
    ring = Ring(str(tmp_path), "run")
    file = Path(ring.path, NAME)
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    return ring


@pytest.fixture(name="serve")
def _serve(ring: Ring) -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as opened:

        def serve(timeout_s: float = 20.0, address: str = "127.0.0.1") -> Server:
            return opened.enter_context(closing(Server(ring, SECRET, address, timeout_s)))

        yield serve


def reader_of(port: int, address: str = "127.0.0.1", timeout_s: float = 20.0) -> closing[Reader]:
    return closing(Reader("there", address, port, SECRET, timeout_s))


def is_served(server: Server) -> bool:
    with reader_of(server.port) as reader:
        return reader.read_whole(NAME) == CONTENT


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20.0)


def received(link: socket.socket, nbytes: int) -> bytes:
    """So many bytes; fewer if the other side closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while len(found) < nbytes and (part := link.recv(nbytes - len(found))):
            found += part
    return found


# -- what lies in a slot ----------------------------------------------------------------------------------


def test_links_and_pipes_in_a_slot_are_not_followed(
    tmp_path: Path, ring: Ring, serve: Callable[..., Server]
) -> None:
    outside, slot = tmp_path / "outside", Path(ring.path, "own-0")
    outside.mkdir()
    (outside / "file").write_bytes(b"private")
    (outside / "manifest.json").write_text("{}")
    (slot / "folder").symlink_to(outside)
    (slot / "model" / "deep").symlink_to(outside)
    (slot / "file").symlink_to(outside / "file")
    Path(ring.path, "own-1").symlink_to(outside)
    os.mkfifo(slot / "pipe")
    with reader_of(serve().port) as reader:
        for name in ("folder/file", "model/deep/file", "file", "pipe", "model", "../own-1/file"):
            with pytest.raises(CheckpointError, match="doesn't have"):
                reader.read_whole(f"own-0/{name}")
        with pytest.raises(CheckpointError, match="doesn't have"):
            reader.read_whole("own-1/file")
        assert reader.read_whole(NAME) == CONTENT
    assert proved_units(str(slot / "pipe"), FileEntry(0, 0, ""), lambda: None) == []
    assert "own-1" not in ring.slots()
    for name in ("folder/new", "folder/inner/new", "file", "pipe"):
        with pytest.raises(CheckpointError, match="can't be written"):
            ring.slot("own-0").room_for(name, 10)
    assert sorted(os.listdir(outside)) == ["file", "manifest.json"]
    assert (outside / "file").read_bytes() == b"private"


def test_names_and_numbers_of_a_request(ring: Ring, serve: Callable[..., Server]) -> None:
    Path(ring.path).with_name("outside").write_text("private")
    Path(ring.path, "lines").write_text("private")
    names = (
        *("../outside", "own-0/../../outside", "/etc/passwd", "own-0//etc/passwd", "own-0/./model/slices"),
        *(
            "own-0\\..\\outside",
            f"{NAME}\0",
            "own-0",
            "own-0.files/../x",
            "lines",
            "own-2/x",
            "",
            "view-00/x",
        ),
        *("own-0/" + "x" * 65000, "own-0/" + "d/" * 5000 + "x", "own-0.files", "own-0/lost"),
    )
    with reader_of(serve().port) as reader:
        for name in names:
            with pytest.raises(CheckpointError, match="doesn't have"):
                reader.read_whole(name)
        for start, nbytes in ((2**64 - 1, 1), (len(CONTENT), 10), (len(CONTENT) - 1, 2)):
            with pytest.raises(CheckpointError, match="shorter than expected"):
                list(reader.pieces(NAME, start, nbytes))
        assert b"".join(map(bytes, reader.pieces(NAME, 5, 300_000))) == CONTENT[5:300_005]


# -- between two hosts ------------------------------------------------------------------------------------


class Between:
    """Passes the proofs of a reader and a server on; what comes then is its own choice."""

    def __init__(self, server: Server) -> None:
        self._server, self._socket = server, socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.reader = self.server = socket.socket()

    def meet(self) -> None:
        self.reader.close()
        self.server.close()
        self.reader, _ = self._socket.accept()
        self.reader.settimeout(20.0)
        self.server = connected(self._server.port)
        self.reader.sendall(received(self.server, 16))
        self.server.sendall(received(self.reader, 48))
        self.reader.sendall(received(self.server, 32))

    def close(self) -> None:
        for one in (self._socket, self.reader, self.server):
            one.close()


def request_of(name: str) -> int:
    """Bytes of a request for a whole file."""
    return 2 + 8 + 8 + len(name) + 16


#: Status, length and tag.
REPLY = 1 + 8 + 16


@pytest.fixture(name="pool")
def _pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_whoever_passes_proofs_on_can_ask_nothing(
    ring: Ring, serve: Callable[..., Server], pool: ThreadPoolExecutor
) -> None:
    server = serve()
    with closing(Between(server)) as between, reader_of(between.port) as reader:
        met = pool.submit(between.meet)
        asked = pool.submit(reader.read_whole, NAME)
        met.result()
        theirs = received(between.reader, request_of(NAME))
        name = b"own-0/model/slicet"  # another file, with the tag of the reader's request
        between.server.sendall(theirs[:18] + name + theirs[-16:])
        assert received(between.server, 1) == b""
        between.close()
        with pytest.raises(CheckpointError, match="host there"):
            asked.result()
    with closing(Between(server)) as between, reader_of(between.port) as reader:
        met = pool.submit(between.meet)
        asked = pool.submit(reader.read_whole, NAME)
        met.result()
        theirs = received(between.reader, request_of(NAME))
        between.server.sendall(theirs)
        size = REPLY + len(CONTENT) + 3 * 16
        reply = received(between.server, size)
        assert len(reply) == size
        between.reader.sendall(reply)
        assert asked.result() == CONTENT, "who passes all on disturbs nothing"
        between.server.sendall(theirs)  # once more
        assert received(between.server, 1) == b""


@pytest.mark.parametrize("how", ["status", "length", "first byte", "last byte", "tag", "order", "again"])
def test_whoever_passes_proofs_on_can_alter_nothing(
    serve: Callable[..., Server], pool: ThreadPoolExecutor, how: str
) -> None:
    server, piece = serve(), 256 * 1024
    with closing(Between(server)) as between, reader_of(between.port) as reader:
        seen: list[bytes] = []

        def read() -> None:
            for part in reader.pieces(NAME, 0, len(CONTENT)):
                seen.append(bytes(part))

        met, asked = pool.submit(between.meet), pool.submit(read)
        met.result()
        between.server.sendall(received(between.reader, request_of(NAME)))
        reply = bytearray(received(between.server, REPLY + len(CONTENT) + 3 * 16))
        first, second = REPLY, REPLY + piece + 16
        if how == "order":
            one, two = reply[first:second], reply[second : second + piece + 16]
            reply[first:second], reply[second : second + piece + 16] = two, one
        elif how == "again":
            reply[second : second + piece + 16] = reply[first:second]
        else:
            at = {
                "status": 0,
                "length": 8,
                "first byte": first,
                "last byte": len(reply) - 17,
                "tag": second - 1,
            }
            reply[at[how]] ^= 1
        with suppress(ConnectionError):  # a reader hangs up as soon as it sees the change
            between.reader.sendall(reply)
        with pytest.raises(IntegrityError, match="data received from host there doesn't match what it sent"):
            asked.result()
        assert b"".join(seen) == CONTENT[: sum(map(len, seen))], "no altered piece is given to the caller"


def test_what_was_altered_once_is_asked_for_again(
    serve: Callable[..., Server], pool: ThreadPoolExecutor
) -> None:
    with closing(Between(serve())) as between, reader_of(between.port) as reader:
        memory = memoryview(bytearray(100))
        done = pool.submit(
            receive,
            reader,
            NAME,
            Unit(0, 100, None),
            lambda at, piece: memory.__setitem__(slice(at, at + piece.nbytes), piece),
        )
        for turn in range(2):
            between.meet()
            between.server.sendall(received(between.reader, request_of(NAME)))
            reply = bytearray(received(between.server, REPLY + 100 + 16))
            reply[REPLY] ^= 1 - turn
            between.reader.sendall(reply)
        done.result()
        assert memory == CONTENT[:100]


def test_a_server_proves_nothing_to_a_stranger(serve: Callable[..., Server]) -> None:
    """Else a stranger could make one connection answer the question of another."""
    server = serve()
    with connected(server.port) as first, connected(server.port) as second:
        nonce = received(first, 16)
        received(second, 16)
        second.sendall(secrets.token_bytes(32) + nonce)
        assert received(second, 1) == b""


# -- at the port ------------------------------------------------------------------------------------------


def test_a_handshake_has_one_deadline(serve: Callable[..., Server]) -> None:
    sent = 0
    with connected(serve(timeout_s=0.5).port) as link, contextlib.suppress(ConnectionError):
        received(link, 16)
        link.setblocking(False)
        for _ in range(47):  # the proof and a nonce are 48
            link.sendall(b"\0")
            sent += 1
            time.sleep(0.1)
            with contextlib.suppress(BlockingIOError):
                assert link.recv(1) == b""
                break
    assert sent < 47


@pytest.mark.parametrize("is_dripping", [False, True])
def test_strangers_keep_no_reader_out(serve: Callable[..., Server], is_dripping: bool) -> None:
    """As many as may be unproved at a time, which come back when they are closed. A reader that has proved itself is not disturbed."""
    server, ended = serve(timeout_s=60.0), threading.Event()  # a reader waits for a third of that
    with reader_of(server.port) as before:
        assert before.read_whole(NAME) == CONTENT
        strangers = [connected(server.port) for _ in range(SILENT)]

        def drip() -> None:
            while not ended.wait(0.7):
                for number, link in enumerate(strangers):
                    try:
                        link.send(b"\0")
                    except OSError:
                        link.close()
                        strangers[number] = connected(server.port)

        with ThreadPoolExecutor(1) as pool:
            dripping = pool.submit(drip) if is_dripping else None
            try:
                for _ in range(5):
                    assert is_served(server)
                    assert before.read_whole(NAME) == CONTENT
            finally:
                ended.set()
            if dripping is not None:
                dripping.result()
        for link in strangers:
            link.close()
    assert is_served(server)


def test_out_of_descriptors_the_server_waits(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, tries, real = serve(), [], Server._wait_for_room
    monkeypatch.setattr(Server, "_wait_for_room", lambda self: (tries.append(1), real(self))[1])
    link = socket.socket()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        link.connect(("127.0.0.1", server.port))
        time.sleep(0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    assert len(tries) < 50
    assert len(received(link, 16)) == 16, "and takes the connection when there are some again"
    link.close()
    assert is_served(server)


def test_a_system_out_of_threads_loses_one_connection(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, start = serve(), threading.Thread.start
    left = [1]

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "shardwise-memory-link" and left:
            left.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ShardwiseError, match="host there"):
        is_served(server)
    assert is_served(server)


# -- addresses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_both_kinds_of_addresses(serve: Callable[..., Server], address: str) -> None:
    with reader_of(serve(address=address).port, address) as reader:
        assert reader.read_whole(NAME) == CONTENT


def test_the_own_address_toward_another_host() -> None:
    assert own_address(("::1", 1)) == "::1"
    assert own_address(("127.0.0.1", 1)) == "127.0.0.1"
    assert own_address(("no such host.invalid", 1)) == "127.0.0.1"


def test_an_address_of_another_host() -> None:
    with pytest.raises(
        CheckpointError, match=r"can.t listen on 2001:db8::1: .*; give InMemoryCheckpoints an address"
    ):
        Server(Ring, SECRET, "2001:db8::1", 1.0)  # type: ignore[arg-type]  # nothing is served
