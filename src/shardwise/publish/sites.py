"""Which ranks share a directory, found out by files in it, and parts of checkpoints on several hosts."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import TypeVar

from .. import errors
from ..errors import CheckpointError, LockedError
from ..format.manifest import Manifest, Place
from ..limits import read_small
from ..ranks.ranks import Ranks, patiently
from .places import PartTarget, SealedPart, digest_of, sealed_parts, settle, sweep_leftovers
from .write import fsync_directory, make_directories, write_file

__all__ = [
    "LocalPlaces",
    "begin_parts",
    "id_of_place",
    "publish_parts",
    "settle_parts",
]


# ----------------------------------------------------------------------------------------------------
# Which ranks share a directory, found out by files in it: host names don't tell. For ``Checkpointer(local=True)``.

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
                f"{root}: another run that's writing checkpoints here is deleting this run's files; stop it, or give this run another "
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
                    f"the directories of {' and '.join(hosts)} have the same ID, {one}: one is a copy of the other. Remove the file "
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
            raise CheckpointError(f"{path}: doesn't contain a valid directory ID; remove it")
        return found
    new, temporary = secrets.token_hex(8), os.path.join(root, f".tmp-place-{secrets.token_hex(8)}")
    write_file(temporary, f"{new}\n".encode())
    try:
        patiently(os.rename, temporary, path)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be written: {error.strerror}") from error
    fsync_directory(root)
    return id_of_place(root)  # of two runs that draw at a time the later one wins


# ----------------------------------------------------------------------------------------------------
# Writes a step in parts, one for each host's own directory. The steps of :class:`.PartTarget`, on all ranks.


def begin_parts(target: PartTarget, first: str, folders: Sequence[str], ranks: Ranks) -> str:
    """Make the temporary directory of each part. Collective. Returns the path that this rank writes below."""
    with ranks.agree("make temporary directories"):
        if ranks.rank == target.leader:
            target.follow(first, folders)
    return target.beside(first)


def publish_parts(target: PartTarget, manifest: Callable[[], Manifest], ranks: Ranks) -> None:
    """Publish the parts, when all of them are sealed. ``manifest`` is called on rank 0. Collective.

    On failure nothing is published, unless it came when parts appeared: :func:`settle_parts` publishes what is left, at the next start
    of a Checkpointer or a Trainer, and before the next load of Accelerate.
    """
    text = ranks.on_first("make the manifest", lambda: target.text_of(manifest()))
    try:
        with ranks.agree("seal the parts"):
            if ranks.rank == target.leader:
                target.seal(text)
    except Exception as error:
        if ranks.is_settled(error):
            target.unseal()
        raise
    with ranks.agree("publish the parts"):
        if ranks.rank == target.leader:
            target.appear()


def settle_parts(root: str, places: LocalPlaces, ranks: Ranks, *, is_held: bool = True) -> None:
    """Publish the sealed parts of checkpoints of which another place has published its part; delete what else killed saves left. Collective.

    A part stays as it is while a place that has another one of its checkpoint is away: that one may be published. Of two checkpoints of
    one name, as a run leaves them whose hosts were away in turn, one is published. ``is_held``: whether this run holds the directories;
    if not, what no other place has published stays, for a save of another run may be under way. Raises :class:`CheckpointError`.
    """

    def look() -> list[object]:
        parts = sealed_parts(root)
        if is_held:
            sweep_leftovers(root, {part.name for part in parts})
        return [list(astuple(part)) for part in parts]

    sealed = [[SealedPart(*one) for one in of] for of in places.on_each("look for parts", look, ranks)]  # type: ignore[misc]
    finals = sorted({part.final for of in sealed for part in of})
    if not finals:
        return
    named = places.on_each(
        "look for their names", lambda: [digest_of(os.path.join(root, name)) for name in finals], ranks
    )
    ids = [place.id for place in places.places]
    appearing = {
        final: _appearing(final, sealed, [digests[number] for digests in named], ids)
        for number, final in enumerate(finals)
    }

    def finish() -> None:
        for part in sealed[places.own]:
            appears = part.digest in appearing[part.final]
            if appears or (is_held and set(ids).issuperset(part.places)):
                settle(root, part, appears=appears)

    places.on_each("publish the parts that are left", finish, ranks)


def _appearing(
    final: str, sealed: Sequence[Sequence[SealedPart]], named: Sequence[str], ids: Sequence[str]
) -> set[str]:
    """The digests of the manifests whose sealed parts get a name now.

    ``sealed``, ``named`` and ``ids``: by place, its sealed parts, the digest of what has the name already, and its id.
    """
    holders: dict[str, set[str]] = {digest: set() for digest in named if digest}
    parts = [(place, part) for place, of in enumerate(sealed) for part in of if part.final == final]
    for place, digest in [*enumerate(named), *[(place, part.digest) for place, part in parts]]:
        if digest in holders and named[place] in ("", digest):
            holders[digest].add(ids[place])
    of_digest = {part.digest: part.places for _, part in parts if part.digest in holders}
    whole = [digest for digest, of in of_digest.items() if holders[digest].issuperset(of)]
    if whole:
        return {max(whole)}  # ranks know of none of them: each was cut while its parts appeared
    # A resume says what is lost.
    return {digest for digest, of in of_digest.items() if set(ids).issuperset(of)}
