"""Which ranks share a directory, found out by files in it: host names don't tell. For ``Checkpointer(local=True)``."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable
from typing import TypeVar

from .. import errors
from ..errors import CheckpointError, LockedError
from ..format.manifest import Place
from ..limits import read_small
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks
from ..store.write import fsync_directory, make_directories, write_file

__all__ = ["LocalPlaces", "id_of_place"]

_T = TypeVar("_T")
_ID_FILE, _ID = ".place", re.compile("[0-9a-f]{16}")


class LocalPlaces:
    """The directories of a run, one for each host, and the ranks of each. The same on every rank.

    Collective. Raises :class:`CheckpointError` if ranks see each other's files only in part.
    """

    def __init__(self, root: str, ranks: Ranks) -> None:
        # The prefix is that of leftovers: the next run sweeps what a killed start has left.
        nonce = ranks.on_first("name probes", lambda: secrets.token_hex(8))
        prefix = f".tmp-probe-{nonce}-"
        probe = os.path.join(root, f"{prefix}{ranks.rank}")
        with ranks.agree("make checkpoint directory"):
            try:
                make_directories(root)
                patiently(
                    os.close,
                    patiently(os.open, probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644),
                )
            except OSError as error:
                raise CheckpointError(f"{root}: can't be written: {error.strerror}") from error

        def look() -> list[object]:
            try:
                names = patiently(os.listdir, root)
            except OSError as error:
                raise CheckpointError(f"{root}: can't be listed: {error.strerror}") from error
            seen = [n.removeprefix(prefix) for n in names if n.startswith(prefix)]
            return [min(map(int, seen), default=-1), socket.gethostname()]

        found = ranks.combine("meet at the directories", look, list)

        def remove() -> bool:
            try:
                patiently(os.unlink, probe)
            except FileNotFoundError:
                return False
            except OSError as error:
                raise CheckpointError(f"{probe}: can't be deleted: {error.strerror}") from error
            return True

        if not ranks.combine("remove probes", remove, all) or any(first == -1 for first, _ in found):
            raise LockedError(
                f"{root}: another run that writes checkpoints here is deleting this run's files; stop it, or give this run another "
                f"directory"
            )
        first_of: list[int] = [int(first) for first, _ in found]  # type: ignore[call-overload]
        if any(first_of[first] != first for first in first_of):
            raise CheckpointError(
                f"{root}: some ranks see only some of the files that other ranks just created there; with local=True, use a disk of "
                f"the host's own"
            )
        self.places = tuple(
            [
                Place("", str(found[first][1]), tuple([r for r, f in enumerate(first_of) if f == first]))
                for first in sorted(set(first_of))
            ]
        )
        self.own = next(n for n, place in enumerate(self.places) if ranks.rank in place.ranks)

    @property
    def leaders(self) -> list[int]:
        """The first rank of each place, which does its work."""
        return [place.ranks[0] for place in self.places]

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first of its place."""
        return rank in self.leaders

    def with_ids(self, ids: list[str]) -> None:
        """Note the ids of the places. Raises :class:`CheckpointError` if two are equal."""
        for number, one in enumerate(ids):
            if one in ids[:number]:
                hosts = [self.places[n].host for n in (ids.index(one), number)]
                raise CheckpointError(
                    f"the directories of {' and '.join(hosts)} have the same id, {one}: one is a copy of the other. Remove the file "
                    f"{_ID_FILE} from one of them"
                )
        self.places = tuple([Place(one, p.host, p.ranks) for one, p in zip(ids, self.places, strict=True)])

    def on_each(self, label: str, work: Callable[[], _T], ranks: Ranks) -> list[_T]:
        """Run ``work`` on the first rank of each place; its results, by place, on every rank. One round. Collective.

        A :class:`CheckpointError` of one place is raised with its own type on every rank, as in :meth:`.Ranks.on_first`.
        """

        def told() -> list[object] | None:
            if not self.leads(ranks.rank):
                return None
            try:
                return ["", work()]
            except CheckpointError as error:
                return [type(error).__name__, str(error)]

        found = ranks.combine(label, told, list)
        results = []
        for place in self.places:
            kind, result = found[place.ranks[0]]  # type: ignore[misc]
            if kind:
                raise getattr(errors, str(kind))(f"{result} (on host {place.host}, rank {place.ranks[0]})")
            results.append(result)
        return results  # type: ignore[return-value]


def id_of_place(root: str) -> str:
    """The id of a directory, drawn when it is first asked for; durable. For the first rank of a place, which holds the lock.

    Raises :class:`CheckpointError`.
    """
    path = os.path.join(root, _ID_FILE)
    if os.path.lexists(path):
        found = read_small(path, "id of a place", 1000).decode(errors="replace").strip()
        if not _ID.fullmatch(found):
            raise CheckpointError(f"{path}: doesn't contain a valid directory id; remove it")
        return found
    new, temporary = secrets.token_hex(8), os.path.join(root, f".tmp-place-{secrets.token_hex(8)}")
    write_file(temporary, f"{new}\n".encode())
    try:
        patiently(os.rename, temporary, path)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be written: {error.strerror}") from error
    fsync_directory(root)
    return id_of_place(root)  # of two runs that draw at a time the later one wins
