"""Publishes a checkpoint in an object store, where nothing can be renamed: the manifest, written once and last, is the commit.

A save first claims its prefix by an object beside it, ``<prefix>.claim``, which the store makes only if there is none: so two saves never
write to one prefix. Then all ranks write their files under the final names. Rank 0 compares sizes, and writes the manifest, again only if there
is none. A reader sees no checkpoint before that. A save that was killed leaves its claim, which says when it began.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable
from types import TracebackType

from ..errors import CheckpointError, LockedError, SourceError
from ..format.manifest import MANIFEST_NAME, Manifest
from ..limits import brief, read_json
from ..ranks.patience import patiently
from ..storage import exists, files_below, is_file, join, place_of, store_of
from .complete import check_written, readable_text

__all__ = [
    "PROBE",
    "ObjectWriter",
    "claim",
    "commit_in_store",
    "delete_below",
    "discard_in_store",
    "refuse_without_conditions",
    "release",
]

_log = logging.getLogger(__name__)
_CLAIM = ".claim"
_MOST_CLAIM_BYTES = 4096
#: Name of an object that is made and deleted at once, to see what the store does with conditions.
PROBE = ".probe-"
_NO_CONDITIONS = (
    "the store has no conditional writes, without which two saves could mix; save to a local directory, and upload it with "
    "`shardwise copy`"
)
#: A piece of this size goes to the store's client at a time.
_PIECE_BYTES = 4 * 1024**2


class ObjectWriter:
    """Writes an object from front to back, as :class:`.FileWriter` a file; it appears when the block is left without an error.

    ``nbytes`` will be written, about: large objects need large parts. Memory: four parts of 8 MiB. Raises :class:`CheckpointError`.
    """

    def __init__(
        self, path: str, on_progress: Callable[[int], object] | None = None, *, expected_bytes: int = 0
    ) -> None:
        self.nbytes = 0
        self._on_progress = on_progress
        place = place_of(path)
        self._file = store_of(place.root).writer(place.key, expected_bytes)

    def __enter__(self) -> ObjectWriter:
        return self

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        for start in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            patiently(self._file.write, piece)
            self.nbytes += piece.nbytes
            if self._on_progress is not None:
                self._on_progress(piece.nbytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def close(self) -> None:
        """Let the object appear, after the last byte."""
        patiently(self._file.close)


def claim(url: str) -> None:
    """Take a prefix for one save. For rank 0.

    Raises :class:`CheckpointError` if something is there already, or if the store does not keep conditions of writes;
    :class:`LockedError` if another save has claimed it, or was killed.
    """
    place = place_of(url + _CLAIM)
    store = store_of(place.root)
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    own = json.dumps({"nonce": secrets.token_hex(8), "began": began}).encode()
    if not patiently(store.create, place.key, own):
        raise LockedError(
            f"{url}: claimed by another save ({_claimed(place.url)}), which is still running or was killed; if no save is running, delete {place.url} "
            f"and everything below {url}, or save to another URL"
        )
    try:
        # A store that does not know the condition takes every write.
        if patiently(store.create, place.key, own + b" "):
            raise CheckpointError(f"{url}: {_NO_CONDITIONS}")
        # Not before: a save that held the claim until now has published. The manifest by its name, because a listing may be late.
        if patiently(is_file, join(url, MANIFEST_NAME)) or patiently(exists, url):
            raise CheckpointError(f"{url}: exists already; published checkpoints are never overwritten")
    except BaseException:
        release(url)
        raise


def _claimed(url: str) -> str:
    with contextlib.suppress(SourceError, TypeError, KeyError):
        began = read_json(url, "claim", _MOST_CLAIM_BYTES)["began"]
        return f"since {brief(began).strip(chr(39))}"
    return "it can't be read"


def commit_in_store(url: str, manifest: Manifest) -> None:
    """Publish: after every rank wrote its files. For rank 0.

    Raises :class:`CheckpointError` if the objects are not exactly the manifest's, if :func:`.read_manifest` would refuse its text, or if
    there is a manifest already.
    """
    below = patiently(files_below, url, manifest.files)
    check_written(
        url, {name: stat.nbytes for name, stat in below.items() if stat is not None}, manifest.files
    )
    text = readable_text(manifest, url)
    place = place_of(join(url, MANIFEST_NAME))
    if not patiently(store_of(place.root).create, place.key, text):
        raise CheckpointError(f"{url}: was published by another program, and can't be written again")


def delete_below(url: str) -> None:
    """Delete all objects below ``url``, the manifest first: what is half deleted is no checkpoint.

    Raises :class:`SourceError`, :class:`CheckpointError`.
    """
    others = [name for name in patiently(files_below, url) if name != MANIFEST_NAME]
    for name in (MANIFEST_NAME, *others):  # the manifest also where a listing is late and does not show it
        place = place_of(join(url, name))
        patiently(store_of(place.root).delete, place.key)


def discard_in_store(url: str) -> bool:
    """As :func:`delete_below`, for what a failed save has written. Returns whether all is deleted; if not, logs why."""
    try:
        delete_below(url)
    except (SourceError, CheckpointError) as error:
        _log.warning("a save failed, and what it wrote to %s can't be deleted: %s", url, error)
        return False
    return True


def release(url: str) -> None:
    """Give up the claim of :func:`claim`. A failure is logged: the next save to that place will say what to delete."""
    place = place_of(url + _CLAIM)
    try:
        patiently(store_of(place.root).delete, place.key)
    except CheckpointError as error:
        _log.warning("%s can't be deleted: %s", place.url, error)


def refuse_without_conditions(url: str) -> None:
    """Raise :class:`CheckpointError` if the store does not keep conditions of writes. Writes and deletes one small object below ``url``."""
    place = place_of(join(url, f"{PROBE}{secrets.token_hex(8)}"))
    store = store_of(place.root)
    first, second = (secrets.token_hex(8).encode() for _ in range(2))
    try:
        keeps = patiently(store.create, place.key, first) and not patiently(store.create, place.key, second)
        held = patiently(store.get, place.key, _MOST_CLAIM_BYTES)
        keeps = keeps and held is not None and patiently(store.replace, place.key, second, held)
        keeps = keeps and held is not None and not patiently(store.replace, place.key, first, held)
    finally:
        with contextlib.suppress(CheckpointError):
            patiently(store.delete, place.key)
    if not keeps:
        raise CheckpointError(f"{url}: {_NO_CONDITIONS}")
