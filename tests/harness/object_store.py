"""moto's S3 server, in memory, in a process of its own; and a proxy in front of it that counts requests and spoils replies.

The proxy speaks plain HTTP. What it does to a request is decided by a function that tests give it.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import shardwise as sw

__all__ = [
    "BUCKET",
    "COUNTS",
    "SECRET",
    "SIGNED",
    "Asked",
    "Do",
    "Proxy",
    "Reply",
    "S3Server",
    "s3_server",
    "use_store",
]

BUCKET = "bucket"
#: The secret key of clients, which no error may repeat.
SECRET = "wJalrXUtnFEMISECRET"
#: A path of the proxy itself, which tells what went through it.
COUNTS = "/-/counts"
_START_S = 60.0
_MOTO = Path(__file__).with_name("moto_s3.py")
#: moto checks no signature, but refuses those without one a second write of an object.
SIGNED = (
    "AWS4-HMAC-SHA256 Credential=AKID/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
_PIECE = 64 * 1024
#: Headers that belong to one connection.
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade"}


class S3Server:
    """``moto.server``, with an empty bucket called ``bucket``. ``port`` is its own, without the proxy."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(_MOTO), str(self.port)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": "1000"},
        )
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self.call("PUT", f"/{BUCKET}")
                return
            except OSError as error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.close()
                    raise RuntimeError(f"moto's server did not start:\n{log.read_text()}") from error
                time.sleep(0.05)

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """A request that must succeed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body=body, headers={"Authorization": SIGNED})
            reply = connection.getresponse()
            content = reply.read()
            assert reply.status < 300, (method, path, reply.status, content[:300])
            return content
        finally:
            connection.close()

    def put(self, key: str, content: bytes) -> None:
        self.call("PUT", f"/{BUCKET}/{key}", content)

    def get(self, key: str) -> bytes | None:
        """An object; None if there is none."""
        return self.call("GET", f"/{BUCKET}/{key}") if key in self.keys(key) else None

    def keys(self, prefix: str) -> list[str]:
        """The first 1000 names that begin with ``prefix``."""
        found = self.call("GET", f"/{BUCKET}?list-type=2&prefix={prefix}").decode()
        return re.findall("<Key>([^<]*)</Key>", found)

    def clear(self, prefix: str) -> None:
        """Delete them."""
        names = "".join(f"<Object><Key>{key}</Key></Object>" for key in self.keys(prefix))
        if names:
            self.call("POST", f"/{BUCKET}?delete", f"<Delete>{names}</Delete>".encode())

    def put_directory(self, folder: Path, prefix: str) -> None:
        """Every file below a directory, under its relative name."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.put(f"{prefix}/{file.relative_to(folder).as_posix()}", file.read_bytes())


def use_store(endpoint: str, **options: Any) -> None:
    """Let this process use the bucket at a server or a proxy, with these options beside the usual ones."""
    sw.configure_storage(
        f"s3://{BUCKET}",
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="AKID",
        secret_access_key=SECRET,
        **options,
    )


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server that ends with the block; ``folder`` gets its log."""
    server = S3Server(folder / "moto.log")
    try:
        yield server
    finally:
        server.close()


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that came to the proxy."""

    number: int
    method: str
    path: str
    first: int | None = None
    """First byte of the range that it asks for."""
    is_conditional: bool = False
    """Whether it is carried out only if there is no object, or a certain one."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a store replies. HEAD gets no body."""

    status: int
    body: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Do:
    """What becomes of a request. By default it is carried out."""

    wait_s: float = 0.0
    status: int | None = None
    """Reply with this instead of asking the server."""
    reply: Reply | None = None
    """Reply with this instead of asking the server."""
    cut_after: int | None = None
    """Close the connection after so many bytes of the body."""
    lose_reply: bool = False
    """Carry it out, then close the connection."""
    refuse: bool = False
    """Close the connection instead of asking the server."""
    cut_headers: bool = False
    """Carry it out, then close the connection in the middle of the reply's headers."""
    reset: bool = False
    """Where the connection is closed, reset it."""
    status_after: int | None = None
    """Carry it out, then reply with this."""
    piece_s: float = 0.0
    """Wait before each 64 KiB of the body."""
    header: tuple[str, str] | None = None
    """That the server gets beside the client's."""
    before: Callable[[], None] | None = None
    """Is called first."""
    without: tuple[str, ...] = ()
    """Headers that the server does not get: it knows nothing of conditional writes, say."""
    sent: Callable[[bytes, Mapping[str, str]], bytes] | None = None
    """The body that the server gets, of the client's and its headers."""
    change: Callable[[bytes], bytes] | None = None
    """The body that the client gets, of the server's."""


@dataclass(slots=True)
class Counts:
    """What went through the proxy."""

    requests: dict[str, int] = field(default_factory=dict)
    """By method."""
    bytes_out: int = 0
    """Bytes of bodies that were sent to clients."""


class Proxy:
    """A context manager: forwards to a server what ``decide`` lets pass, and counts it. ``endpoint`` is for clients."""

    def __init__(self, port: int, decide: Callable[[Asked], Do | None] = lambda asked: None) -> None:
        self.decide = decide
        self.counts = Counts()
        self.log: list[Asked] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            proxy_of = proxy
            upstream = port

        self._server = _listening(Handler)
        self.endpoint = "http://{}:{}".format(*self._server.server_address[:2])

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reset(self, decide: Callable[[Asked], Do | None] = lambda asked: None) -> None:
        """Forget what was counted, and decide anew."""
        with self._lock:
            self.counts, self.log, self.decide = Counts(), [], decide

    def note(self, method: str, path: str, first: int | None, is_conditional: bool) -> Asked:
        with self._lock:
            asked = Asked(len(self.log), method, path, first, is_conditional)
            self.log.append(asked)
            self.counts.requests[method] = self.counts.requests.get(method, 0) + 1
            return asked

    def sent(self, nbytes: int) -> None:
        with self._lock:
            self.counts.bytes_out += nbytes


def _listening(handler: type[BaseHTTPRequestHandler]) -> _Server:
    """On a loopback address of its own: a client of a proxy that is gone, in another process that runs tests, must not
    reach the one that was given its port."""
    own = ".".join(["127", *(str(1 + byte % 254) for byte in os.urandom(3))])
    for address in (own, "127.0.0.1"):  # not every system has all of 127.0.0.0/8
        with contextlib.suppress(OSError):
            return _Server((address, 0), handler)
    raise OSError(f"no socket can listen on {own} or 127.0.0.1")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up, and tests kill them."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy_of: Proxy
    upstream: int

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _do(self) -> None:
        if self.path == COUNTS:
            self._answer(json.dumps(asdict(self.proxy_of.counts)).encode())
            return
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if (
            len(body) < length
        ):  # the client hung up: the server would wait for the rest, and all others for the server
            self.close_connection = True
            return
        ranged = (self.headers.get("Range") or "").removeprefix("bytes=").partition("-")[0]
        first = int(ranged) if ranged.isdigit() else None
        has_condition = any(name in self.headers for name in ("If-Match", "If-None-Match"))
        asked = self.proxy_of.note(self.command, self.path, first, has_condition)
        do = self.proxy_of.decide(asked) or Do()
        if do.before is not None:
            do.before()
        time.sleep(do.wait_s)
        if do.refuse:
            self._hang_up(do)
            return
        if do.status is not None:
            do = replace(do, reply=_refusal(do.status))
        if do.reply is not None:
            self._reply(do.reply)
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in do.without}
            body = body if do.sent is None else do.sent(body, self.headers)
            headers |= {} if do.header is None else {do.header[0]: do.header[1]}
            connection.request(self.command, self.path, body=body, headers=headers)
            self._pass_on(connection.getresponse(), do)
        finally:
            connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do

    def _reply(self, reply: Reply) -> None:
        text = reply.body.encode()
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Type": "application/xml"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _pass_on(self, reply: http.client.HTTPResponse, do: Do) -> None:
        if do.lose_reply:
            reply.read()
            self._hang_up(do)
            return
        if do.status_after is not None:
            reply.read()
            self._reply(_refusal(do.status_after))
            return
        if do.cut_headers:
            reply.read()
            self.wfile.write(f"HTTP/1.1 {reply.status} OK\r\nContent-Le".encode())
            self._hang_up(do)
            return
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in {*_HOP, "date", "server", "content-length"}:
                self.send_header(name, value)
        length = reply.getheader("Content-Length")
        if length is None or do.change is not None:  # chunked: its length is known once it is here
            content = reply.read() if do.change is None else do.change(reply.read())
            self.send_header("Content-Length", str(len(content)))
            pieces = iter([content])
        else:
            self.send_header("Content-Length", length)
            pieces = iter(lambda: reply.read(_PIECE), b"")
        self.end_headers()
        if self.command == "HEAD":
            return
        left = do.cut_after
        for piece in pieces:
            time.sleep(do.piece_s)
            some = piece if left is None else piece[:left]
            self.proxy_of.sent(len(some))
            self.wfile.write(some)
            if left is not None and (left := left - len(some)) <= 0:
                self._hang_up(do)
                return

    def _hang_up(self, do: Do) -> None:
        self.close_connection = True
        self.wfile.flush()
        if do.reset:
            now = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
            self.rfile.close()
            self.wfile = io.BytesIO()  # that the server flushes
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)


def _refusal(status: int) -> Reply:
    codes = {400: "ExpiredToken", 401: "ExpiredToken", 403: "AccessDenied", 503: "SlowDown"}
    code = codes.get(status, "InternalError")
    return Reply(status, f"<Error><Code>{code}</Code><Message>by the proxy</Message></Error>")
