"""Reads files of another host's ring or part of a step, over TCP. A rank serves its host's, to who knows the run's secret.

Plain sockets, because no collective may run beside those of training. One request: bytes of a file. Both sides prove that they know
the secret, which travels through the group's store, by a keyed hash of the other's random bytes. Content is not encrypted, as that of
gloo and NCCL is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Protocol

import xxhash

from ..errors import CheckpointError, ShardwiseError

__all__ = ["MOST_CHECKED_BYTES", "Readable", "Reader", "Server", "address_towards_store", "own_address"]

_NONCE_BYTES, _HASH_BYTES = 16, 32
#: Length of the name, first byte and number of bytes, and whether the checksum of the bytes follows them.
_REQUEST = struct.Struct("!HQQ?")
_REPLY = struct.Struct("!BQ")
_CHECKSUM = struct.Struct("!Q")
_MAX_BYTES = 128 * 1024**2
#: Of one request for bytes and their checksum.
MOST_CHECKED_BYTES = 1024**2
#: A server answers so many connections at a time. Others wait in the kernel's queue, which the system may make shorter: after a restart
#: every host of a run asks rank 0's host for its documents.
_MAX_CONNECTIONS, _MAX_WAITING = 64, 4096
#: Of a reply, as it arrives: stays in a core's cache until it is hashed and written.
_PIECE_BYTES = 256 * 1024


def own_address(towards: tuple[str, int]) -> str:
    """The address of this host with which it reaches another one. Sends nothing."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def address_towards_store() -> str:
    """The address of this host with which it reaches the group's store, by torch's environment."""
    return own_address((os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "1"))))


def _proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, side + nonce, hashlib.sha256).digest()


def _send_at_once(link: socket.socket) -> None:
    """Else the end of each reply waits for the acknowledgement of what came before it: 40 ms, more than 16 MiB take."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(link: socket.socket, nbytes: int) -> bytes:
    content = bytearray(nbytes)
    _receive_into(link, memoryview(content))
    return bytes(content)


def _receive_into(link: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("the other side has closed the connection")
        view = view[count:]


class Readable(Protocol):
    """What a server serves: a ring, or a host's part of a step."""

    def readable(self, name: str) -> str:
        """The path of a file that other hosts may read. Raises :class:`CheckpointError`, :class:`FormatError` for any other."""


class Server:
    """Serves one ring or part until it is closed; its threads are daemons."""

    def __init__(self, ring: Readable, secret: bytes, address: str, timeout_s: float) -> None:
        self._ring, self._secret, self._timeout_s = ring, secret, timeout_s
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._closed = False
        try:
            self._socket = socket.create_server((address, 0), backlog=_MAX_WAITING)
        except OSError as error:
            raise CheckpointError(
                f"can't listen on {address}: {error.strerror}; give MemoryTier an address, if this is for the memory tier"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="shardwise-memory-server", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            self._room.acquire()
            try:
                link, _ = self._socket.accept()
            except OSError:
                self._room.release()
                if self._closed:
                    return
                continue
            threading.Thread(
                target=self._serve, args=(link,), name="shardwise-memory-link", daemon=True
            ).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            with link, contextlib.suppress(OSError, ShardwiseError, struct.error):
                link.settimeout(self._timeout_s)
                _send_at_once(link)
                nonce = secrets.token_bytes(_NONCE_BYTES)
                link.sendall(nonce)
                proof, other = _receive(link, _HASH_BYTES), _receive(link, _NONCE_BYTES)
                if not hmac.compare_digest(proof, _proof(self._secret, b"reader", nonce)):
                    return
                link.sendall(_proof(self._secret, b"server", other))
                while not self._closed:
                    self._answer(link)
        finally:
            self._room.release()

    def _answer(self, link: socket.socket) -> None:
        length, start, nbytes, is_checked = _REQUEST.unpack(_receive(link, _REQUEST.size))
        name = _receive(link, length).decode(errors="replace")
        try:
            fd = os.open(self._ring.readable(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ShardwiseError):
            link.sendall(_REPLY.pack(1, 0))
            return
        with open(fd, "rb") as file:
            left = max(0, os.fstat(fd).st_size - start)
            found = min(nbytes or left, left, MOST_CHECKED_BYTES if is_checked else _MAX_BYTES)
            if is_checked:
                content = os.pread(fd, found, start) if found else b""
                checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content))
                link.sendall(_REPLY.pack(0, len(content)) + content + checksum)
                return
            link.sendall(_REPLY.pack(0, found))
            if found:
                link.sendfile(file, start, found)


class Reader:
    """Reads from one other rank's server. Not for several threads. Every failure is a :class:`CheckpointError` naming the host."""

    def __init__(self, host: str, address: str, port: int, secret: bytes, timeout_s: float) -> None:
        self._host, self._timeout_s = host, timeout_s
        self._at, self._secret = (address, port), secret
        self._link: socket.socket | None = None
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
            piece = memory[: self._unread]
            self._take(piece)
            yield piece

    def pieces_into(self, name: str, start: int, view: memoryview) -> Iterator[memoryview]:
        """Fill ``view`` with bytes of a file. Yields each part of it that has arrived, in order."""
        self._ask_for_all_of(name, start, view.nbytes)
        for at in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[at : at + _PIECE_BYTES]
            self._take(piece)
            yield piece

    def read_checked(self, name: str, start: int, view: memoryview) -> bool:
        """Fill ``view``, of at most ``MOST_CHECKED_BYTES``, with bytes of a file. Returns whether they have the checksum that
        the other side sent."""
        self._ask_for_all_of(name, start, view.nbytes, is_checked=True)
        self._unread += _CHECKSUM.size
        self._take(view)
        with self._explained():
            assert self._link is not None
            (checksum,) = _CHECKSUM.unpack(_receive(self._link, _CHECKSUM.size))
        self._unread -= _CHECKSUM.size
        return bool(checksum == xxhash.xxh3_64_intdigest(view))

    def read_whole(self, name: str) -> bytes:
        """A file of at most 128 MiB."""
        content = bytearray(self._ask(name, 0, 0))
        self._take(memoryview(content))
        return bytes(content)

    def _ask_for_all_of(self, name: str, start: int, nbytes: int, *, is_checked: bool = False) -> None:
        if self._ask(name, start, nbytes, is_checked=is_checked) != nbytes:
            self.close()  # a checksum may follow
            raise CheckpointError(f"host {self._host}: {name} is shorter than expected")

    def _ask(self, name: str, start: int, nbytes: int, *, is_checked: bool = False) -> int:
        """Ask for bytes; 0: all. Returns how many come."""
        with self._explained():
            if self._unread:  # the caller did not want the rest
                self.close()
            link = self._link or self._connect()
            text = name.encode()
            link.sendall(_REQUEST.pack(len(text), start, nbytes, is_checked) + text)
            status, found = _REPLY.unpack(_receive(link, _REPLY.size))
            if status or found > (nbytes or _MAX_BYTES):
                self.close()
                raise CheckpointError(f"host {self._host}: does not hold {name}")
            self._unread = int(found)
        return self._unread

    def _take(self, view: memoryview) -> None:
        """Fill ``view`` from the reply."""
        assert self._link is not None
        with self._explained():
            _receive_into(self._link, view)
        self._unread -= view.nbytes

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise CheckpointError(f"host {self._host} at {self._at[0]}: {error}") from error

    def _connect(self) -> socket.socket:
        link = socket.create_connection(self._at, timeout=self._timeout_s)
        try:
            _send_at_once(link)
            nonce, own = _receive(link, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
            link.sendall(_proof(self._secret, b"reader", nonce) + own)
            if not hmac.compare_digest(_receive(link, _HASH_BYTES), _proof(self._secret, b"server", own)):
                raise ConnectionError("does not know the secret of this run")
        except BaseException:
            link.close()
            raise
        self._link, self._unread = link, 0
        return link
