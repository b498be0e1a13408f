"""Publishes a step in parts: each host's own directory gets the files of its ranks, and the manifest, under one name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from ..errors import CheckpointError, ShardwiseError
from ..format.manifest import MANIFEST_NAME, Manifest, Place, parse_manifest
from ..format.places import files_by_place
from ..limits import read_small
from ..ranks.patience import patiently, remove_tree
from .complete import readable_text
from .publish import appear, leftovers, make_temporary, seal_part, step_name

__all__ = ["PartTarget", "SealedPart", "delete_sealed", "digest_of_step", "sealed_parts", "settle"]


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
            for folder in ("", *folders):
                patiently(os.makedirs, os.path.join(path, folder), exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be created: {error.strerror}") from error

    def _refuse_published(self) -> None:
        if os.path.lexists(self.final):
            raise CheckpointError(
                f"{self.final}: is there already; a published checkpoint is never written again"
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
            remove_tree(self._temporary)


@dataclass(frozen=True, slots=True)
class SealedPart:
    """A part that a killed or failed save left complete, but for its name."""

    name: str
    """Of the directory that holds it."""
    step: int
    digest: str
    """Of the manifest's text."""
    places: list[str]
    """The ids of the places that have a part."""


def sealed_parts(root: str) -> list[SealedPart]:
    """The sealed parts in a directory. Rank-local."""
    found = []
    for name in leftovers(root):
        if name.startswith(".tmp-step-") and (one := _sealed_part(root, name)) is not None:
            found.append(one)
    return found


def delete_sealed(root: str) -> None:
    """Delete the sealed parts in a directory. Rank-local."""
    for part in sealed_parts(root):
        remove_tree(os.path.join(root, part.name))


def _sealed_part(root: str, name: str) -> SealedPart | None:
    path = os.path.join(root, name)
    try:
        manifest, digest = _manifest_at(path)
    except ShardwiseError:  # none, or not all of it
        return None
    return (
        SealedPart(name, manifest.step, digest, [p.id for p in manifest.places]) if manifest.places else None
    )


def digest_of_step(root: str, step: int) -> str:
    """The digest of the manifest of a published step; empty if there is none. Rank-local."""
    try:
        return _manifest_at(os.path.join(root, step_name(step)))[1]
    except ShardwiseError:  # a resume says so
        return ""


def _manifest_at(path: str) -> tuple[Manifest, str]:
    text = read_small(os.path.join(path, MANIFEST_NAME), "manifest")
    return parse_manifest(text, path), xxhash.xxh3_64_hexdigest(text)


def settle(root: str, part: SealedPart, *, appears: bool) -> None:
    """Give a sealed part its name, or delete it. Raises as :meth:`PartTarget.appear`."""
    path, final = os.path.join(root, part.name), os.path.join(root, step_name(part.step))
    if appears and not os.path.lexists(final):
        appear(path, final)
    else:
        remove_tree(path)
