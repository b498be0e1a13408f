"""The store that a URL names, and reads from it that continue where a connection was cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

from ..errors import IntegrityError, SourceError
from .records import Cut, Moved, Stat, Store, Tries, options_of, place_of

#: After so many bytes, a read may be cut as often again, and take as long.
_PROGRESS_BYTES = 64 * 1024

#: URLs of these schemes are read by obstore, all others by fsspec.
OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https")

_lock = Lock()
_stores: dict[tuple[str, str], Store] = {}


def store_of(root: str) -> Store:
    """The store of a URL's :attr:`.Place.root`, with the options of the last :func:`configure_storage`.

    Raises :class:`SourceError`: the package for this scheme is not installed, an option is unknown.
    """
    options = options_of(root)
    key = root, repr(sorted(options.items(), key=lambda item: item[0]))
    with _lock:
        if key not in _stores:
            _stores[key] = _opened(root, options)
        return _stores[key]


def _opened(root: str, options: Mapping[str, Any]) -> Store:
    """A store, by the client that knows its scheme; only that client is imported."""
    if root.partition("://")[0] in OBSTORE_SCHEMES:
        from .by_obstore import ObstoreStore

        return ObstoreStore(root, options)
    from .other_clients import FsspecStore

    return FsspecStore(root, options)


def fetch(
    url: str,
    start: int,
    view: memoryview,
    *,
    version: str | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Stat | None:
    """Fill ``view`` with the bytes from ``start`` on of the object at ``url``; returns the object as the store described it.

    ``version``: of the object when it was first looked at. A connection that was cut is made again, and goes on where it was.
    Raises :class:`Moved` if the object has another version, :class:`IntegrityError` if it is gone or too short,
    :class:`SourceError`.
    """
    place = place_of(url)
    store = store_of(place.root)
    done, cut_at, tries = 0, 0, Tries()
    found: Stat | None = None
    while done < view.nbytes:
        try:
            found, chunks = store.read(place.key, start + done, start + view.nbytes)
            _check(found, version, start + view.nbytes, url)
            version = version or (found.version if found else None)
            for chunk in chunks:
                part = memoryview(chunk).cast("B")
                if part.nbytes > view.nbytes - done:
                    raise IntegrityError("the store sent more bytes than were asked for", path=url)
                view[done : done + part.nbytes] = part
                done += part.nbytes
                if on_progress is not None:
                    on_progress(part.nbytes)
            if done < view.nbytes:
                raise Cut("the body ended early")
        except FileNotFoundError as error:
            raise IntegrityError("lost: no such object", path=url) from error
        except Cut as error:
            if done - cut_at >= _PROGRESS_BYTES:
                tries = Tries()
            cut_at = done
            if not tries.another():
                raise SourceError(
                    f"reading {view.nbytes} bytes at {start} failed {tries.failed} times, the last time after {done} bytes: {error}",
                    path=url,
                ) from None
    return found


def _check(found: Stat | None, version: str | None, stop: int, url: str) -> None:
    """Refuse bytes of another object than the one that was first looked at."""
    if found is None:
        return
    if version is not None and found.version is not None and found.version != version:
        raise Moved(
            "was replaced while it was read: its bytes would be mixed with those of the object before; read it again",
            path=url,
        )
    if found.nbytes < stop:
        raise IntegrityError(f"has {found.nbytes} bytes, but {stop} were expected: truncated", path=url)
