"""Reads files of another host's ring or part of a step, over TCP. A rank serves its host's, to those who know the run's secret.

Plain sockets, because no collective may run concurrently with those of training. One request: bytes of a file. The secret travels through the
group's store. Both sides prove that they know it by a keyed hash of the random bytes of both, and derive the keys of the connection from
them: each request, reply and piece of a file has a tag, so whoever stands between the two can read, and can neither ask nor alter. Content
is not encrypted, as that of gloo and NCCL is not.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from ..errors import CheckpointError, IntegrityError, ShardwiseError
from .below import open_below

__all__ = ["Readable", "Reader", "Server", "address_toward_store", "own_address"]

_NONCE_BYTES, _HASH_BYTES, _TAG_BYTES = 16, 32, 16
#: Length of the name, first byte and number of bytes.
_REQUEST = struct.Struct("!HQQ")
_REPLY = struct.Struct("!BQ")
_COUNT = struct.Struct("!Q")
_MAX_BYTES = 128 * 1024**2
#: A server answers so many proved connections at a time. Others wait in the kernel's queue, which the system may make shorter: after a restart
#: every host of a run asks rank 0's host for its documents.
_MAX_PROVED, _MAX_WAITING = 64, 4096
#: Connections that have proved nothing yet. For one more, the oldest is closed once it has had this long: strangers keep nobody out.
_MAX_UNPROVED, _GRACE_S = 64, 1.0
#: Before the next try to accept a connection: the process may be out of descriptors.
_PAUSE_S = 0.05
#: Of a reply, as it arrives: each has a tag, and stays in a core's cache until it is hashed and written.
_PIECE_BYTES = 256 * 1024


def own_address(toward: tuple[str, int]) -> str:
    """The address of this host, IPv4 or IPv6, with which it reaches another one. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, proto, _, address in socket.getaddrinfo(*toward, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, proto) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def address_toward_store() -> str:
    """The address of this host with which it reaches the group's store, by torch's environment."""
    return own_address((os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1"))))


def _keyed(secret: bytes, use: bytes, nonces: bytes) -> bytes:
    """A proof of the secret or a key of one connection: of the random bytes of server and reader."""
    return hmac.digest(secret, use + nonces, "sha256")


class _Seal:
    """The tags of one side's messages on one connection. Each counts those before it, so that none can be left out, repeated or moved."""

    def __init__(self, key: bytes) -> None:
        self._start, self._count = hmac.new(key, digestmod="sha256"), 0

    def tag(self, *message: bytes | memoryview) -> bytes:
        """Of the next message."""
        found = self._start.copy()
        found.update(_COUNT.pack(self._count))
        for part in message:
            found.update(part)
        self._count += 1
        return found.digest()[:_TAG_BYTES]

    def is_of(self, tag: bytes, *message: bytes | memoryview) -> bool:
        """Whether the next message has this tag."""
        return hmac.compare_digest(tag, self.tag(*message))


def _seals(secret: bytes, nonces: bytes) -> tuple[_Seal, _Seal]:
    """Of the reader's messages and the server's."""
    return _Seal(_keyed(secret, b"requests", nonces)), _Seal(_keyed(secret, b"replies", nonces))


def _send_at_once(link: socket.socket) -> None:
    """Else the end of each reply waits for the acknowledgment of what came before it: 40 ms, more than 16 MiB take."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(link: socket.socket, nbytes: int, until: float) -> bytes:
    content = bytearray(nbytes)
    _receive_into(link, memoryview(content), until)
    return bytes(content)


def _receive_into(link: socket.socket, view: memoryview, until: float) -> None:
    """Fill ``view`` before that time of the monotonic clock, however slowly bytes come."""
    while view.nbytes:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        link.settimeout(left)
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("the other side has closed the connection")
        view = view[count:]


class Readable(Protocol):
    """What a server serves: a ring, or a host's part of a step."""

    @property
    def path(self) -> str:
        """The directory of all its files."""

    def readable(self, name: str) -> str:
        """The path of a file that other hosts may read. Raises :class:`CheckpointError`, :class:`FormatError` for any other."""


class Server:
    """Serves one ring or part until it is closed; its threads are daemons. ``address`` may be an IPv4 or IPv6 address or a name."""

    def __init__(self, ring: Readable, secret: bytes, address: str, timeout_s: float) -> None:
        self._ring, self._secret, self._timeout_s = ring, secret, timeout_s
        self._changed = threading.Condition()
        self._unproved: dict[socket.socket, float] = {}  # and since when
        self._proved = 0
        self._closed = False
        try:
            found = socket.getaddrinfo(address or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, at = found[0]
            self._socket = socket.create_server(at, family=family, backlog=_MAX_WAITING)
        except OSError as error:
            raise CheckpointError(
                f"can't listen on {address}: {error.strerror}; give InMemoryCheckpoints an address, if this is for the memory tier"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="shardwise-memory-server", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while self._wait_for_room():
            try:
                link, _ = self._socket.accept()
            except OSError:
                time.sleep(_PAUSE_S)
                continue
            with self._changed:
                self._unproved[link] = time.monotonic()
            try:
                threading.Thread(
                    target=self._serve, args=(link,), name="shardwise-memory-link", daemon=True
                ).start()
            except RuntimeError:  # the system is out of threads
                self._leave(link)
                link.close()
                time.sleep(_PAUSE_S)

    def _wait_for_room(self) -> bool:
        """Until one more connection may come. False: the server is closed."""
        with self._changed:
            while not self._closed:
                if self._proved >= _MAX_PROVED:
                    self._changed.wait()
                    continue
                if len(self._unproved) < _MAX_UNPROVED:
                    break
                oldest, since = next(iter(self._unproved.items()))
                left = since + _GRACE_S - time.monotonic()
                if left <= 0:
                    del self._unproved[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
                    break
                self._changed.wait(left)
            return not self._closed

    def _leave(self, link: socket.socket) -> bool:
        """No longer count a connection as unproved. False: it was closed meanwhile."""
        with self._changed:
            self._changed.notify_all()
            return self._unproved.pop(link, None) is not None

    def _serve(self, link: socket.socket) -> None:
        seals = None
        with link:
            try:
                with contextlib.suppress(OSError):
                    seals = self._meet(link)
            finally:
                is_open = self._leave(link)
            if is_open and seals is not None:
                self._answer_all(link, *seals)

    def _meet(self, link: socket.socket) -> tuple[_Seal, _Seal] | None:
        """Exchange proofs, all before one deadline. None: the reader does not know the secret."""
        until = time.monotonic() + self._timeout_s
        link.settimeout(self._timeout_s)
        _send_at_once(link)
        own = secrets.token_bytes(_NONCE_BYTES)
        link.sendall(own)
        proof, nonces = _receive(link, _HASH_BYTES, until), own + _receive(link, _NONCE_BYTES, until)
        if not hmac.compare_digest(proof, _keyed(self._secret, b"reader", nonces)):
            return None
        link.sendall(_keyed(self._secret, b"server", nonces))
        return _seals(self._secret, nonces)

    def _answer_all(self, link: socket.socket, requests: _Seal, replies: _Seal) -> None:
        with self._changed:
            self._proved += 1
        try:
            with contextlib.suppress(OSError, ShardwiseError):
                while not self._closed:
                    self._answer(link, requests, replies)
        finally:
            with self._changed:
                self._proved -= 1
                self._changed.notify_all()

    def _answer(self, link: socket.socket, requests: _Seal, replies: _Seal) -> None:
        until = time.monotonic() + self._timeout_s
        head = _receive(link, _REQUEST.size, until)
        length, start, nbytes = _REQUEST.unpack(head)
        text = _receive(link, length, until)
        if not requests.is_of(_receive(link, _TAG_BYTES, until), head, text):
            raise ConnectionError("a request has another tag: whoever sent it does not know the secret")
        link.settimeout(self._timeout_s)
        name = text.decode(errors="replace")
        try:
            self._ring.readable(name)
            fd = open_below(self._ring.path, name)
        except (OSError, ShardwiseError):
            reply = _REPLY.pack(1, 0)
            link.sendall(reply + replies.tag(reply))
            return
        try:
            left = max(0, os.fstat(fd).st_size - start)
            found = min(nbytes or left, left, _MAX_BYTES)
            reply = _REPLY.pack(0, found)
            link.sendall(reply + replies.tag(reply))
            _send(link, fd, start, found, replies)
        finally:
            os.close(fd)


def _send(link: socket.socket, fd: int, start: int, nbytes: int, replies: _Seal) -> None:
    """Send bytes of a file in pieces, each with its tag. Raises ``OSError``, also if the file has become shorter."""
    memory = memoryview(bytearray(min(_PIECE_BYTES, nbytes) + _TAG_BYTES))
    for at in range(0, nbytes, _PIECE_BYTES):
        size, filled = min(_PIECE_BYTES, nbytes - at), 0
        while filled < size:
            count = os.preadv(fd, [memory[filled:size]], start + at + filled)
            if not count:
                raise ConnectionError("the file has become shorter")
            filled += count
        memory[size : size + _TAG_BYTES] = replies.tag(memory[:size])
        link.sendall(memory[: size + _TAG_BYTES])


class Reader:
    """Reads from one other rank's server. Not for several threads. A failure is a :class:`CheckpointError` naming the host; bytes that are
    not those that the server sent are an :class:`IntegrityError`, and are given to no caller."""

    def __init__(self, host: str, address: str, port: int, secret: bytes, timeout_s: float) -> None:
        self._host, self._timeout_s = host, timeout_s
        self._at, self._secret = (address, port), secret
        self._link: socket.socket | None = None
        self._requests = self._replies = _Seal(b"")
        self._unread = 0  # bytes of the last reply

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def pieces(self, name: str, start: int, nbytes: int) -> Iterator[memoryview]:
        """Bytes of a file, in order. All pieces lie in the same memory: each is valid until the next one."""
        self._ask_for_all_of(name, start, nbytes)
        memory = memoryview(bytearray(min(_PIECE_BYTES, nbytes)))
        while self._unread:
            yield self._next_piece(name, memory)

    def pieces_into(self, name: str, start: int, view: memoryview) -> Iterator[memoryview]:
        """Fill ``view`` with bytes of a file. Yields each part of it that has arrived, in order."""
        self._ask_for_all_of(name, start, view.nbytes)
        while view.nbytes:
            piece = self._next_piece(name, view)
            yield piece
            view = view[piece.nbytes :]

    def read_whole(self, name: str) -> bytes:
        """A file of at most 128 MiB."""
        content = bytearray(self._ask(name, 0, 0))
        view = memoryview(content)
        while self._unread:
            view = view[self._next_piece(name, view).nbytes :]
        return bytes(content)

    def _ask_for_all_of(self, name: str, start: int, nbytes: int) -> None:
        if self._ask(name, start, nbytes) != nbytes:
            raise CheckpointError(f"host {self._host}: {name} is shorter than expected")

    def _ask(self, name: str, start: int, nbytes: int) -> int:
        """Ask for bytes; 0: all. Returns how many come."""
        with self._explained():
            if self._unread:  # the caller did not want the rest
                self.close()
            link = self._link or self._connect()
            text = name.encode()
            head = _REQUEST.pack(len(text), start, nbytes)
            link.settimeout(self._timeout_s)
            link.sendall(head + text + self._requests.tag(head, text))
            until = time.monotonic() + self._timeout_s
            reply = _receive(link, _REPLY.size, until)
            self._check(_receive(link, _TAG_BYTES, until), reply, name)
            status, found = _REPLY.unpack(reply)
            if status or found > (nbytes or _MAX_BYTES):
                self.close()
                raise CheckpointError(f"host {self._host}: does not hold {name}")
            self._unread = int(found)
        return self._unread

    def _next_piece(self, name: str, view: memoryview) -> memoryview:
        """The next piece of the reply, at the start of ``view``."""
        assert self._link is not None
        piece = view[: min(_PIECE_BYTES, self._unread)]
        until = time.monotonic() + self._timeout_s
        with self._explained():
            self._take(piece, until)
            self._check(_receive(self._link, _TAG_BYTES, until), piece, name)
        self._unread -= piece.nbytes
        return piece

    def _take(self, view: memoryview, until: float) -> None:
        """Fill ``view`` from the reply."""
        assert self._link is not None
        _receive_into(self._link, view, until)

    def _check(self, tag: bytes, message: bytes | memoryview, name: str) -> None:
        """Raise unless the server has sent this message, as the next one."""
        if not self._replies.is_of(tag, message):
            self.close()
            raise IntegrityError(f"what arrived is not what host {self._host} sent", path=name)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise CheckpointError(f"host {self._host} at {self._at[0]}: {error}") from error

    def _connect(self) -> socket.socket:
        until = time.monotonic() + self._timeout_s
        link = socket.create_connection(self._at, timeout=self._timeout_s)
        try:
            _send_at_once(link)
            own = secrets.token_bytes(_NONCE_BYTES)
            nonces = _receive(link, _NONCE_BYTES, until) + own
            link.sendall(_keyed(self._secret, b"reader", nonces) + own)
            proof = _receive(link, _HASH_BYTES, until)
            if not hmac.compare_digest(proof, _keyed(self._secret, b"server", nonces)):
                raise ConnectionError("does not know the secret of this run")
        except BaseException:
            link.close()
            raise
        self._requests, self._replies = _seals(self._secret, nonces)
        self._link, self._unread = link, 0
        return link
