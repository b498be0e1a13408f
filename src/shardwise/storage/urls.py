"""URLs of object stores: ``s3://bucket/prefix``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import SourceError

__all__ = ["Place", "is_url", "join", "place_of"]

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/]*)(?P<path>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
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
    return f"{url.rstrip('/')}/{name}"


def place_of(url: str) -> Place:
    """The parts of a URL. Names are taken as they stand: ``%20`` is three characters, not a space.

    Raises :class:`SourceError` for a URL that is not one of an object: without a bucket, with a password, a query or a
    fragment, or with a part that is empty, ``.`` or ``..``. Its text does not repeat a password.
    """
    found = _URL.fullmatch(url)
    assert found is not None, "not a URL"
    scheme, authority, path = found["scheme"].lower(), found["authority"], found["path"]
    user, at, _ = authority.rpartition("@")
    if at and ":" in user:
        raise SourceError(
            f"a {scheme} URL with a password in it; give credentials by the store's environment variables or "
            f"shardwise.storage_options"
        )
    if not authority and scheme not in ("memory", "file", "local"):
        raise SourceError(f"names no bucket; expected {scheme}://bucket/prefix", path=url)
    if scheme in ("http", "https") and re.search("[?#]", path):
        bare = re.split("[?#]", url)[0]
        raise SourceError(
            "has a query or a fragment, which may hold a credential; give it without", path=bare
        )
    key = path.strip("/")
    parts = key.split("/") if key else []
    if {"", ".", ".."} & set(parts) or any(not c.isprintable() for c in key):
        raise SourceError(
            "has a part that is empty, '.' or '..', or a character that can't be printed; expected names as they "
            "stand in the store",
            path=repr(url)[1:-1],
        )
    return Place(f"{scheme}://{authority}", key)
