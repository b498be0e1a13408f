"""What a store says of its objects, the verbs that it must have, its options, URLs, and counted requests."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
import unicodedata
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from threading import Lock, Thread
from typing import Any, ParamSpec, Protocol, TypeVar

from ..errors import IntegrityError, SourceError
from ..objects import frozen

# ----------------------------------------------------------------------------------------------------
# What a store says of its objects, and the verbs that it must have.


@frozen
class Stat:
    """A file or an object."""

    nbytes: int
    version: str | None = None
    """What changes when an object is replaced: its ETag, or the time of its last change. None for local files."""
    changed_s: float | None = None
    """When it was last written, by the store's clock, in seconds since 1970. None where the store does not say, and for local files."""


@frozen
class Held:
    """A small object, whole, as :meth:`Store.get` found it."""

    content: bytes
    version: Mapping[str, str]
    """What :meth:`Store.replace` compares."""


@frozen
class Listing:
    """The names directly below a prefix."""

    files: Mapping[str, Stat] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()


class Moved(IntegrityError):
    """An object was replaced after it was first looked at."""


class Cut(Exception):
    """A body ended, or its connection did, before all bytes came: the rest may be asked for."""


class ObjectFile(Protocol):
    """An object that is being written. Every method raises :class:`CheckpointError`."""

    def write(self, data: memoryview) -> None:
        """Append bytes; they may be changed after the return."""

    def close(self) -> None:
        """Let the object appear, whole."""


class Store(Protocol):
    """The objects of one bucket, by key. Thread-safe. Every method raises :class:`SourceError` where the store refuses."""

    def list(self, folder: str) -> Listing:
        """The names directly below ``folder`` ('' for the root); empty if there are none."""

    def list_below(self, folder: str) -> Iterator[tuple[str, Stat]]:
        """Every object below ``folder``, by its name from there; a request for each 1,000."""

    def stat(self, key: str) -> Stat | None:
        """An object; None if there is none of that name."""

    def read(self, key: str, start: int, stop: int) -> tuple[Stat | None, Iterator[bytes]]:
        """Bytes ``start`` to ``stop`` of an object, as they come, and the object as this reply describes it (None: the
        store does not say). Raises ``FileNotFoundError``; the iterator raises :class:`Cut`."""

    def write(self, key: str, pieces: Iterator[memoryview], nbytes: int) -> None:
        """Write an object of ``nbytes`` bytes; it appears whole, or not at all. Holds a few pieces.

        Raises :class:`CheckpointError`, and what ``pieces`` raises.
        """

    def writer(self, key: str, nbytes: int) -> ObjectFile:
        """Write an object from front to back, of about ``nbytes`` bytes. One that is not closed never appears."""

    def create(self, key: str, content: bytes) -> bool:
        """Write a small object if there is none; whether it has this content then. Raises :class:`CheckpointError`.

        ``content`` is unlike that of any other writer: so a reply that was lost is found out by reading back.
        """

    def get(self, key: str, most_bytes: int) -> Held | None:
        """A small object; None if there is none. Raises :class:`FormatError` if it has more than ``most_bytes`` bytes."""

    def replace(self, key: str, content: bytes, held: Held) -> bool:
        """Replace an object if it is still the one that ``held`` is; whether it has this content then. Raises :class:`CheckpointError`.

        ``content`` is unlike that of any other writer, as for :meth:`create`.
        """

    def delete(self, key: str) -> None:
        """Delete an object, if there is one. Raises :class:`CheckpointError`."""


# ----------------------------------------------------------------------------------------------------
# URLs of object stores: ``s3://bucket/prefix``.

#: Linear in any text: what follows a question mark is looked at once.
_QUERY = re.compile(r"\?[^\s\"'<>]*")

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/]*)(?P<path>.*)", re.DOTALL)


_BY_OBSTORE = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https")
#: Parameters of signed URLs.
_SIGNED = re.compile(r"[?&](sig|se|sv|token|X-Amz-\w+|X-Goog-\w+|AWSAccessKeyId|Signature)=", re.IGNORECASE)


@frozen
class Place:
    """A URL in two parts."""

    root: str
    """Scheme and bucket (for https: the host): one client serves all of it."""
    key: str
    """The name inside, without a slash at either end; empty for the root."""

    @property
    def scheme(self) -> str:
        return self.root.partition("://")[0]

    @property
    def url(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root


def is_url(path: str) -> bool:
    """Whether a path names an object of a store, not a local file."""
    return "://" in path and _URL.fullmatch(path) is not None


def join(url: str, name: str) -> str:
    """The URL of a name below ``url``."""
    return f"{url}{name}" if url.endswith("/") and not url.endswith("://") else f"{url}/{name}"


def without_queries(text: str) -> str:
    """A text without the queries of URLs in it, which may hold a token or a signature."""
    return _QUERY.sub(lambda found: "?…" if "=" in found[0] else found[0], text)


def place_of(url: str) -> Place:
    """The parts of a URL. Names are taken as they stand: ``%20`` is three characters, not a space.

    Raises :class:`SourceError` for a URL that is not one of an object: without a bucket, with a user, a password or a query, or with
    a part that is empty, ``.`` or ``..``. Its text does not repeat what may be a credential.
    """
    found = _URL.fullmatch(url)
    assert found is not None, "not a URL"
    scheme, authority, path = found["scheme"].lower(), found["authority"], found["path"]
    if _may_hold_credentials(scheme, authority, path):
        raise SourceError(
            f"a {scheme} URL with a user, a password or a query in it, which may be a credential; give a URL without, and credentials by "
            f"the store's environment variables or shardwise.configure_storage"
        )
    if not authority and scheme not in ("memory", "file", "local"):
        raise SourceError(f"names no bucket; expected {scheme}://bucket/prefix", path=url)
    key = path.strip("/")
    parts = key.split("/") if key else []
    if {"", ".", ".."} & set(parts) or any(unicodedata.category(c) in ("Cc", "Cs") for c in key):
        raise SourceError(
            "has a part that is empty, '.' or '..', or a control character; expected names as they "
            "are in the store",
            path=repr(url)[1:-1],
        )
    return Place(f"{scheme}://{authority}", key)


def _may_hold_credentials(scheme: str, authority: str, path: str) -> bool:
    if scheme in _BY_OBSTORE:
        user, at, host = authority.rpartition("@")
        if at and (":" in user or not scheme.startswith("abfs")):  # abfss://container@account…
            return True
        if ":" in host and not (
            scheme in ("http", "https") and re.fullmatch(r"[^:]*:\d+|\[.*\](:\d+)?", host)
        ):
            return True
        if scheme not in ("s3", "s3a", "gs") and re.search("[?#]", path):
            return True
    elif ":" in authority.rpartition("@")[0]:
        return True
    return _SIGNED.search(path) is not None


# ----------------------------------------------------------------------------------------------------
# Options of object stores, by URL, for all that this process reads and writes there.

#: Names of options and of environment variables whose values are credentials.
_SECRET = re.compile("secret|token|key|sas|password|credential|signature", re.IGNORECASE)
#: A shorter value is a word that texts have anyway.
_LEAST_SECRET_CHARS = 8

_BY_ROOT: dict[str, dict[str, Any]] = {}


def configure_storage(url: str, **options: Any) -> None:
    """Set options, such as credentials or an endpoint, for all URLs of one bucket in this process.

    Call it on every rank that uses the URL. Without it, a store is configured from the usual environment variables:
    ``AWS_ACCESS_KEY_ID``, ``AWS_PROFILE`` (with boto3 installed), ``AWS_ENDPOINT_URL``, ``AWS_REGION``,
    ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME`` and so on. A second call for the same bucket replaces the options of the first.

    ``options`` are the ones that obstore's stores take, with the same names: ``endpoint``, ``region``, ``access_key_id``,
    ``secret_access_key``, ``skip_signature`` (anonymous), ``credential_provider``, ``retry_config``, ``client_options``
    (``timeout``, ``connect_timeout``, ``proxy_url``, …). For other URLs, they're the options of the fsspec file system. Options are neither
    written to disk nor logged, and don't appear in reports or errors.

    Raises :class:`ValueError` for a path that isn't a URL, and :class:`SourceError` for a URL without a bucket, or with a user, a password
    or a query.

    Source: https://developmentseed.github.io/obstore/latest/api/store/
    """
    if not is_url(url):
        raise ValueError(f"configure_storage takes a URL like s3://bucket, got {url!r}")
    _BY_ROOT[place_of(url).root] = dict(options)


def options_of(root: str) -> dict[str, Any]:
    """The options that were set for a root."""
    return dict(_BY_ROOT.get(root, {}))


def secrets() -> list[str]:
    """The values of options and of environment variables whose names say that they are credentials, the longest first."""
    given = [item for options in _BY_ROOT.values() for item in _texts(options)]
    given += [item for item in os.environ.items() if item[0].startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_"))]
    found = {value for name, value in given if _SECRET.search(name) and len(value) >= _LEAST_SECRET_CHARS}
    return sorted(found, key=len, reverse=True)


def _texts(options: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _texts(value)
        elif isinstance(value, str):
            yield name, value


# ----------------------------------------------------------------------------------------------------
# Counts what this process asks stores for. Each store notes its own requests here; nothing else counts them.

P = ParamSpec("P")
T = TypeVar("T")

#: Names that one reply to a listing holds (S3).
LISTED_AT_ONCE = 1000

_lock = Lock()


@dataclass(slots=True, kw_only=True)
class Requests:
    """Requests to stores, by kind, and the bytes of objects in them."""

    lists: int = 0
    heads: int = 0
    gets: int = 0
    puts: int = 0
    """Objects written by one request."""
    uploads: int = 0
    """Objects written in parts: each costs one request that begins it, and one that completes it."""
    parts: int = 0
    deletes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def total(self) -> int:
        """All requests."""
        return self.lists + self.heads + self.gets + self.puts + 2 * self.uploads + self.parts + self.deletes

    def add(self, other: Requests) -> None:
        """Count ``other`` too."""
        for one in fields(other):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@frozen
class _Counter:
    found: Requests
    around: _Counter | None


_counter: ContextVar[_Counter | None] = ContextVar("requests", default=None)


@contextmanager
def counting() -> Iterator[Requests]:
    """Count the requests that this thread makes in the block, and those of :func:`counted_here`. May be nested.

    A request that the store's client makes again, because no reply came or a busy one, counts once.
    """
    found = Requests()
    token = _counter.set(_Counter(found, _counter.get()))
    try:
        yield found
    finally:
        _counter.reset(token)


def counted_here(call: Callable[P, T]) -> Callable[P, T]:
    """``call`` for another thread: its requests count where this thread's do."""
    counter = _counter.get()

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        token = _counter.set(counter)
        try:
            return call(*args, **kwargs)
        finally:
            _counter.reset(token)

    return run


def note(asked: Requests) -> None:
    """Count requests that a store makes now."""
    counter = _counter.get()
    with _lock:
        while counter is not None:
            counter.found.add(asked)
            counter = counter.around


# ----------------------------------------------------------------------------------------------------
# Listings of a store that obstore asks for: some objects at a time, with limits on their number, the time, and the memory of a reply.

_Ask = Callable[[Callable[[], list[Any]]], list[Any]]

#: Names directly below one folder, and objects below it at any depth, that one listing may have.
MOST_IN_FOLDER, MOST_BELOW = 2**17, 2**22
#: A name of an object: S3, Google Cloud Storage and Azure have this limit.
_MOST_KEY_BYTES = 1024
#: Objects that are taken from a page at a time.
_CHUNK = 100
#: So long a store may take for the next of them.
_PAGE_S = 120.0
#: Time limit for listing one level, where obstore returns all pages together.
_LEVEL_S = 600.0
#: After so many seconds, a listing is canceled once the process has grown by so many bytes: obstore buffers the whole reply.
_UNWATCHED_S, _MOST_GROWTH_BYTES = 1.0, 2**30
_LOOK_S = 0.05
#: The last character there is: no name sorts behind it.
_LAST = "\U0010ffff"
_loop: asyncio.AbstractEventLoop | None = None


class _Listing:
    """Objects below a folder in the store's order, a few at a time."""

    def __init__(self, client: Any, store: Any, folder: str) -> None:
        self._client, self._store, self._folder = client, store, folder
        self._after: str | None = None
        self._stream: Any = None
        self._given = 0

    @property
    def is_between_pages(self) -> bool:
        """Whether more objects need another request."""
        return self._given % LISTED_AT_ONCE == 0

    def more(self) -> list[Any]:
        """The next objects; fewer than ``_CHUNK`` are the last. May be called again after an error: no object is left out."""
        if self._stream is None:
            self._stream = self._client.list(
                self._store, self._folder or None, offset=self._after, chunk_size=_CHUNK
            )
        stream, self._stream = self._stream, None
        found: list[Any] = _within(_PAGE_S, lambda: anext(stream, []))
        if self.is_between_pages and (found or not self._given):
            note(Requests(lists=1))
        self._given += len(found)
        if found:
            self._after, self._stream = str(found[-1]["path"]), stream
        return found

    def skip_to(self, after: str) -> None:
        """Let the next page begin after this name."""
        self._after, self._stream, self._given = after, None, 0


def pages_below(client: Any, store: Any, folder: str, url: str, ask: _Ask) -> Iterator[list[Any]]:
    """All objects below a folder, at any depth; ``ask`` makes each request. Raises :class:`SourceError` for an endless listing."""
    return _pages(_Listing(client, store, folder), f"{folder}/" if folder else "", url, ask, skips=False)


def pages_of_level(client: Any, store: Any, folder: str, url: str, ask: _Ask) -> Iterator[list[Any]]:
    """As :func:`pages_below`, but of each subfolder only some objects.

    obstore's own listing of one level gives nothing before its last page, however many there are. Here what is left of a subfolder at the
    end of a page is skipped. For stores that list in the order of names.
    """
    return _pages(_Listing(client, store, folder), f"{folder}/" if folder else "", url, ask, skips=True)


def level(client: Any, store: Any, folder: str) -> Any:
    """List the objects and folders directly in a folder, all pages at once. Raises ``TimeoutError``."""
    return _within(_LEVEL_S, lambda: client.list_with_delimiter_async(store, folder or None))


def _pages(listing: _Listing, prefix: str, url: str, ask: _Ask, *, skips: bool) -> Iterator[list[Any]]:
    listed, skipped, firsts = 0, "", set[str]()
    while some := ask(listing.more):
        paths = [str(one["path"]) for one in some]
        if skipped and paths[0] <= skipped:  # the store does not begin where it is told to
            skips = False
        elif paths[0] in firsts or 2 * len(set(paths)) < len(paths):
            raise SourceError("the store lists the same objects again and again", path=url)
        _check_lengths(paths, url)
        yield [one for one in some if str(one["path"]).startswith(prefix)]
        listed, skipped = listed + len(paths), ""
        firsts.add(paths[0])
        if len(paths) < _CHUNK:
            return
        if listed > MOST_BELOW:
            raise SourceError(f"the store lists more than {MOST_BELOW} objects, which is the limit", path=url)
        name, slash, _ = paths[-1].removeprefix(prefix).partition("/")
        if skips and slash and listing.is_between_pages and paths[-1].startswith(prefix):
            skipped = f"{prefix}{name}/{_LAST}"
            listing.skip_to(skipped)


def _check_lengths(paths: list[str], url: str) -> None:
    longest = max(len(path.encode()) for path in paths)
    if longest > _MOST_KEY_BYTES:
        raise SourceError(
            f"the store lists a name of {longest} bytes, the limit is {_MOST_KEY_BYTES}", path=url
        )


@contextmanager
def no_panics() -> Iterator[None]:
    """Raise ``OSError`` for a panic of obstore in the block: a reply that it can't read. pyo3 doesn't derive those from ``Exception``."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ not in ("PanicException", "RustPanic"):  # which it doesn't export
            raise
        raise OSError(f"obstore can't read the reply ({error})") from error


def _within(seconds: float, call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call, which a thread of this module carries out: one that blocks could not be ended. Raises ``TimeoutError``."""

    async def limited() -> T:
        with no_panics():
            return await asyncio.wait_for(_watched(call()), seconds)

    waiting = asyncio.run_coroutine_threadsafe(limited(), _running())
    try:
        return waiting.result()
    except BaseException:
        waiting.cancel()
        raise


async def _watched(call: Awaitable[T]) -> T:
    """Await a call. Cancels it and raises ``OSError`` if the process grows too much meanwhile: obstore does not limit a reply's size."""
    listing = asyncio.ensure_future(call)
    began, before = time.monotonic(), _held_bytes()
    try:
        while not (await asyncio.wait({listing}, timeout=_LOOK_S))[0]:
            grown = _held_bytes() - before
            if time.monotonic() - began > _UNWATCHED_S and grown > _MOST_GROWTH_BYTES:
                raise OSError(
                    f"one reply does not end: this process grew by {grown} bytes while it waited, the limit is {_MOST_GROWTH_BYTES}"
                )
        return listing.result()
    finally:
        listing.cancel()


def _held_bytes() -> int:
    """Resident memory of this process without file pages; 0 on systems that don't report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            Thread(target=_loop.run_forever, name="shardwise listings", daemon=True).start()
        return _loop


# ----------------------------------------------------------------------------------------------------
# How often, and for how long, a call to a store is made again where its connection broke.

#: So often a call is made again. The store's client has tried several times before, where it could.
_RETRIES = 3
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
#: A call that began so long ago is not made again.
_LONGEST_S = 60.0


class Tries:
    """The tries of one call."""

    def __init__(self) -> None:
        self.failed = 0
        self._pause_s = _PAUSE_S
        self._until_s = time.monotonic() + _LONGEST_S

    def another(self) -> bool:
        """Count a failure. Whether the call may be made again; then it waits before it returns."""
        self.failed += 1
        if self.failed > _RETRIES or time.monotonic() > self._until_s:
            return False
        time.sleep(self._pause_s * random.Random(os.urandom(8)).uniform(0.5, 1.0))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


def again(call: Callable[[], T], is_lost: Callable[[Exception], bool]) -> T:
    """Make a call, and make it again after each error that ``is_lost`` takes for a broken connection. Raises the last one.

    For calls that may be carried out twice.
    """
    tries = Tries()
    while True:
        try:
            with no_panics():
                return call()
        except Exception as error:
            if not (is_lost(error) and tries.another()):
                raise
