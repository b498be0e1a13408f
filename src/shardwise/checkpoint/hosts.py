"""Whose directories the checkpoints of Accelerate and the Trainer lie in: one for all ranks, or one on each host (``local=True``).

What the two do with directories goes through one of these, and is the same code for both.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

from ..errors import CheckpointError, ShardwiseError, is_damage
from ..planning import IOOptions
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..storage import is_url
from ..store.part_target import PartTarget
from ..store.target import Target
from .local_parts import find_parts, opened
from .local_places import LocalPlaces, id_of_place
from .parts import settle_parts

__all__ = ["Hosts", "LocalHosts", "OneForAll", "Opened", "hosts_of"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Opened(Protocol):
    """A checkpoint while it is read."""

    @property
    def path(self) -> str:
        """Where this rank reads it."""

    @property
    def io(self) -> IOOptions:
        """How this rank reads it."""

    def bring(self, state: TrainState) -> None:
        """Before tensors of ``state`` are read. Collective."""


class Hosts(Protocol):
    """Every rank makes one. Its methods are collective but for :meth:`target`, and raise alike on all ranks.

    ``root``: the directory or URL in which the checkpoints lie, on this rank's host.
    """

    is_local: bool

    def on_each(self, root: str, label: str, work: Callable[[], _T]) -> list[_T]:
        """Run ``work`` on one rank of each host that has directories of its own, else on rank 0; the results on every rank."""

    def on_own(self, root: str, label: str, work: Callable[[], _T]) -> _T:
        """As :meth:`on_each`; the result of this rank's host."""

    def target(self, target: Target) -> Target:
        """Where this rank's host publishes what all would publish at ``target``. After a call with its root."""

    def settle(self, root: str, *, is_held: bool) -> None:
        """Publish or delete what killed saves left in directories of the hosts' own, as :func:`.settle_parts`."""

    def holds(self, path: str) -> bool:
        """Whether hosts with directories of their own hold all parts of a checkpoint, as far as a check without payload can tell; says
        why not. True for a directory of all: its reader finds damage. Raises :class:`CheckpointError` if a host that has a part is away."""

    def opened(
        self, path: str, step: int | None = None, also: Callable[[str], bool] = lambda name: False
    ) -> AbstractContextManager[Opened]:
        """A checkpoint, open for the block. ``also``: files that each host needs beside the documents.

        Raises damage as :func:`.is_damage` says, :class:`CheckpointError` if a host that has a part is away; for one directory of all
        the reader finds damage.
        """


class _AsItIs:
    """A checkpoint that every rank reads at its path."""

    def __init__(self, path: str) -> None:
        self.path, self.io = path, IOOptions()

    def bring(self, state: TrainState) -> None:
        """Nothing: all of it is there."""


class OneForAll:
    """Directories that all ranks see, or stores."""

    is_local = False

    def on_each(self, root: str, label: str, work: Callable[[], _T]) -> list[_T]:
        return [self.on_own(root, label, work)]

    def on_own(self, root: str, label: str, work: Callable[[], _T]) -> _T:
        return Ranks.current().on_first(label, work)

    def target(self, target: Target) -> Target:
        return target

    def settle(self, root: str, *, is_held: bool) -> None:
        """Nothing."""

    def holds(self, path: str) -> bool:
        return True

    @contextmanager
    def opened(
        self, path: str, step: int | None = None, also: Callable[[str], bool] = lambda name: False
    ) -> Iterator[Opened]:
        yield _AsItIs(path)


class LocalHosts:
    """A directory on each host: see :class:`.LocalDirectories`."""

    is_local = True

    def __init__(self) -> None:
        self._met: dict[str, LocalPlaces] = {}

    def _at(self, root: str) -> LocalPlaces:
        """The hosts of the run, which meet in their directories when they use them first. Collective."""
        if is_url(root):
            raise CheckpointError(
                f"{root}: local=True keeps checkpoints on the hosts' own disks; give a directory"
            )
        if root not in self._met:
            ranks = Ranks.current()
            at = LocalPlaces(root, ranks)
            at.with_ids(at.on_each("name places", lambda: id_of_place(root), ranks))
            self._met[root] = at
        return self._met[root]

    def on_each(self, root: str, label: str, work: Callable[[], _T]) -> list[_T]:
        return self._at(root).on_each(label, work, Ranks.current())

    def on_own(self, root: str, label: str, work: Callable[[], _T]) -> _T:
        return self.on_each(root, label, work)[self._at(root).own]

    def target(self, target: Target) -> Target:
        at = self._met[os.path.dirname(target.final)]
        return PartTarget(target.final, at.places, at.own)

    def settle(self, root: str, *, is_held: bool) -> None:
        settle_parts(root, self._at(root), Ranks.current(), is_held=is_held)

    def holds(self, path: str) -> bool:
        ranks = Ranks.current()
        try:
            find_parts(path, None, self._at(os.path.dirname(path)), ranks)
        except ShardwiseError as error:
            if not is_damage(error):
                raise
            if ranks.rank == 0:
                _log.warning("skipping %s: %s", path, error)
            return False
        return True

    @contextmanager
    def opened(
        self, path: str, step: int | None = None, also: Callable[[str], bool] = lambda name: False
    ) -> Iterator[Opened]:
        at = self._at(os.path.dirname(path))
        with opened(path, step, at, Ranks.current(), IOOptions(), also) as parts:
            yield parts


def hosts_of(*, local: bool, fallback: str | None) -> Hosts:
    """For an adapter's ``local=`` and ``fallback=``. Raises :class:`CheckpointError` if both are given."""
    if not local:
        return OneForAll()
    if fallback is not None:
        raise CheckpointError(
            f"{fallback}: local=True keeps each host's part of a checkpoint on its own disk, and takes no fallback; drop one of them"
        )
    return LocalHosts()
