"""Stores that lie, stall, never end, echo what they were sent, or lead elsewhere: an error of ours, soon, that shows no secret."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import hypothesis.strategies as st
import pytest
from hypothesis import given

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import FormatError, IntegrityError, ShardwiseError, SourceError
from shardwise.storage import by_obstore, bytes_below, folders_in, names_in
from shardwise.storage import records as pages
from shardwise.storage import records as tries
from shardwise.storage.other_clients import explained, is_lost, scrubbed, text_of
from shardwise.storage.stores import store_of
from tests.harness.object_store import BUCKET, Proxy, S3Server
from tests.harness.tiers import examples

_HEADER = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
FILE = struct.pack("<Q", len(_HEADER)) + _HEADER + b"\7" * 4096
CONFIG = b'{"model_type":"llama","architectures":["LlamaForCausalLM"]}'
KEYS = ("m/model.safetensors", "m/config.json")
KEY_ID, SECRET, TOKEN, SIGNATURE = "AKIASENTINELID", "SENTINELsecretKEY", "SENTINELtokenXYZ", "SENTINELsig"
_TAGS = {"ETag": '"e0"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


def listing(keys: tuple[str, ...] | list[str], more: str = "", nbytes: int | None = None) -> bytes:
    """What S3 replies to a listing; ``more``: the token of the next page."""
    sizes = [nbytes if nbytes is not None else len(body_of(key)) for key in keys]
    objects = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;e0&quot;</ETag><Size>{size}</Size></Contents>"
        for key, size in zip(keys, sizes, strict=True)
    )
    next_page = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    is_cut = "true" if more else "false"
    return (
        f'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name>'
        f"<IsTruncated>{is_cut}</IsTruncated>{next_page}{objects}</ListBucketResult>"
    ).encode()


def body_of(key: str) -> bytes:
    return CONFIG if "config" in key else FILE


class Request(BaseHTTPRequestHandler):
    """A request; an attack replies to it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    attack: Callable[[Request], None]
    seen: list[dict[str, str]]

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.seen.append({name.lower(): value for name, value in self.headers.items()})
        try:
            type(self).attack(self)
        except ConnectionError:
            self.close_connection = True

    do_HEAD = do_GET

    @property
    def key(self) -> str:
        return self.path.partition("?")[0].removeprefix("/b/").removeprefix("/b")

    @property
    def is_listing(self) -> bool:
        return "list-type" in self.path

    @property
    def span(self) -> tuple[int, int]:
        ranged, whole = self.headers.get("Range"), len(body_of(self.key))
        if not ranged:
            return 0, whole
        first, last = ranged.removeprefix("bytes=").split("-")
        return int(first), min(whole, int(last) + 1)

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.head(status, **{"Content_Length": str(len(body)), **headers})
        if self.command != "HEAD":
            self.wfile.write(body)

    def head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def bytes_of(self, change: Callable[[bytes], bytes] = bytes, shift: int = 0, more: int = 0) -> None:
        """The range that is asked for; ``shift``, ``more``: lies of the headers."""
        (start, stop), whole = self.span, body_of(self.key)
        told = f"bytes {start + shift}-{stop - 1 + shift + more}/{len(whole) + shift + more}"
        self.reply(206, change(whole[start:stop]), Content_Range=told, **_TAGS)

    def is_plain(self, keys: tuple[str, ...] | list[str] = KEYS) -> bool:
        """Whether it was a listing or HEAD, which gets an honest reply."""
        if self.is_listing:
            prefix = parse_qs(self.path.partition("?")[2])["prefix"][0]
            self.reply(200, listing([key for key in keys if key.startswith(prefix)]))
        elif self.command == "HEAD":
            there = self.key in keys
            length = str(len(body_of(self.key)) if there else 0)
            self.reply(200 if there else 404, Content_Length=length, **_TAGS)
        return self.is_listing or self.command == "HEAD"


Attack = Callable[[Request], None]


def of_bodies(**lie: Any) -> Attack:
    return lambda r: None if r.is_plain() else r.bytes_of(**lie)


def of_listings(reply: Callable[[Request], None]) -> Attack:
    missing = b"<Error><Code>NoSuchKey</Code></Error>"
    return lambda r: reply(r) if r.is_listing else r.reply(404, missing)


def of_names(*keys: str) -> Attack:
    def attack(r: Request) -> None:
        if r.is_listing or r.command == "HEAD":
            r.is_plain(keys)
        else:
            r.bytes_of()

    return attack


def drip(r: Request, keys: tuple[str, ...] = KEYS) -> None:
    """A byte at a time."""
    if r.is_plain(keys):
        return
    start, stop = r.span
    told = f"bytes {start}-{stop - 1}/{len(FILE)}"
    r.head(206, Content_Length=str(stop - start), Content_Range=told, **_TAGS)
    for _ in range(stop - start):
        r.wfile.write(b"\0")
        time.sleep(0.1)


def drip_listing(r: Request) -> None:
    r.head(200, Content_Length="100000")
    for _ in range(1000):
        r.wfile.write(b" ")
        time.sleep(0.1)


def immense_listing(r: Request) -> None:
    r.head(200, Content_Length=str(2**63 + 5))
    for _ in range(9):
        r.wfile.write(b" " * 1000)
        time.sleep(0.02)


def endless_listing(r: Request) -> None:
    number = len(r.seen)
    r.reply(200, listing([f"m/f{number}-{k}.safetensors" for k in range(1000)], f"t{number}"))


def endless_folders(r: Request) -> None:
    number = len(r.seen)
    r.reply(200, listing([f"m/{number:08d}-{k}/x" for k in range(1000)], f"t{number}"))


def two_pages_in_turn(r: Request) -> None:
    number = len(r.seen) % 2
    r.reply(200, listing([f"m/f{number}-{k}" for k in range(1000)], f"t{number}"))


def echo(r: Request) -> str:
    return "; ".join(f"{name}: {value}" for name, value in r.headers.items())


def said(code: str, message: str, status: int = 400) -> Attack:
    return lambda r: r.reply(
        status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    )


def echo_in_xml(r: Request) -> None:
    more = f"and secret {SECRET} https://x/?X-Amz-Signature={SIGNATURE}"
    said("BadThing", f"you sent {echo(r)} {more}")(r)


def xml_bomb(r: Request) -> None:
    inner = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12))
    start = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a0 "aaaaaaaaaa">{inner}]>'
    r.reply(200, start.encode() + listing(["m/&a11;"]).partition(b"?>")[2])


def xml_external(r: Request) -> None:
    start = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/passwd">]>'
    r.reply(200, start + listing(["m/&f;"]).partition(b"?>")[2])


def sizes(nbytes: int) -> Attack:
    def attack(r: Request) -> None:
        if r.is_listing:
            r.reply(200, listing(KEYS, nbytes=nbytes))
        elif not r.is_plain():
            r.bytes_of()

    return attack


def endless_body(r: Request) -> None:
    if not r.is_plain():
        r.head(206, Transfer_Encoding="chunked", Content_Range=f"bytes 0-4169/{len(FILE)}", **_TAGS)
        for _ in range(4000):
            r.wfile.write(b"100000\r\n" + b"\0" * 2**20 + b"\r\n")


#: By name: what the store does, what happens, and the text of the error, if there must be one.
READS: dict[str, tuple[Attack, str]] = {
    "wrong range": (of_bodies(shift=7), "Requested"),
    "more than asked for": (of_bodies(change=lambda b: b + b"x" * 100_000), "more bytes than were asked for"),
    "a range that is too long": (of_bodies(more=1000), "Requested"),
    "endless body": (endless_body, "Content-Length"),
    "a byte at a time": (drip, "bytes at 0 failed"),
    "bodies that expand": (of_bodies(change=lambda b: gzip.compress(b"\0" * 2**24)), "more bytes than were"),
    "status 200": (lambda r: None if r.is_plain() else r.reply(200, FILE, **_TAGS), "byte ranges"),
    "redirect to a file": (lambda r: r.reply(302, Location="file:///etc/passwd"), "302 Found"),
    "bomb": (of_listings(xml_bomb), "unrecognized entity"),
    "external entity": (of_listings(xml_external), "unrecognized entity"),
    "endless listing": (of_listings(endless_listing), "lists more than 5000 names"),
    "endless folders": (of_listings(endless_folders), "lists more than 5000 names"),
    "one page for ever": (of_listings(lambda r: r.reply(200, listing(KEYS, "t"))), "again and again"),
    "two pages for ever": (of_listings(two_pages_in_turn), "again and again"),
    "empty pages for ever": (of_listings(lambda r: r.reply(200, listing([], "t"))), "no progress"),
    "a listing a byte at a time": (of_listings(drip_listing), "listing it failed"),
    "a listing of 2**63 bytes": (
        of_listings(immense_listing),
        "listing it failed: obstore can't read the reply",
    ),
    "credentials in XML": (echo_in_xml, "the store refused it: 400 (BadThing): you sent"),
    "credentials in text": (
        lambda r: r.reply(400, echo(r).encode()),
        "the store refused it: 400 Bad Request",
    ),
    "credentials in a code": (lambda r: said(echo(r)[:90], echo(r), 403)(r), "the store refused it: 403"),
    "the token as a code": (said(TOKEN, TOKEN), "the store refused it: 400"),
    "a long text": (lambda r: r.reply(400, b"?" * 400_000), "the store refused it: 400"),
    "a long message": (said("X", "?" * 400_000), "the store refused it: 400"),
    "escapes": (said("X", "\x1b[2J\x1b]0;owned\x07\n\x9b31mall is fine"), r"\x1b[2J"),
    "busy for ever": (lambda r: r.reply(503, Retry_After="100000"), "503"),
    "a range of a listing": (
        of_listings(lambda r: r.reply(416)),
        "listing it failed: the store refused it: 416",
    ),
    "a size of 2**62": (sizes(2**62), "truncated"),
    "a negative size": (sizes(-5), "expected u64"),
    "names of other folders": (
        of_listings(lambda r: r.reply(200, listing(["n/model.safetensors"]))),
        "no such file",
    ),
    "a name of 5,000 characters": (of_names("m/" + "x" * 5000), "the limit is 1024"),
}
COPIES: dict[str, Attack] = {
    "traversal": of_names("m/../../escaped", *KEYS),
    "absolute": of_names("m//etc/escaped", *KEYS),
    "backslashes": of_names("m/..\\..\\escaped", *KEYS),
    "encoded": of_names("m/%2e%2e/%2e%2e/escaped", "m/..%2f..%2fescaped", *KEYS),
    "NUL": of_names("m/a&#0;b", *KEYS),
    "escapes": of_names("m/a&#10;b&#27;[2Jx", *KEYS),
    "long": of_names("m/" + "x" * 1000, *KEYS),
    "deep": of_names("m/" + "d/" * 500 + "x", *KEYS),
    "a file and a folder": of_names("m/a", "m/a/b", *KEYS),
    "outside": of_names("other/x", "../x", *KEYS),
    "names of other folders": of_listings(lambda r: r.reply(200, listing(["n/../../../x", "mm/x", *KEYS]))),
    "cut": of_bodies(change=lambda b: b[: len(b) // 2]),
}


@contextmanager
def hostile(attack: Attack, timeout_s: float = 1, **options: Any) -> Iterator[list[dict[str, str]]]:
    """A store that this process uses as ``s3://b``; gives the headers of what it was asked."""
    seen: list[dict[str, str]] = []
    handler = type("Handler", (Request,), {"attack": staticmethod(attack), "seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    given = {"access_key_id": KEY_ID, "secret_access_key": SECRET, "session_token": TOKEN} | options
    pause = timedelta(milliseconds=1)
    retry = {"max_retries": 2, "backoff": {"base": 2, "init_backoff": pause, "max_backoff": 2 * pause}}
    sw.configure_storage(
        "s3://b",
        endpoint=f"http://127.0.0.1:{server.server_port}",
        region="us-east-1",
        retry_config=retry,
        client_options={"timeout": timedelta(seconds=timeout_s)},
        **given,
    )
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "_PAUSE_S", 0.001)
    monkeypatch.setattr(tries, "_LONGEST_S", 0.9)
    monkeypatch.setattr(pages, "_PAGE_S", 1.0)
    monkeypatch.setattr(by_obstore, "MOST_IN_FOLDER", 5000)


def shows_nothing(error: ShardwiseError, log: str) -> None:
    """No secret, in the error, its causes or the log; and nothing that a terminal obeys."""
    whole = "".join(traceback.format_exception(error)) + repr(error.__dict__) + log
    for secret in (SECRET, TOKEN, SIGNATURE, KEY_ID):
        assert secret not in whole
    assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in str(error)), repr(str(error))
    assert len(str(error)) < 1500


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", READS)
def test_reads(name: str, caplog: pytest.LogCaptureFixture) -> None:
    attack, text = READS[name]
    caplog.set_level(logging.DEBUG)
    with hostile(attack) as seen, pytest.raises((SourceError, FormatError, IntegrityError)) as caught:
        open_catalog("s3://b/m")
    assert text in str(caught.value)
    shows_nothing(caught.value, caplog.text)
    assert len(seen) < 200_000  # of empty pages as many as the store can send in the time limit


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", COPIES)
def test_copies(name: str, tmp_path: Path) -> None:
    """Nothing comes to lie outside of the target."""
    with hostile(COPIES[name]):
        try:
            sw.copy_checkpoint("s3://b/m", tmp_path / "deep" / "deeper" / "out")
        except ShardwiseError as error:
            shows_nothing(error, "")
    found = [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()]
    assert [n for n in found if not n.startswith("deep/deeper/out")] == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["listing", "object"])
def test_no_redirect_to_another_host(kind: str) -> None:
    """It would get the session token."""
    stolen: list[dict[str, str]] = []
    thief = type("Thief", (Request,), {"attack": staticmethod(lambda r: r.reply(200)), "seen": stolen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), thief)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    there = f"http://localhost:{server.server_port}/stolen"

    def attack(r: Request) -> None:
        if kind == "object" and r.is_listing:
            r.is_plain()
        else:
            r.reply(307, Location=there)

    try:
        with hostile(attack), pytest.raises(SourceError, match="redirects to another host, which would get"):
            open_catalog("s3://b/m")
        assert stolen == []
        with hostile(attack, skip_signature=True), pytest.raises(ShardwiseError):
            open_catalog("s3://b/m")
        assert stolen  # without credentials, it is the store's business
        assert not any("x-amz-security-token" in headers for headers in stolen)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("in_pages", [True, False])
def test_a_listing_of_gigabytes_is_ended(in_pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore would hold all of it."""
    sent = 0

    def attack(r: Request) -> None:
        nonlocal sent
        r.head(200, Transfer_Encoding="chunked")
        for _ in range(6000):
            r.wfile.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")
            sent += 2**20

    monkeypatch.setattr(pages, "_UNWATCHED_S", 0.1)
    monkeypatch.setattr(pages, "_MOST_GROWTH_BYTES", 2**26)
    with hostile(attack, timeout_s=60):
        store = store_of("s3://b")
        monkeypatch.setattr(store, "_lists_in_order", in_pages)
        with pytest.raises(SourceError, match=r"one reply does not end: .* the limit is 67108864"):
            store.list("m")
    assert sent < 2**31


def test_long_texts_cost_little() -> None:
    """Linear in their length: a body of this length took minutes."""
    for text in ("?" * 3_000_000, "<Error>" * 500_000, "a" * 3_000_000, "-" * 3_000_000):
        assert len(text_of(ValueError(text))) <= 500
        assert len(scrubbed(text)) <= 500


@examples(300)
@given(
    st.lists(
        st.sampled_from(
            [
                "status code: 400 Bad Request: ",
                "<Error>",
                "<Code>",
                "</Code>",
                "<Message>",
                "<Region>x",
                "\x1b[2J",
            ]
            + [
                "X-Amz-Signature=",
                "?a=",
                "Authorization: ",
                "HTTP error",
                "error sending request",
                "after 9 retries",
            ]
            + [
                "Error performing GET http://127.0.0.1:9/x ",
                "\0",
                "\x9b",
                "\ud800",
                "127.0.0.1:0,",
                "redirect",
            ]
        )
        | st.text(max_size=30),
        max_size=40,
    )
)
def test_any_text_of_a_store(parts: list[str]) -> None:
    """Is a line that a terminal shows as it stands."""
    error = ValueError("".join(parts))
    for text in (explained(error), text_of(error)):
        assert text.isprintable()
        assert len(text) < 4000
    assert is_lost(error) in (True, False)


def test_large_folders_are_listed_whole(server: S3Server) -> None:
    """Of subfolders with more objects than a page, the rest is skipped; a marker of a directory is none of the files."""
    names = [f"large/a/{k:04d}" for k in range(1205)] + [f"large/b/{k}" for k in range(3)]
    for name in (*names, "large/b.txt", "large/c/", "large/empty", "large/z/z"):
        server.put(name, b"" if name.endswith(("/", "empty")) else b"1")
    with Proxy(server.port) as proxy:
        sw.configure_storage(
            f"s3://{BUCKET}",
            endpoint=proxy.endpoint,
            region="us-east-1",
            access_key_id=KEY_ID,
            secret_access_key=SECRET,
        )
        assert sorted(names_in(f"s3://{BUCKET}/large")) == ["a", "b", "b.txt", "c", "empty", "z"]
        assert [asked.method for asked in proxy.log] == ["GET", "GET", "HEAD", "HEAD"]
        assert folders_in(f"s3://{BUCKET}/large") == {"a", "b", "c", "z"}
        assert bytes_below(f"s3://{BUCKET}/large") == (len(names) + 4, len(names) + 2)


def test_a_reply_on_which_obstore_panics() -> None:
    """An error reply with a length of 2^63: pyo3 raises no ``Exception`` for it."""
    reply = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 9223372036854775808\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):  # the server is closed at the end
                while True:
                    link, _ = server.accept()
                    with link:
                        link.recv(65_536)
                        link.sendall(reply + 300_000 * b"x")

        threading.Thread(target=answer, daemon=True).start()
        options = {
            "skip_signature": True,
            "region": "r",
            "endpoint": f"http://127.0.0.1:{server.getsockname()[1]}",
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
            "client_options": {"allow_http": True, "timeout": timedelta(seconds=1)},
        }
        with pytest.raises(SourceError, match=r"obstore can't read the reply \(capacity overflow\)"):
            by_obstore.ObstoreStore("s3://bucket", options).get("a", 1000)
        server.shutdown(socket.SHUT_RDWR)
