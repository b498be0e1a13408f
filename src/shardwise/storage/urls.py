"""URLs of object stores: ``s3://bucket/prefix``."""

from __future__ import annotations

import re
import unicodedata

from ..errors import SourceError
from ..objects import frozen

__all__ = ["Place", "is_url", "join", "place_of", "without_queries"]

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
