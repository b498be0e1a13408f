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
from typing import Protocol

from ..errors import CheckpointError, ShardwiseError
from ..format.manifest import BLOCK_BYTES

__all__ = ["Readable", "Reader", "Server", "address_towards_store", "own_address"]

_NONCE_BYTES, _HASH_BYTES = 16, 32
#: Length of the name, first byte and number of bytes.
_REQUEST = struct.Struct("!HQQ")
_REPLY = struct.Struct("!BQ")
_MAX_BYTES = 128 * 1024**2
_MAX_CONNECTIONS = 64


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
            self._socket = socket.create_server((address, 0), backlog=_MAX_CONNECTIONS)
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
        length, start, nbytes = _REQUEST.unpack(_receive(link, _REQUEST.size))
        name = _receive(link, length).decode(errors="replace")
        try:
            fd = os.open(self._ring.readable(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ShardwiseError):
            link.sendall(_REPLY.pack(1, 0))
            return
        with open(fd, "rb") as file:
            left = max(0, os.fstat(fd).st_size - start)
            found = min(nbytes or left, left, _MAX_BYTES)
            link.sendall(_REPLY.pack(0, found))
            if found:
                link.sendfile(file, start, found)


class Reader:
    """Reads from one other rank's server. Not for several threads. Every failure is a :class:`CheckpointError` naming the host."""

    def __init__(self, host: str, address: str, port: int, secret: bytes, timeout_s: float) -> None:
        self._host, self._timeout_s = host, timeout_s
        self._at, self._secret = (address, port), secret
        self._link: socket.socket | None = None
        self._memory = bytearray()

    def room_for(self, nbytes: int) -> memoryview:
        """Memory to read into, the same at each call: new pages for each unit would cost as much as the unit."""
        if len(self._memory) < nbytes:
            self._memory = bytearray(max(nbytes, BLOCK_BYTES))
        return memoryview(self._memory)[:nbytes]

    def close(self) -> None:
        self._memory = bytearray()
        if self._link is not None:
            self._link.close()
            self._link = None

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Fill ``view`` from a file."""
        if self._ask(name, start, view.nbytes, view) != view.nbytes:
            raise CheckpointError(f"host {self._host}: {name} is shorter than expected")

    def read_whole(self, name: str) -> bytes:
        """A file of at most 128 MiB."""
        content = bytearray()
        self._ask(name, 0, 0, content)
        return bytes(content)

    def _ask(self, name: str, start: int, nbytes: int, into: memoryview | bytearray) -> int:
        try:
            link = self._link or self._connect()
            text = name.encode()
            link.sendall(_REQUEST.pack(len(text), start, nbytes) + text)
            status, found = _REPLY.unpack(_receive(link, _REPLY.size))
            if status or found > _MAX_BYTES or (isinstance(into, memoryview) and found > into.nbytes):
                raise CheckpointError(f"host {self._host}: does not hold {name}")
            if isinstance(into, bytearray):
                into.extend(_receive(link, found))
            else:
                _receive_into(link, into[:found])
            return int(found)
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
        self._link = link
        return link
