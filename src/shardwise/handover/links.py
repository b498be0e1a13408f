"""Messages between a trainer's ranks and receivers, over the authenticated links of the memory tier."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ..errors import CheckpointError, FormatError, IntegrityError, ShardwiseError
from ..limits import parse_json
from ..objects import frozen
from ..publish.hosts import PIECE_BYTES, TAG_BYTES, Reader, Seal, Server, receive_bytes

#: Bytes of a message's document and of what follows it.
_HEAD = struct.Struct("!QQ")
#: A plan of 100,000 reads takes 10 MiB.
_MOST_DOCUMENT_BYTES = 512 * 1024**2

Document = Mapping[str, Any]
Payload = Iterable[memoryview]
#: From a request to the reply, and the number and content of the bytes that follow it.
Answer = Callable[[Document], tuple[Document, int, Payload]]


@frozen
class Address:
    """Where a sender listens, and the secret of those who may read from it, as one URL."""

    host: str
    port: int
    secret: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises :class:`ValueError`, without the secret in its text."""
        seen = "something else"
        with contextlib.suppress(ValueError):
            parts = urlsplit(url)
            seen = f"{parts.scheme or 'no scheme'} with host {parts.hostname} and port {parts.port}"
            secret = parts.path.removeprefix("/")
            is_plain = not ("/" in secret or parts.query or parts.fragment or parts.username)
            if parts.scheme == "shardwise" and parts.hostname and parts.port and secret and is_plain:
                return cls(parts.hostname, parts.port, secret)
        raise ValueError(f"expected a sender's url, shardwise://host:port/secret, got {seen}")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"shardwise://{host}:{self.port}/{self.secret}"


def new_secret() -> str:
    """That nobody can guess."""
    return secrets.token_hex(16)


# ----------------------------------------------------------------------------------------------------


class _NoFiles:
    """Nothing that could be read as a file."""

    path = os.devnull

    def readable(self, name: str) -> str:
        raise FormatError(f"{name}: a sender of weights serves no files")


class Listener(Server):
    """Answers documents with documents, and bytes that follow them. ``answer`` runs in a thread for each link."""

    def __init__(
        self,
        answer: Answer,
        secret: str,
        address: str,
        port: int,
        timeout_s: float,
    ) -> None:
        self._answer_to = answer
        super().__init__(_NoFiles(), secret.encode(), address, timeout_s, port)

    def leave(self) -> None:
        """In a fork: close the copy of the port, which stays open in the parent."""
        self._socket.close()

    def _answer(self, link: socket.socket, requests: Seal, replies: Seal) -> None:
        until = time.monotonic() + self._timeout_s
        asked, _ = _receive_document(link, requests, until)
        try:
            said, nbytes, payload = self._answer_to(asked)
        except (ShardwiseError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            said, nbytes, payload = {"refused": f"{type(error).__name__}: {error}"}, 0, ()
        link.settimeout(self._timeout_s)
        _send_document(link, replies, said, nbytes)
        for piece in _in_pieces(payload):
            link.sendall(piece)
            link.sendall(replies.tag(piece))


class Asker(Reader):
    """Asks one rank of a sender. Not for several threads. Raises as :class:`Reader`."""

    def __init__(self, rank: int, address: Address, timeout_s: float) -> None:
        super().__init__(
            f"{address.host} (rank {rank} of the sender)",
            address.host,
            address.port,
            address.secret.encode(),
            timeout_s,
        )

    def ask(self, question: Document) -> tuple[dict[str, Any], int]:
        """The answer, and how many bytes follow it, for :meth:`take`. Raises :class:`CheckpointError` if the sender refuses."""
        with self._explained():
            link = self._link or self._connect()
            link.settimeout(self._timeout_s)
            _send_document(link, self._requests, question, 0)
            until = time.monotonic() + self._timeout_s
            try:
                said, nbytes = _receive_document(link, self._replies, until)
            except FormatError as error:
                self.close()
                raise IntegrityError(f"{self._host}: {error}") from error
        if "refused" in said:
            raise CheckpointError(f"{self._host}: {said['refused']}")
        self._unread = nbytes
        return said, nbytes

    def take(self, view: memoryview, on_progress: Callable[[int], object]) -> None:
        """Fill ``view`` with all of the bytes that follow the answer."""
        assert view.nbytes == self._unread
        while self._unread:
            nbytes = self._next_piece("weights", view).nbytes
            on_progress(nbytes)
            view = view[nbytes:]


def _in_pieces(payload: Payload) -> Iterator[memoryview]:
    """The bytes of a payload in pieces of :data:`PIECE_BYTES`, each valid until the next one; the last one may be shorter."""
    memory, filled = memoryview(bytearray(PIECE_BYTES)), 0
    for part in payload:
        at = 0
        while at < part.nbytes:
            if (
                filled == PIECE_BYTES
            ):  # not before more has come: a payload that can't be finished must not arrive whole
                yield memory
                filled = 0
            count = min(PIECE_BYTES - filled, part.nbytes - at)
            memory[filled : filled + count] = part[at : at + count]
            at, filled = at + count, filled + count
    if filled:
        yield memory[:filled]


def _send_document(link: socket.socket, seal: Seal, document: Document, nbytes: int) -> None:
    text = json.dumps(document, separators=(",", ":")).encode()
    head = _HEAD.pack(len(text), nbytes)
    link.sendall(head + seal.tag(head) + text + seal.tag(text))


def _receive_document(link: socket.socket, seal: Seal, until: float) -> tuple[dict[str, Any], int]:
    """Raises :class:`FormatError` for what the other side didn't send."""
    head = receive_bytes(link, _HEAD.size, until)
    if not seal.is_of(receive_bytes(link, TAG_BYTES, until), head):
        raise FormatError("a message has another tag: whoever sent it does not know the secret")
    length, nbytes = _HEAD.unpack(head)
    if length > _MOST_DOCUMENT_BYTES:
        raise FormatError(f"a document of {length:,} bytes")
    content = receive_bytes(link, length, until)
    if not seal.is_of(receive_bytes(link, TAG_BYTES, until), content):
        raise FormatError("a document differs from what was sent")
    found = parse_json(content, "", "a message")
    if not isinstance(found, dict):
        raise FormatError("a document is no JSON object")
    return found, nbytes
