"""Listings of a store that obstore asks for: some objects at a time, with limits on their number, the time, and the memory of a reply."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from threading import Lock, Thread
from typing import Any, TypeVar

from ..errors import SourceError
from .requests import LISTED_AT_ONCE, Requests, note

__all__ = ["MOST_BELOW", "MOST_IN_FOLDER", "level", "pages_below", "pages_of_level"]

T = TypeVar("T")
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

_lock = Lock()
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


def _within(seconds: float, call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call, which a thread of this module carries out: one that blocks could not be ended. Raises ``TimeoutError``."""

    async def limited() -> T:
        try:
            return await asyncio.wait_for(_watched(call()), seconds)
        except Exception as error:
            if type(error).__name__ != "RustPanic":  # obstore's runtime does not export the class
                raise
            raise OSError(f"obstore can't read the reply ({error})") from error

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
