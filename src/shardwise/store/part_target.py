"""Publishes a step in parts: each host's own directory gets the files of its ranks, and the manifest, under one name."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..errors import CheckpointError
from ..format.manifest import Manifest, Place, parse_manifest
from ..format.places import files_by_place
from ..ranks.patience import patiently, remove_tree
from .complete import readable_text
from .publish import appear, make_temporary, seal_part

__all__ = ["PartTarget"]


class PartTarget:
    """One part of a checkpoint to be. The first rank of each place calls its methods.

    1. Rank 0's :meth:`begin`, and then :meth:`follow` of the others with the name that it drew.
    2. When all files are written, :meth:`text_of` on rank 0, and :meth:`seal` with that text at every place.
    3. When every place has sealed its part, :meth:`appear`. So a host that is lost before leaves no part, and one that is lost here
       leaves a step that only some places hold; no resume takes it.
    """

    def __init__(self, final: str, places: tuple[Place, ...], own: int) -> None:
        """``own``: the number of this rank's place among ``places``."""
        self.final, self.places = final, places
        self._own = own
        self._temporary: str | None = None

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

    def appear(self) -> None:
        """Publish the part. Raises :class:`CheckpointError`, :class:`LockedError`."""
        assert self._temporary is not None
        appear(self._temporary, self.final)
        self._temporary = None

    def commit(self, manifest: Manifest) -> None:
        """One place alone can't publish."""
        raise NotImplementedError("a part is sealed, and then appears")

    def discard(self) -> None:
        """Delete what was written, unless it was published."""
        if self._temporary is not None:
            remove_tree(self._temporary)
