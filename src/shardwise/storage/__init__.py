"""Where the bytes of a source are: local directories, and object stores by URL.  Everything above this room gives a path. A path
that begins with a scheme and ``://`` is a URL, and its bytes come from the store that it names; any other path is a local one,
and goes to the operating system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field

from ..errors import FormatError, SourceError
from ..objects import frozen
from .records import (
    Held,
    Listing,
    Moved,
    Place,
    Requests,
    Stat,
    Store,
    configure_storage,
    counted_here,
    counting,
    is_url,
    join,
    place_of,
)
from .stores import fetch, store_of

__all__ = [
    "Held",
    "Listing",
    "Moved",
    "Place",
    "Requests",
    "Stat",
    "Store",
    "absolute",
    "bytes_below",
    "configure_storage",
    "counted_here",
    "counting",
    "exists",
    "fetch",
    "files_below",
    "files_in",
    "folders_in",
    "is_directory",
    "is_file",
    "is_url",
    "join",
    "looking_once",
    "names_in",
    "place_at",
    "place_of",
    "read_range",
    "read_whole",
    "real",
    "stat_of",
    "stat_of_expected",
    "store_of",
]


# ----------------------------------------------------------------------------------------------------
# Looks at paths, local or URLs: files, folders, sizes, bytes of small files.


@frozen
class _Seen:
    base: str
    listings: dict[str, Listing] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    """Folders that this process may not list."""

    def lists(self, url: str) -> bool:
        """Whether a folder lies at or below the base: this process may have no right to list others."""
        return url == self.base or url.startswith(f"{self.base}/")


_FOLDED = re.compile(r"(s3a?|gs|az|abfss?|hf|https?):/(?!/)")
_seen: ContextVar[_Seen | None] = ContextVar("seen", default=None)


@contextmanager
def looking_once(path: str) -> Iterator[None]:
    """In this block, each folder at or below a URL is listed at most once: looks at its objects cost no further request.

    Does nothing for a local path, and within another such block.
    """
    if _seen.get() is not None or not is_url(path):
        yield
        return
    token = _seen.set(_Seen(place_of(path).url))
    try:
        yield
    finally:
        _seen.reset(token)


def is_file(path: str) -> bool:
    """As ``os.path.isfile``, of URLs too. Raises :class:`SourceError` if a store can't be asked."""
    return stat_of(path) is not None if is_url(path) else os.path.isfile(path)


def is_directory(path: str) -> bool:
    """As ``os.path.isdir``; a URL is a directory if there is an object below it."""
    if not is_url(path):
        return os.path.isdir(path)
    listing = _listing(path)
    return bool(listing and (listing.files or listing.folders))


def exists(path: str) -> bool:
    """As ``os.path.exists``, of URLs too."""
    return is_file(path) or is_directory(path) if is_url(path) else os.path.exists(path)


def names_in(path: str) -> list[str]:
    """As ``os.listdir``, of URLs too: names of objects and of prefixes. Raises ``OSError`` or :class:`SourceError`."""
    if not is_url(path):
        return os.listdir(path)
    listing = _listed(path)
    return [*dict.fromkeys([*listing.files, *listing.folders])]


def files_in(url: str) -> Mapping[str, Stat]:
    """The objects directly below a URL, by name. Raises :class:`SourceError`."""
    return _listed(url).files


def folders_in(url: str) -> frozenset[str]:
    """The prefixes directly below a URL. Raises :class:`SourceError`."""
    return _listed(url).folders


def _listed(url: str) -> Listing:
    listing = _listing(url)
    if listing is None:
        raise SourceError("the store does not list its objects; give the URL of one file", path=url)
    return listing


def stat_of(path: str) -> Stat | None:
    """Size and version of a file or an object; None if there is none, or if it can't be looked at by this process."""
    if not is_url(path):
        try:
            return Stat(os.stat(path).st_size)
        except OSError:
            return None
    place = place_of(path)
    if not place.key:
        return None
    folder, _, name = place.key.rpartition("/")
    above = join(place.root, folder) if folder else place.root
    seen = _seen.get()
    if seen is not None and seen.lists(above) and above not in seen.refused:
        try:
            listing = _listing(above)
        except SourceError:  # who may read an object may not list its folder
            listing = None
            seen.refused.add(above)
        if listing is not None:
            return listing.files.get(name)
    return store_of(place.root).stat(place.key)


def stat_of_expected(path: str) -> Stat | None:
    """As :func:`stat_of`, for a file that should be there: one that is missing in a listing, which may be late, is asked for by name."""
    found = stat_of(path)
    if found is None and _seen.get() is not None and is_url(path):
        place = place_of(path)
        found = store_of(place.root).stat(place.key)
    return found


def _listing(url: str) -> Listing | None:
    """What lies below a URL; None if the store does not let this process list it."""
    place, seen = place_of(url), _seen.get()
    if seen is not None and place.url in seen.listings:
        return seen.listings[place.url]
    if place.scheme in ("http", "https"):
        return None
    found = store_of(place.root).list(place.key)
    if seen is not None:
        seen.listings[place.url] = found
    return found


def absolute(path: str | os.PathLike[str]) -> str:
    """As ``os.path.abspath``; a URL without a slash at its end. Raises :class:`SourceError` for a URL that lost a slash."""
    path = os.fspath(path)
    if _FOLDED.match(path):
        raise SourceError(
            "is a URL with one slash, as path objects make it; give the URL as a text", path=path
        )
    return place_of(path).url if is_url(path) else os.path.abspath(path)


def place_at(path: str | os.PathLike[str]) -> str:
    """A caller's path without ``~`` and ``..``, or its URL."""
    path = os.fspath(path)
    return absolute(path if is_url(path) else os.path.expanduser(path))


def real(path: str) -> str:
    """A path without links, or a URL, to see whether two are one place."""
    return path if is_url(path) else os.path.realpath(path)


def files_below(path: str, expected: Iterable[str] = ()) -> dict[str, Stat | None]:
    """Every file below a directory or URL, by relative name with slashes. None for local files, which were not looked at.

    Of a store, names that are ``expected`` and missing in its listing, which may be late, are asked for one by one. Local folders that can't be read are left out. Raises :class:`SourceError` if a store can't be asked.
    """
    if not is_url(path):
        return {
            os.path.relpath(os.path.join(folder, name), path).replace(os.sep, "/"): None
            for folder, _, names in os.walk(path)
            for name in names
        }
    found: dict[str, Stat | None] = {}
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        listing = _listed(join(path, folder.rstrip("/")) if folder else path)
        found |= {f"{folder}{name}": stat for name, stat in listing.files.items()}
        waiting += [f"{folder}{name}/" for name in listing.folders]
    for name in set(expected) - found.keys():
        if (stat := stat_of_expected(join(path, name))) is not None:
            found[name] = stat
    return found


def bytes_below(path: str) -> tuple[int, int]:
    """The number of files below a directory or URL, and their bytes, by listing. Rank-local.

    A store also keeps parts of unfinished uploads, and versions of objects that were replaced or deleted: no listing shows them. Raises
    as :func:`files_below`.
    """
    if is_url(path):
        place = place_of(path)
        objects = nbytes = 0
        for _, stat in store_of(place.root).list_below(place.key):
            objects, nbytes = objects + 1, nbytes + stat.nbytes
        return objects, nbytes
    found = [stat_of(join(path, name)) for name in files_below(path)]
    return len(found), sum(stat.nbytes for stat in found if stat is not None)


def read_range(url: str, start: int, stop: int, *, version: str | None = None) -> bytes:
    """Bytes of an object. Raises as :func:`fetch`."""
    content = bytearray(stop - start)
    fetch(url, start, memoryview(content), version=version)
    return bytes(content)


def read_whole(url: str, most_bytes: int, what: str = "object") -> bytes:
    """A small object. Raises :class:`SourceError` if there is none, :class:`FormatError` if it has more bytes."""
    stat = stat_of_expected(url)
    if stat is None:
        raise SourceError("can't be read: no such object", path=url) from FileNotFoundError(url)
    if stat.nbytes > most_bytes:
        raise FormatError(f"{what} has {stat.nbytes} bytes, the limit is {most_bytes}", path=url)
    return read_range(url, 0, stat.nbytes, version=stat.version)
