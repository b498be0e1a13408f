"""Where one checkpoint is published: ranks write into a place that no reader takes for a checkpoint, until rank 0 commits it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

from ..errors import CheckpointError
from ..format.manifest import Manifest, Place
from ..storage import is_url
from .in_store import claim, commit_in_store, discard_in_store, release
from .marks import remove_ours
from .publish import commit, make_temporary

__all__ = ["DirectoryTarget", "ObjectTarget", "Target", "target_of"]


class Target(Protocol):
    """One checkpoint to be. Every rank makes one; rank 0 alone calls its methods, but for :class:`.part_target.PartTarget`."""

    @property
    def final(self) -> str:
        """The path of the checkpoint."""

    @property
    def places(self) -> tuple[Place, ...]:
        """The directories of several hosts, each of which gets a part; empty for one place."""

    def begin(self, folders: Iterable[str]) -> str:
        """Take the place, and make these folders in it. Returns the path that every rank writes below.

        Raises :class:`CheckpointError` if something is there already, :class:`LockedError` if another save has taken it.
        """

    def commit(self, manifest: Manifest) -> None:
        """Publish, after every rank wrote its files.

        Raises :class:`CheckpointError` if the files are not exactly the manifest's, or no reader would take it.
        """

    def discard(self) -> None:
        """Delete what was written, after :meth:`begin` and a failure, unless it was published. Logs what can't be deleted."""


def target_of(path: str) -> Target:
    """A directory, or the objects below a URL."""
    return ObjectTarget(path) if is_url(path) else DirectoryTarget(path)


class DirectoryTarget:
    """A directory, which appears by a rename."""

    places: tuple[Place, ...] = ()

    def __init__(self, final: str) -> None:
        self.final = final
        self._temporary: str | None = None

    def begin(self, folders: Iterable[str]) -> str:
        if os.path.lexists(self.final):
            raise CheckpointError(
                f"{self.final}: exists already; published checkpoints are never overwritten"
            )
        self._temporary = make_temporary(self.final, folders)
        return self._temporary

    def commit(self, manifest: Manifest) -> None:
        assert self._temporary is not None
        commit(self._temporary, self.final, manifest)

    def discard(self) -> None:
        if self._temporary is not None:
            remove_ours(self._temporary)


class ObjectTarget:
    """Objects of a store under the names of a checkpoint directory, by a claim and the manifest: see :mod:`.in_store`."""

    places: tuple[Place, ...] = ()

    def __init__(self, final: str) -> None:
        self.final = final
        self._claimed = False

    def begin(self, folders: Iterable[str]) -> str:
        claim(self.final)
        self._claimed = True
        return self.final

    def commit(self, manifest: Manifest) -> None:
        commit_in_store(self.final, manifest)
        self._claimed = False  # it is published: a failure of another rank deletes nothing
        release(self.final)

    def discard(self) -> None:
        if self._claimed and discard_in_store(self.final):
            release(self.final)
