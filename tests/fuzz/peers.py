"""Targets that talk: the link between hosts against a hostile reader and a hostile server, and a store against hostile replies."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

import shardwise.storage.records as tries
from shardwise.errors import CheckpointError
from shardwise.format.manifest import FileEntry, Unit
from shardwise.publish.hosts import (
    _HASH_BYTES,
    _NONCE_BYTES,
    _REPLY,
    _REQUEST,
    Reader,
    RemoteFiles,
    Server,
    _keyed,
    _seals,
    copy_units,
)
from shardwise.publish.ring import Ring
from shardwise.storage.by_obstore import ObstoreStore
from shardwise.storage.other_clients import (
    explained,
    has_answered,
    is_forbidden,
    is_lost,
    is_too_short,
    is_unexplained,
    is_unknown_upload,
    text_of,
)
from shardwise.storage.records import configure_storage
from tests.fuzz.guard import Guard
from tests.fuzz.mutate import NUMBERS, TEXTS, mutate_bytes
from tests.fuzz.targets import Seeds, target

#: A lost connection is tried again at once.
tries._PAUSE_S = tries._LONGEST_PAUSE_S = 0.0

_HERE = "127.0.0.1"
_SECRET = b"0123456789abcdef"
_SLOT, _FILE = "own-0", "model/slices"
_NAME = f"{_SLOT}/{_FILE}"
_CONTENT = bytes(range(256)) * 12
_OUTSIDE = b"no other host may read this"
#: The other side ends each of its connections: only one that keeps silent lasts so long.
_PATIENCE_S = 0.2
#: So long a hostile host waits for a request, while the reader may wait for more of a reply.
_HASTE_S = 0.03


def _numbers(rng: random.Random, likely: int) -> int:
    if rng.random() < 0.6:
        return likely
    return int(rng.choice([n for n in NUMBERS if isinstance(n, int) and 0 <= n < 2**64]))


def _damaged(rng: random.Random, content: bytes, often: float = 0.2) -> bytes:
    return mutate_bytes(rng, content) if content and rng.random() < often else content


def _taken(link: socket.socket, most: int) -> bytes:
    """What arrives before the other side ends the connection, at most ``most`` bytes."""
    found = b""
    with contextlib.suppress(OSError):
        while len(found) < most and (piece := link.recv(most - len(found))):
            found += piece
    return found


def _end_at_once(link: socket.socket) -> None:
    """Without a connection that waits for stray packets: there are as many ports as 30 s of inputs use."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


# ------------------------------------------------------------------------------------ the link's server


class _Served:
    """The ring of the input that is read now, for a server that lasts."""

    def __init__(self) -> None:
        self.ring: Ring | None = None

    @property
    def path(self) -> str:
        assert self.ring is not None
        return self.ring.path

    def readable(self, name: str) -> str:
        assert self.ring is not None
        return self.ring.readable(name)


_SERVERS: dict[int, tuple[Server, _Served, list[BaseException]]] = {}


def _server() -> tuple[Server, _Served, list[BaseException]]:
    """This process's server, and the exceptions that ended its threads."""
    if os.getpid() not in _SERVERS:
        ended: list[BaseException] = []
        threading.excepthook = lambda args: ended.append(args.exc_value or RuntimeError("a thread ended"))
        served = _Served()
        _SERVERS[os.getpid()] = Server(served, _SECRET, _HERE, _PATIENCE_S), served, ended
    return _SERVERS[os.getpid()]


def _names_of_files(rng: random.Random) -> bytes:
    names = (
        *(
            _NAME,
            f"{_SLOT}/link",
            f"{_SLOT}/folder/secret",
            f"{_SLOT}/pipe",
            f"{_SLOT}",
            "own-0.files/x",
            "lines",
        ),
        *(
            f"{_SLOT}/../../secret",
            "../secret",
            f"{_SLOT}//{_FILE}",
            "held-1/manifest.json",
            "/etc/passwd",
            *TEXTS,
        ),
    )
    return rng.choice(names).encode(errors="surrogatepass") * rng.choice((1, 1, 1, 1, 2, 200))


def _ring(place: Path) -> None:
    """A ring with a file, a link and a folder's link that lead out of it, and a pipe."""
    ring = Ring(str(place), "run")
    file = Path(ring.path, _NAME)
    file.parent.mkdir(parents=True)
    file.write_bytes(_CONTENT)
    (place / "secret").write_bytes(_OUTSIDE)
    Path(ring.path, _SLOT, "link").symlink_to(place / "secret")
    Path(ring.path, _SLOT, "folder").symlink_to(place)
    os.mkfifo(Path(ring.path, _SLOT, "pipe"))


def _attacked(place: Path) -> None:
    """Give the server what the input says, from a reader that knows the secret or doesn't."""
    server, served, ended = _server()
    served.ring = Ring(str(place), "run")
    Guard.peers.add((_HERE, server.port))
    script = (place / "script").read_bytes()
    rng = random.Random(script)
    link = socket.create_connection((_HERE, server.port), timeout=2 * _PATIENCE_S)
    is_friend = False
    try:
        nonce = _taken(link, _NONCE_BYTES)
        assert len(nonce) == _NONCE_BYTES, "the server did not begin"
        is_friend = rng.random() < 0.8
        own, secret = rng.randbytes(_NONCE_BYTES), _SECRET if is_friend else rng.randbytes(16)
        hello = _damaged(rng, _keyed(secret, b"reader", nonce + own) + own)
        is_friend = (
            is_friend and len(hello) == 48 and hello[:32] == _keyed(_SECRET, b"reader", nonce + hello[32:])
        )
        requests, _ = _seals(secret, nonce + own)
        sent = hello
        for _ in range(rng.randint(1, 3)):
            name = _names_of_files(rng)[:65_000]
            head = _REQUEST.pack(
                len(name) if rng.random() < 0.9 else rng.choice((0, 1, 65_535)),
                _numbers(rng, rng.randrange(4000)),
                _numbers(rng, rng.randrange(4000)),
            )
            sent += _damaged(rng, head + name + requests.tag(head, name))
        with contextlib.suppress(OSError):
            link.sendall(sent)
            if rng.random() < 0.97:
                link.shutdown(socket.SHUT_WR)
        came = _taken(link, 2**20)

    finally:
        _end_at_once(link)
    _wait_for_threads("shardwise-memory-link")
    assert _OUTSIDE not in came, "the server sent a file from outside of its ring"
    assert is_friend or (len(came) <= _HASH_BYTES and _CONTENT[:32] not in came), (
        "the server answered a stranger"
    )
    if ended:
        raise ended.pop()


def _wait_for_threads(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(5.0)
            assert not thread.is_alive(), f"{name} does not end"


@target(20, _attacked)
def _memory_server(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Bytes of a hostile reader, which may know the run's secret."""
    _ring(place)
    (place / "script").write_bytes(rng.randbytes(16))
    _server()


# ------------------------------------------------------------------------------------ the link's reader


class _Listener:
    """A hostile peer at a port of its own: each connection is given to ``answer``."""

    def __init__(self) -> None:
        self._socket = socket.create_server((_HERE, 0), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        self.answer: Callable[[socket.socket], None] = lambda link: None
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            link, _ = self._socket.accept()
            link.settimeout(1.0)
            with contextlib.suppress(OSError), link:
                self.answer(link)
            with contextlib.suppress(OSError):
                link.close()


_LISTENERS: dict[tuple[int, str], _Listener] = {}


def _listener(use: str) -> _Listener:
    if (os.getpid(), use) not in _LISTENERS:
        _LISTENERS[os.getpid(), use] = _Listener()
    found = _LISTENERS[os.getpid(), use]
    Guard.peers.add((_HERE, found.port))
    return found


def _answer_reader(script: bytes, link: socket.socket) -> None:
    """What a hostile host says: to requests that it reads, or to none."""
    rng = random.Random(script)
    link.settimeout(_HASTE_S)
    knows = rng.random() < 0.95
    nonce = rng.randbytes(_NONCE_BYTES)
    link.sendall(_damaged(rng, nonce, 0.03))
    hello = _taken(link, _HASH_BYTES + _NONCE_BYTES)
    if rng.random() < 0.02:
        time.sleep(1.5 * _PATIENCE_S)
    nonces = nonce + hello[_HASH_BYTES:]
    link.sendall(_damaged(rng, _keyed(_SECRET if knows else b"", b"server", nonces), 0.03))
    _, replies = _seals(_SECRET, nonces)
    for _ in range(rng.randint(1, 4)):
        head = _taken(link, _REQUEST.size)
        if len(head) < _REQUEST.size:
            return
        length, start, nbytes = _REQUEST.unpack(head)
        _taken(link, length + 16)
        content = _CONTENT[start : start + (nbytes or len(_CONTENT))]
        content = mutate_bytes(rng, content) if content and rng.random() < 0.3 else content
        reply = _REPLY.pack(0 if rng.random() < 0.9 else rng.randrange(256), _numbers(rng, len(content)))
        link.sendall(_damaged(rng, reply + replies.tag(reply)))
        link.sendall(_damaged(rng, content + replies.tag(content)))


def _asked(place: Path, read: Callable[[Callable[[], Reader], Path], None]) -> None:
    listener = _listener("reader")
    listener.answer = partial(_answer_reader, (place / "script").read_bytes())
    read(lambda: Reader("there", _HERE, listener.port, _SECRET, _PATIENCE_S), place)


def _read_whole(reader_of: Callable[[], Reader], place: Path) -> None:
    with closing(reader_of()) as reader:
        for _ in range(2):
            assert len(reader.read_whole(_NAME)) <= 128 * 1024**2


def _copy(reader_of: Callable[[], Reader], place: Path) -> None:
    """Units are compared with their checksums: what is copied is what was saved."""
    out = place / "out"
    out.write_bytes(bytes(len(_CONTENT)))
    cuts = (0, 100, 2000, len(_CONTENT))
    units = [Unit(a, b - a, xxhash.xxh3_64_hexdigest(_CONTENT[a:b])) for a, b in itertools.pairwise(cuts)]
    with closing(reader_of()) as reader:
        copy_units(reader, _NAME, units, str(out), lambda: None)
    assert out.read_bytes() == _CONTENT, "damage was copied without an error"


def _remote(reader_of: Callable[[], Reader], place: Path) -> None:
    header = 100
    entry = FileEntry(
        nbytes=len(_CONTENT),
        header_bytes=header,
        header_xxh3=xxhash.xxh3_64_hexdigest(_CONTENT[:header]),
        blocks=(xxhash.xxh3_64_hexdigest(_CONTENT[header:]),),
    )
    files = RemoteFiles({_FILE: entry}, {_FILE: [(1, _SLOT, [[0, 2]])]}, lambda _: reader_of(), lambda: None)
    out = place / "out"
    out.write_bytes(bytes(len(_CONTENT)))
    with closing(files):
        with contextlib.suppress(CheckpointError):
            files.read_into(_FILE, 3, memoryview(bytearray(500)))
        files.copy(_FILE, str(out))
    assert out.read_bytes() == _CONTENT, "damage was copied without an error"


@target(20, partial(_asked, read=_read_whole), partial(_asked, read=_copy), partial(_asked, read=_remote))
def _memory_reader(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Replies of a hostile host, which may know the run's secret."""
    (place / "script").write_bytes(rng.randbytes(16))
    _listener("reader")


# ------------------------------------------------------------------------------------------------ stores

_BODIES = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message>'
    "<RequestId>1</RequestId></Error>",
    "<Error><Code>PermanentRedirect</Code><Region>eu-west-1</Region><Endpoint>b.s3.amazonaws.com</Endpoint></Error>",
    "<Error><Code>ExpiredToken</Code><Message>x-amz-security-token: abcdefgh</Message></Error>",
    "<Error><Code>NoSuchUpload</Code></Error>",
    "<html><head><title>502 Bad Gateway</title></head></html>",
    '{"error": {"code": 403, "message": "authorization: Bearer abc"}}',
    "redirect without LOCATION",
    "dns error ConnectionRefused timed out InvalidCertificate",
    "Wanted range starting at 5",
    "?" * 3000 + "=",
    "x-amz-" * 2000,
    "\x1b[31m\u202e\0",
)
_STARTS = (
    "Generic S3 error: Error performing GET http://127.0.0.1:9/b/k in 3ms - Server returned non-2xx status code: {} : ",
    "Error performing PUT http://127.0.0.1:9/b/k?X-Amz-Signature=abc in 1s, after {} retries, max_retries: 8, "
    "retry_timeout: 60s  - HTTP error: error sending request",
    "{} HTTP error: response body ",
    "non-partial response {}",
)
_STATUSES = (
    "200 OK",
    "301 Moved",
    "400 Bad Request",
    "401",
    "403 Forbidden",
    "404",
    "412",
    "416",
    "500",
    "503 Slow Down",
    "x",
    "9" * 400,
)


_TOKEN = re.compile(r"security-token\s{0,3}[:=]\s*abcdefgh", re.IGNORECASE)


def _said(rng: random.Random) -> str:
    """A text of the client, with a store's body in it."""
    body = rng.choice(_BODIES)
    if rng.random() < 0.7:
        body = mutate_bytes(rng, body.encode(), 6).decode(errors="replace")
    body *= rng.choice((1, 1, 1, 2, 400))
    return rng.choice(_STARTS).format(rng.choice(_STATUSES)) + body


def _explained(place: Path) -> None:
    error = Exception((place / "error.txt").read_text())
    Guard.peers.add((_HERE, 9))
    for text in (explained(error), text_of(error)):
        assert len(text) < 5000, text
        assert text.isprintable(), repr(text)
        assert not _TOKEN.search(text), "an error repeats a token"
    for tells in (is_too_short, is_forbidden, has_answered, is_lost, is_unknown_upload, is_unexplained):
        tells(error)


@target(60, _explained)
def _store_errors(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Error texts of obstore, with bodies that a store may send."""
    replaced = _said(rng).encode("utf-8", "replace")
    (place / "error.txt").write_bytes(replaced)


class _Client:
    """What obstore hands out where a store says what the input says."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def _name(self, k: int) -> str:
        odd = (
            "",
            ".",
            "..",
            "a/../b",
            "/etc/passwd",
            "x" * 1025,
            "a//b",
            "\0",
            "é",
            "a/",
            "b/c",
            "\U0010ffff",
        )
        return f"a/{k:06}" if self._rng.random() < 0.97 else self._rng.choice(odd)

    def _object(self, k: int) -> dict[str, Any]:
        size = self._rng.choice((0, 1, 5, 2**40, 2**63)) if self._rng.random() < 0.1 else 10
        when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=self._rng.choice((0, 20_000, 2_900_000)))
        tag = self._rng.choice(('"x"', None, ""))
        return {"path": self._name(k), "size": size, "e_tag": tag, "version": None, "last_modified": when}

    def _raise(self, often: float) -> None:
        if self._rng.random() < often:
            from obstore.exceptions import GenericError

            kind = self._rng.choice((GenericError, FileNotFoundError, GenericError, OSError))
            raise kind(_said(self._rng))

    def list(self, store: Any, folder: Any, *, offset: Any, chunk_size: int) -> Any:
        return self._chunks()

    async def _chunks(self) -> Any:
        count, k = self._rng.choice((0, 1, 3, 12)), 0
        repeats = self._rng.random() < 0.2
        for _ in range(count):
            self._raise(0.02)
            size = 100 if self._rng.random() < 0.8 else self._rng.choice((0, 1, 99))
            yield [self._object(k + i) for i in range(size)]
            k += 0 if repeats else size

    async def list_with_delimiter_async(self, store: Any, folder: Any) -> Any:
        self._raise(0.2)
        n = self._rng.choice((0, 1, 5, 50))
        return {
            "objects": [self._object(k) for k in range(n)],
            "common_prefixes": [self._name(k) for k in range(n)],
        }

    def head(self, store: Any, key: str) -> Any:
        self._raise(0.4)
        return self._object(1)

    def get(self, store: Any, key: str, options: Any = None) -> Any:
        self._raise(0.4)
        return _Got(self._object(1), self._rng)


class _Got:
    def __init__(self, meta: dict[str, Any], rng: random.Random) -> None:
        self.meta, self._rng, self.attributes = meta, rng, {}

    def bytes(self) -> bytes:
        return self._rng.randbytes(20)

    def stream(self, min_chunk_size: int) -> Iterator[bytes]:
        from obstore.exceptions import GenericError

        for _ in range(self._rng.randint(0, 3)):
            if self._rng.random() < 0.2:
                raise GenericError(_said(self._rng))
            yield self._rng.randbytes(self._rng.choice((0, 1, 10, 1000)))


def _used(store: Any) -> None:
    """Every verb that reads. Errors of ours are expected; the last one is raised again."""
    from shardwise.errors import ShardwiseError
    from shardwise.storage.records import Cut

    def read() -> None:
        _, pieces = store.read("a/000001", 0, 20)
        with contextlib.suppress(Cut):
            for _ in pieces:
                pass

    last: Exception | None = None
    verbs: tuple[Callable[[], object], ...] = (
        lambda: store.list("a"),
        lambda: list(store.list_below("a")),
        lambda: store.stat("a/000001"),
        read,
        lambda: store.get("a/000001", 1000),
    )
    for verb in verbs:
        try:
            verb()
        except (ShardwiseError, FileNotFoundError) as error:
            last = error
    if isinstance(last, ShardwiseError):
        raise last


def _paged(place: Path, url: str) -> None:
    Guard.peers.add((_HERE, 9))
    options = {"skip_signature": True, "region": "r", "endpoint": f"http://{_HERE}:9"}
    store = ObstoreStore(url, options if url.startswith("s3") else {})
    store._obstore = _Client(random.Random((place / "script").read_bytes()))
    _used(store)


@target(10, partial(_paged, url="s3://bucket"), partial(_paged, url="https://127.0.0.1:9"))
def _store_replies(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Listings, descriptions and bodies that obstore may hand out."""
    (place / "script").write_bytes(rng.randbytes(16))


_LISTING = (
    b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<Name>bucket</Name><Prefix>a/</Prefix><KeyCount>2</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
    b"<Contents><Key>a/000001</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;x&quot;</ETag>"
    b"<Size>20</Size></Contents><Contents><Key>a/b/c</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    b"<ETag>&quot;y&quot;</ETag><Size>5</Size></Contents><CommonPrefixes><Prefix>a/b/</Prefix></CommonPrefixes>"
    b"</ListBucketResult>"
)


def _answer_http(script: bytes, link: socket.socket) -> None:
    asked = b""
    while b"\r\n\r\n" not in asked and (piece := link.recv(65_536)):
        asked += piece
    rng = random.Random(script + asked.partition(b" HTTP")[0])
    body = rng.choice((_LISTING, _LISTING, _LISTING, _CONTENT[:20], *(one.encode() for one in _BODIES)))
    body = mutate_bytes(rng, body) if rng.random() < 0.5 else body
    status = b"200 OK" if rng.random() < 0.7 else rng.choice(_STATUSES).encode()
    head = b"HTTP/1.1 " + (b"206 Partial" if b"\nrange:" in asked.lower() and rng.random() < 0.7 else status)
    head += b'\r\nETag: "x"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nConnection: close\r\nContent-Range: bytes 0-19/20'
    length = len(body) if rng.random() < 0.8 else rng.choice((0, 5, 10**6, 2**63, -1))
    head += f"\r\nContent-Length: {length}\r\n\r\n".encode()
    reply = (mutate_bytes(rng, head) if rng.random() < 0.3 else head) + (
        b"" if asked.startswith(b"HEAD") else body
    )
    link.sendall(reply)
    link.shutdown(socket.SHUT_WR)


def _served_by_http(place: Path) -> None:
    listener = _listener("http")
    listener.answer = partial(_answer_http, (place / "script").read_bytes())
    no_more = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    options = {
        "skip_signature": True,
        "region": "r",
        "endpoint": f"http://{_HERE}:{listener.port}",
        "retry_config": no_more,
        "client_options": {"allow_http": True, "timeout": timedelta(seconds=1)},
    }
    configure_storage("s3://bucket", **options)
    _used(ObstoreStore("s3://bucket", options))


@target(3, _served_by_http)
def _store_server(rng: random.Random, seeds: Seeds, place: Path) -> None:
    """Replies of a hostile server to obstore itself."""
    (place / "script").write_bytes(rng.randbytes(16))
    _listener("http")
