"""Publishes a step in parts: each host's own directory gets the files of its ranks, and the manifest, under one name."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable

import xxhash

from ..errors import CheckpointError, ShardwiseError
from ..format.manifest import MANIFEST_NAME, Manifest, Place, parse_manifest
from ..format.places import files_by_place
from ..limits import read_small
from ..objects import frozen
from ..ranks.patience import patiently
from .complete import readable_text
from .marks import mark, remove_ours
from .publish import appear, leftovers, make_temporary, seal_part
from .write import fsync_directory

__all__ = ["PartTarget", "SealedPart", "delete_sealed", "digest_of", "sealed_parts", "settle"]

_log = logging.getLogger(__name__)
#: As :func:`.temporary_beside` makes it.
_TEMPORARY = re.compile(r"\.tmp-(?P<final>.+)-[0-9a-f]{16}")


class PartTarget:
    """One part of a checkpoint to be. The first rank of each place calls its methods.

    1. Rank 0's :meth:`begin`, and then :meth:`follow` of the others with the name that it drew.
    2. When all files are written, :meth:`text_of` on rank 0, and :meth:`seal` with that text at every place.
    3. When every place has sealed its part, :meth:`appear`. So a host that is lost before leaves no part, and one that is lost here
       leaves a step that only some places hold, and a sealed part under its temporary name. :func:`settle` gives it its name at the
       next start: all parts were sealed, so all are whole.
    """

    def __init__(self, final: str, places: tuple[Place, ...], own: int) -> None:
        """``own``: the number of this rank's place among ``places``."""
        self.final, self.places = final, places
        self._own = own
        self._temporary: str | None = None
        self._is_sealed = False

    @property
    def leader(self) -> int:
        """The rank that calls the methods for this part."""
        return min(self.places[self._own].ranks)

    def begin(self, folders: Iterable[str]) -> str:
        """Make a temporary directory with a fresh name. Raises :class:`CheckpointError`."""
        self._refuse_published()
        self._temporary = make_temporary(self.final, folders)
        return self._temporary

    def beside(self, first: str) -> str:
        """The path at this place of the temporary directory that rank 0 has at ``first``. On every rank."""
        return os.path.join(os.path.dirname(self.final), os.path.basename(first))

    def follow(self, first: str, folders: Iterable[str]) -> None:
        """Make the same directory here. Raises :class:`CheckpointError`."""
        if self._temporary is not None:
            return
        self._refuse_published()
        path = self._temporary = self.beside(first)
        try:
            patiently(os.makedirs, path, exist_ok=True)
            mark(path)
            for folder in folders:
                patiently(os.makedirs, os.path.join(path, folder), exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be created: {error.strerror}") from error

    def _refuse_published(self) -> None:
        if os.path.lexists(self.final):
            raise CheckpointError(
                f"{self.final}: exists already; published checkpoints are never overwritten"
            )

    def text_of(self, manifest: Manifest) -> bytes:
        """The text that every place gets. Raises :class:`CheckpointError` if no reader would take it."""
        return readable_text(manifest, self.final)

    def seal(self, text: bytes) -> None:
        """Complete the part, but for its name. Raises :class:`CheckpointError` if the files are not those of the manifest."""
        assert self._temporary is not None
        manifest = parse_manifest(text, self.final)
        names = files_by_place(manifest)[self._own]
        seal_part(self._temporary, text, {name: manifest.files[name] for name in names})
        self._is_sealed = len(self.places) > 1

    def unseal(self) -> None:
        """No part of this step appears: not every place has sealed its part, and all ranks know."""
        self._is_sealed = False

    def appear(self) -> None:
        """Publish the part. Raises :class:`CheckpointError`, :class:`LockedError`."""
        assert self._temporary is not None
        appear(self._temporary, self.final)
        self._temporary = None

    def commit(self, manifest: Manifest) -> None:
        """One place alone can't publish."""
        raise NotImplementedError("a part is sealed, and then appears")

    def discard(self) -> None:
        """Delete what was written, unless it was published, or is sealed: other parts may have appeared."""
        if self._temporary is not None and not self._is_sealed:
            _delete(self._temporary)


@frozen
class SealedPart:
    """A part that a killed or failed save left complete, but for its name."""

    name: str
    """Of the directory that holds it."""
    digest: str
    """Of the manifest's text."""
    places: list[str]
    """The ids of the places that have a part."""

    @property
    def final(self) -> str:
        """The name that it gets when it is published."""
        match = _TEMPORARY.fullmatch(self.name)
        assert match is not None
        return match["final"]


def sealed_parts(root: str) -> list[SealedPart]:
    """The sealed parts in a directory. Rank-local."""
    found = []
    for name in leftovers(root):
        if _TEMPORARY.fullmatch(name) and (one := _sealed_part(root, name)) is not None:
            found.append(one)
    return found


def delete_sealed(root: str, final: str | None = None) -> None:
    """Delete the sealed parts in a directory; with ``final`` those that would get that name. Rank-local.

    Logs what fails, for a save that is published already.
    """
    try:
        parts = sealed_parts(root)
    except CheckpointError as error:
        _log.warning("no sealed part is deleted: %s", error)
        return
    for part in parts:
        if final in (None, part.final):
            _delete(os.path.join(root, part.name))


def _delete(path: str) -> None:
    """Delete a part, which gets a name of trash first, durably: what a deletion that is cut leaves is no sealed part. What can't be deleted
    stays."""
    folder, name = os.path.split(path)
    trash = os.path.join(folder, name.replace(".tmp-", ".trash-", 1))  # the nonce stays that of the note
    try:
        patiently(os.rename, path, trash)
        fsync_directory(folder)
    except FileNotFoundError:
        return
    except (OSError, CheckpointError) as error:
        _log.warning("%s: can't be deleted: %s", path, error)
        return
    remove_ours(trash)


def _sealed_part(root: str, name: str) -> SealedPart | None:
    path = os.path.join(root, name)
    try:
        manifest, digest = _manifest_at(path)
    except ShardwiseError:  # none, or not all of it
        return None
    return SealedPart(name, digest, [p.id for p in manifest.places]) if manifest.places else None


def digest_of(path: str) -> str:
    """The digest of the manifest of a published checkpoint; empty if there is none. Rank-local."""
    try:
        return _manifest_at(path)[1]
    except ShardwiseError:  # a resume says so
        return ""


def _manifest_at(path: str) -> tuple[Manifest, str]:
    text = read_small(os.path.join(path, MANIFEST_NAME), "manifest")
    return parse_manifest(text, path), xxhash.xxh3_64_hexdigest(text)


def settle(root: str, part: SealedPart, *, appears: bool) -> None:
    """Give a sealed part its name, or delete it. Raises as :meth:`PartTarget.appear`."""
    path, final = os.path.join(root, part.name), os.path.join(root, part.final)
    if appears and not os.path.lexists(final):
        appear(path, final)
    else:
        _delete(path)
