"""Reads from a real S3 server, through a proxy that delays, refuses, cuts and replaces."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator

import fsspec
import pytest

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.catalog.records import StoredFile
from shardwise.engine.files import steps
from shardwise.engine.objects import (
    GAP_BYTES,
    IN_FLIGHT_BYTES,
    LAST_BYTES,
    PART_BYTES,
    ObjectReader,
    requests_for,
)
from shardwise.errors import FormatError, IntegrityError, SourceError
from shardwise.limits import read_small
from shardwise.storage import (
    Moved,
    Stat,
    exists,
    fetch,
    is_directory,
    is_file,
    looking_once,
    names_in,
    stat_of,
    stores,
)
from shardwise.storage import records as tries
from shardwise.storage.other_clients import text_of
from shardwise.storage.records import Cut
from tests.harness.object_store import BUCKET, SECRET, SIGNED, Do, Proxy, S3Server, use_store

ROOT = f"s3://{BUCKET}"
#: A safetensors file without tensors.
EMPTY = (8).to_bytes(8, "little") + b"{}      "


@pytest.fixture(scope="module")
def content(server: S3Server) -> bytes:
    found = os.urandom(3 * PART_BYTES + 12345)
    server.put("big", found)
    return found


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(tries, "_PAUSE_S", 0.001)
    with Proxy(server.port) as found:
        use_store(found.endpoint)
        yield found


def read(url: str, start: int, nbytes: int, version: str | None = None) -> bytes:
    view = bytearray(nbytes)
    fetch(url, start, memoryview(view), version=version)
    return bytes(view)


def test_looks(server: S3Server, proxy: Proxy) -> None:
    """Names with spaces, unicode and percent signs; an object and a prefix of one name; a marker of a directory."""
    for name in ("look/a", "look/a/b", "look/x%20y", "look/with%20space", "look/%C3%BC", "look/marker/"):
        server.put(name, b"12345")
    with looking_once(f"{ROOT}/look"):
        assert sorted(names_in(f"{ROOT}/look")) == sorted(["a", "marker", "x y", "with space", "ü"])
        assert is_file(f"{ROOT}/look/a")
        assert is_directory(f"{ROOT}/look/a")
        assert stat_of(f"{ROOT}/look/ü") == stat_of(f"{ROOT}/look/with space")
        assert not exists(f"{ROOT}/look/nothing")
    assert [asked.method for asked in proxy.log] == ["GET"] * 3  # each folder is listed once
    assert is_file(f"{ROOT}/look/a")  # outside of the block, by HEAD
    assert proxy.log[-1].method == "HEAD"
    assert not is_file(ROOT)
    assert read_small(f"{ROOT}/look/a") == b"12345"
    with pytest.raises(FormatError, match="the limit is 4"):
        read_small(f"{ROOT}/look/a", "it", 4)


def test_a_percent_sign_is_a_percent_sign(server: S3Server, proxy: Proxy) -> None:
    server.put("percent/50%2525", b"1")  # the key is 50%25
    assert names_in(f"{ROOT}/percent") == ["50%25"]
    assert is_file(f"{ROOT}/percent/50%25")
    assert not is_file(f"{ROOT}/percent/50%")


def test_a_range(proxy: Proxy, content: bytes) -> None:
    assert read(f"{ROOT}/big", 1000, 5000) == content[1000:6000]
    assert proxy.counts.bytes_out == 5000
    assert proxy.counts.requests == {"GET": 1}


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_store_that_is_busy_is_asked_again(proxy: Proxy, content: bytes, status: int) -> None:
    proxy.reset(lambda asked: Do(status=status) if asked.number < 2 else None)
    assert read(f"{ROOT}/big", 7, 5000) == content[7:5007]
    assert proxy.counts.requests == {"GET": 3}


def test_a_body_that_was_cut_goes_on_where_it_was(proxy: Proxy, content: bytes) -> None:
    proxy.reset(lambda asked: Do(cut_after=100_000) if asked.number < 5 else None)
    assert read(f"{ROOT}/big", 7, 3_000_000) == content[7:3_000_007]
    assert proxy.counts.bytes_out <= 3_000_000 + 6 * 100_000  # what was sent twice is little


def test_a_body_that_is_always_cut_is_an_error(proxy: Proxy, content: bytes) -> None:
    sw.configure_storage(
        ROOT,
        endpoint=proxy.endpoint,
        region="us-east-1",
        access_key_id="AKID",
        secret_access_key=SECRET,
        retry_config={"max_retries": 1},
    )
    proxy.reset(lambda asked: Do(cut_after=10))
    with pytest.raises(SourceError, match="failed 4 times"):
        read(f"{ROOT}/big", 0, 1_000_000)
    assert len(proxy.log) < 200


@pytest.mark.parametrize(("status", "said"), [(403, "403 .AccessDenied."), (401, "401"), (404, "lost")])
def test_a_refusal_is_final(proxy: Proxy, content: bytes, status: int, said: str) -> None:
    proxy.reset(lambda asked: Do(status=status))
    with pytest.raises(SourceError, match=said) as caught:
        read(f"{ROOT}/big", 0, 10)
    assert len(proxy.log) == 1
    assert SECRET not in "".join([str(caught.value), repr(caught.value), *caught.value.__notes__])
    assert caught.value.__cause__ is None or SECRET not in repr(caught.value.__cause__)


def test_another_version_is_not_read(server: S3Server, proxy: Proxy) -> None:
    server.put("moved", b"a" * 1000)
    stat = stat_of(f"{ROOT}/moved")
    assert stat is not None
    assert stat.version
    server.put("moved", b"b" * 1000)
    with pytest.raises(Moved, match="was replaced"):
        read(f"{ROOT}/moved", 0, 10, stat.version)
    assert read(f"{ROOT}/moved", 0, 10) == b"b" * 10


def test_an_object_replaced_between_two_pieces_of_a_body(server: S3Server, proxy: Proxy) -> None:
    """The first request is cut, and the object replaced before the second: no mixture."""
    server.put("mixed", b"a" * 500_000)
    replaced = iter([lambda: None, lambda: server.put("mixed", b"b" * 500_000)])
    proxy.reset(
        lambda asked: Do(before=next(replaced, None), cut_after=100_000 if asked.number == 0 else None)
    )
    with pytest.raises(Moved):
        read(f"{ROOT}/mixed", 0, 400_000)


class Scripted:
    """A store whose replies a test gives: (version, pieces); a piece that is an error is raised."""

    def __init__(self, *replies: tuple[str, list[bytes | Cut]], nbytes: int = 10) -> None:
        self.replies = iter(replies)
        self.nbytes = nbytes
        self.asked: list[tuple[int, int]] = []

    def read(self, key: str, start: int, stop: int) -> tuple[Stat, Iterator[bytes]]:
        self.asked.append((start, stop))
        version, pieces = next(self.replies)
        return Stat(self.nbytes, version), self._pieces(pieces)

    def _pieces(self, pieces: list[bytes | Cut]) -> Iterator[bytes]:
        for piece in pieces:
            if isinstance(piece, Cut):
                raise piece
            yield piece


def script(monkeypatch: pytest.MonkeyPatch, *replies: tuple[str, list[bytes | Cut]]) -> Scripted:
    found = Scripted(*replies)
    monkeypatch.setattr(stores, "store_of", lambda root: found)
    monkeypatch.setattr(tries, "_PAUSE_S", 0.0)
    return found


def test_a_store_that_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = script(monkeypatch, ("v", [b"01", Cut("gone")]), ("v", [b"234"]), ("v", [b"56789"]))
    assert read("s3://b/x", 0, 10) == b"0123456789"
    assert found.asked == [(0, 10), (2, 10), (5, 10)]


def test_a_store_that_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, *[("v", [])] * 20)
    with pytest.raises(
        SourceError, match="failed 4 times, the last time after 0 bytes: the body ended early"
    ):
        read("s3://b/x", 0, 10)


def test_versions_are_those_of_the_first_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, ("v", [b"01", Cut("gone")]), ("w", [b"23456789"]))
    with pytest.raises(Moved):
        read("s3://b/x", 0, 10)


def test_a_store_that_sends_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, ("v", [b"012"]))
    with pytest.raises(IntegrityError, match="more bytes than were asked for"):
        read("s3://b/x", 0, 2)


def test_queries_are_not_repeated() -> None:
    error = text_of(ValueError(f"GET https://h/c/k?sv=1&sig={SECRET} failed\n\nDebug source: {SECRET}"))
    assert error == "GET https://h/c/k?… failed"


def test_a_reader_takes_one_version(server: S3Server, proxy: Proxy) -> None:
    """Of an object of which no catalog says the version, too."""
    server.put("unknown", b"a" * 1000)
    view = memoryview(bytearray(10))
    with ObjectReader([]) as reader:
        reader.read_into(f"{ROOT}/unknown", 0, view)
        server.put("unknown", b"b" * 1000)
        with pytest.raises(Moved):
            reader.read_into(f"{ROOT}/unknown", 10, view)


def test_memory_is_not_used_again_while_it_is_written(proxy: Proxy, content: bytes) -> None:
    """A read skips parts that are still on their way; their bytes do not come into those of later parts."""
    url = f"{ROOT}/big"
    proxy.reset(lambda asked: Do(wait_s=0.3) if not asked.first else None)
    spans = [(url, 0, PART_BYTES), (url, 2 * PART_BYTES, 3 * PART_BYTES)]
    with ObjectReader([StoredFile(url, len(content))]) as reader, reader.expecting(spans):
        view = bytearray(1000)
        reader.read_into(url, 2 * PART_BYTES, memoryview(view))  # the first part is not waited for
        with reader.expecting([(url, PART_BYTES, 2 * PART_BYTES)]):
            later = bytearray(PART_BYTES)
            reader.read_into(url, PART_BYTES, memoryview(later)[:1])
            time.sleep(0.5)
            reader.read_into(url, PART_BYTES, memoryview(later))
            assert later == content[PART_BYTES : 2 * PART_BYTES]


def test_memory_of_small_parts_is_not_used_for_large_ones(proxy: Proxy, content: bytes) -> None:
    url = f"{ROOT}/big"
    with ObjectReader([StoredFile(url, len(content))]) as reader:
        for start, stop in ((0, PART_BYTES), (PART_BYTES, PART_BYTES + LAST_BYTES - 1), (5, 1_000_000)):
            with reader.expecting([(url, start, stop)]):
                view = bytearray(stop - start)
                reader.read_into(url, start, memoryview(view))
                assert view == content[start:stop]
        assert reader.requests == 3


def test_too_short_and_gone(server: S3Server, proxy: Proxy) -> None:
    server.put("short", b"a" * 100)
    with pytest.raises(IntegrityError, match="has 100 bytes, but 200 were expected"):
        read(f"{ROOT}/short", 50, 150)
    with pytest.raises(IntegrityError, match="lost"):
        read(f"{ROOT}/none", 0, 10)
    sw.configure_storage("s3://nobucket", endpoint=proxy.endpoint, skip_signature=True)
    with pytest.raises(SourceError, match="no such bucket"):
        read("s3://nobucket/x", 0, 10)


def test_a_store_that_is_not_there() -> None:
    quick = {"max_retries": 1}
    sw.configure_storage("s3://far", endpoint="http://127.0.0.1:9", skip_signature=True, retry_config=quick)
    with pytest.raises(SourceError, match="s3://far/x: reading it failed"):
        read("s3://far/x", 0, 10)
    sw.configure_storage(
        "s3://nowhere", endpoint="http://no.invalid", skip_signature=True, retry_config=quick
    )
    with pytest.raises(SourceError, match="s3://nowhere/x"):
        read("s3://nowhere/x", 0, 10)


def test_options_that_no_store_has() -> None:
    sw.configure_storage("s3://strange", no_such_option=SECRET)
    with pytest.raises(SourceError, match="s3://strange") as caught:
        read("s3://strange/x", 0, 1)
    assert SECRET not in str(caught.value)
    with pytest.raises(ValueError, match="takes a URL"):
        sw.configure_storage("/local/path", region="x")


@pytest.mark.parametrize("bucket", [BUCKET, "other"])
def test_a_forked_process_says_so(proxy: Proxy, content: bytes, bucket: str) -> None:
    """The threads of the Rust library are in the parent alone: a read in the child would wait forever."""
    assert read(f"{ROOT}/big", 0, 1) == content[:1]
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if bucket != BUCKET:
                sw.configure_storage(f"s3://{bucket}", endpoint=proxy.endpoint, skip_signature=True)
            read(f"s3://{bucket}/big", 0, 1)
        except SourceError as error:
            os.write(into, str(error).encode())
        finally:
            os._exit(0)
    os.close(into)
    assert b"forked" in os.read(out, 10_000)
    os.waitpid(child, 0)
    os.close(out)


def test_parts_of_two_versions_are_an_error(server: S3Server, proxy: Proxy) -> None:
    """Requests that are under way at a time, of an object of which the catalog has no version."""
    server.put("parts", b"a" * (3 * PART_BYTES))
    url = f"{ROOT}/parts"
    others_came = threading.Event()

    def replace() -> None:
        assert others_came.wait(60)
        server.put("parts", b"b" * (3 * PART_BYTES))

    proxy.reset(lambda asked: Do(before=replace) if asked.first == 2 * PART_BYTES else None)
    view = memoryview(bytearray(PART_BYTES))
    known = [StoredFile(url, 3 * PART_BYTES)]
    with ObjectReader(known) as reader, reader.expecting([(url, 0, 3 * PART_BYTES)]):
        reader.read_into(url, 0, view)
        reader.read_into(url, PART_BYTES, view)
        others_came.set()
        with pytest.raises(Moved):
            reader.read_into(url, 2 * PART_BYTES, view)


def test_an_object_that_became_short(server: S3Server, proxy: Proxy) -> None:
    server.put("became", b"a" * 10)
    with pytest.raises(IntegrityError, match="fewer than 51 bytes"):
        read(f"{ROOT}/became", 50, 10)


def test_closing_ends_requests(proxy: Proxy, content: bytes) -> None:
    """Those that are of no use any more are not waited for to their end."""
    url = f"{ROOT}/big"
    proxy.reset(lambda asked: Do(piece_s=0.05) if asked.first else None)
    started = time.monotonic()
    with ObjectReader([StoredFile(url, len(content))]) as reader, reader.expecting([(url, 0, len(content))]):
        reader.read_into(url, 0, memoryview(bytearray(10)))
    assert time.monotonic() - started < 5  # a part would take 6 s


def test_rights_on_a_prefix_alone(server: S3Server, proxy: Proxy) -> None:
    """No folder above the source is listed."""
    server.put("priv/a/model.safetensors", EMPTY)
    proxy.reset(
        lambda asked: (
            Do(status=403) if "prefix=" in asked.path and "prefix=priv%2Fa" not in asked.path else None
        )
    )
    assert open_catalog(f"{ROOT}/priv/a").files[0].version
    proxy.reset(lambda asked: Do(status=403) if "prefix=" in asked.path else None)
    assert open_catalog(f"{ROOT}/priv/a/model.safetensors").files[0].version


def test_client_options_are_added(proxy: Proxy, content: bytes) -> None:
    given = {"region": "us-east-1", "access_key_id": "AKID", "secret_access_key": SECRET}
    for name in ("endpoint", "endpoint_url", "AWS_ENDPOINT_URL"):
        sw.configure_storage(ROOT, **{name: proxy.endpoint}, **given, client_options={"timeout": "30s"})
        assert read(f"{ROOT}/big", 0, 1) == content[:1]


def test_a_file_over_http(server: S3Server, proxy: Proxy) -> None:
    """A store that lists nothing."""
    server.put("http/model.safetensors", EMPTY)
    proxy.reset(lambda asked: Do(header=("Authorization", SIGNED)))
    catalog = open_catalog(f"{proxy.endpoint}/{BUCKET}/http/model.safetensors")
    assert [file.nbytes for file in catalog.files] == [len(EMPTY)]


def test_errors_of_file_systems_are_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")

    def fail(*args: object, **options: object) -> bytes:
        raise RuntimeError(f"GET https://h/x?token={SECRET}&sig={SECRET} said no")

    monkeypatch.setattr(type(files), "cat_file", fail)
    with pytest.raises(SourceError, match="said no") as caught:
        read("memory://box/a/file", 0, 5)
    assert SECRET not in str(caught.value)


def test_other_urls_go_to_fsspec() -> None:
    fsspec.filesystem("memory").pipe("/box/a/file", b"0123456789")
    assert names_in("memory://box/a") == ["file"]
    assert stat_of("memory://box/a/file") is not None
    assert read("memory://box/a/file", 2, 5) == b"23456"
    assert is_directory("memory://box")
    assert not exists("memory://box/b")
    with pytest.raises(SourceError, match="no store has URLs of this kind"):
        read("nosuchscheme://x/y", 0, 1)


def test_the_reader_asks_ahead_and_holds_little(proxy: Proxy, content: bytes) -> None:
    """Short reads in order cost one request per part, and never more than its memory."""
    url = f"{ROOT}/big"
    proxy.reset(lambda asked: Do(wait_s=0.02))
    spans = [
        (url, start, min(start + 1_000_000, len(content))) for start in range(0, len(content), 1_000_000)
    ]
    with ObjectReader([StoredFile(url, len(content))]) as reader, reader.expecting(spans):
        for path, start, stop in spans:
            view = bytearray(stop - start)
            reader.read_into(path, start, memoryview(view))
            assert view == content[start:stop]
        assert reader.requests == len(content) // PART_BYTES  # the last one takes the rest
        assert reader.bytes_read == len(content) == proxy.counts.bytes_out
    assert proxy.counts.requests == {"GET": reader.requests}


def test_reads_that_were_not_announced(proxy: Proxy, content: bytes) -> None:
    url = f"{ROOT}/big"
    with ObjectReader([StoredFile(url, len(content))]) as reader:
        for expected in ([], [(url, 0, 5_000_000)], [(url, 20_000_000, 20_000_010)]):
            with reader.expecting(expected):
                for start, nbytes in (
                    (9_000_000, 100),
                    (0, 2_000_000),
                    (20_000_000, 10),
                    (1_000_000, 9_000_000),
                ):
                    view = bytearray(nbytes)
                    reader.read_into(url, start, memoryview(view))
                    assert view == content[start : start + nbytes]


def test_a_failed_read_ahead_is_raised_where_its_bytes_are_needed(proxy: Proxy, content: bytes) -> None:
    url = f"{ROOT}/big"
    proxy.reset(lambda asked: Do(status=403) if asked.first and asked.first >= PART_BYTES else None)
    with ObjectReader([StoredFile(url, len(content))]) as reader, reader.expecting([(url, 0, len(content))]):
        view = bytearray(PART_BYTES)
        reader.read_into(url, 0, memoryview(view))
        assert view == content[:PART_BYTES]
        with pytest.raises(SourceError, match="403"):
            reader.read_into(url, PART_BYTES, memoryview(view))


def test_parts() -> None:
    far = 10 * PART_BYTES
    assert list(
        steps(
            [("a", 0, 10), ("a", 20, 30), ("a", far, far + 1), ("b", far + 1, far + 2)], PART_BYTES, GAP_BYTES
        )
    ) == [
        ("a", 0, 30),
        ("a", far, far + 1),
        ("b", far + 1, far + 2),
    ]
    whole = list(steps([("a", 5, 5 + 2 * PART_BYTES + 1)], PART_BYTES, GAP_BYTES))
    assert [stop - start for _, start, stop in whole] == [PART_BYTES, PART_BYTES, 1]
    for nbytes, asked in (
        (1, [1]),
        (LAST_BYTES - 1, [LAST_BYTES - 1]),
        (LAST_BYTES, [PART_BYTES, LAST_BYTES - PART_BYTES]),
        (PART_BYTES + LAST_BYTES - 1, [PART_BYTES, LAST_BYTES - 1]),
        (4 * PART_BYTES, [PART_BYTES] * 4),
    ):
        found = list(requests_for([(f"{ROOT}/big", 5, 5 + nbytes)]))
        assert [stop - start for _, start, stop in found] == asked
    assert list(itertools.islice(steps([], PART_BYTES, GAP_BYTES), 1)) == []
    assert IN_FLIGHT_BYTES >= 4 * PART_BYTES


def test_stat_says_nothing_of_a_local_version(tmp_path: object) -> None:
    assert stat_of(__file__) == Stat(os.path.getsize(__file__))
