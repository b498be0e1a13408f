"""Which ranks share a directory, found out by files in it, and parts of checkpoints on several hosts."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, TypeVar

from .. import errors
from ..errors import CheckpointError, LockedError
from ..format.manifest import Manifest, Place, files_by_place, parse_manifest
from ..limits import read_small
from ..ranks.ranks import Ranks, patiently
from .places import (
    DirectoryTarget,
    SealedPart,
    appear,
    delete_part,
    digest_of,
    make_marked,
    refuse_published,
    seal,
    sealed_parts,
    settle,
    sweep_leftovers,
)
from .write import fsync_directory, make_directories, readable_text, replace_file

# ----------------------------------------------------------------------------------------------------
# Which ranks share a directory, found out by files in it: host names don't tell. For ``Checkpointer(local=True)``.

_T = TypeVar("_T")
_ID_FILE, _ID = ".place", re.compile("[0-9a-f]{16}")


class Sites:
    """The ranks of a run in groups, each of which shares a directory: all ranks together, or those of each host. The same on every rank.

    The first rank of each site does its work.
    """

    def __init__(self, places: tuple[Place, ...] = (), own: int = 0) -> None:
        self.places = places
        """The hosts' directories; empty for one site of all ranks."""
        self.own = own
        """The number of this rank's site."""

    @classmethod
    def of_hosts(cls, hosts: Sequence[str], rank: int) -> Sites:
        """The ranks on hosts of one name, in the order of their first ranks. ``hosts``: the name of each rank's host."""
        ranks_of: dict[str, list[int]] = {}
        for one, host in enumerate(hosts):
            ranks_of.setdefault(host, []).append(one)
        places = [Place("", host, tuple(of)) for host, of in ranks_of.items()]
        return cls(tuple(places), [place.host for place in places].index(hosts[rank]))

    @property
    def leaders(self) -> list[int]:
        """The first rank of each site."""
        return [place.ranks[0] for place in self.places] or [0]

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first of its site."""
        return rank in self.leaders

    def number_of(self, rank: int) -> int:
        """The number of a rank's site, of several."""
        return next(number for number, place in enumerate(self.places) if rank in place.ranks)

    @property
    def beside(self) -> tuple[int, ...]:
        """The ranks of this rank's site, of several; itself included."""
        return self.places[self.own].ranks

    def holders_of(self, rank: int, copies: int) -> list[int]:
        """The ranks of other sites that copy the slices of ``rank``: one on each of the next ``copies - 1`` sites.

        Ranks of one site spread over those of the next.
        """
        number = self.number_of(rank)
        index, found = self.places[number].ranks.index(rank), []
        for k in range(1, min(copies, len(self.places))):
            there = self.places[(number + k) % len(self.places)].ranks
            found.append(there[index % len(there)])
        return found

    def sources_of(self, rank: int, copies: int) -> list[int]:
        """The ranks whose slices ``rank`` copies."""
        number = self.number_of(rank)
        before = {self.places[number - k] for k in range(1, min(copies, len(self.places)))}
        ranks = [one for place in before for one in place.ranks]
        return sorted(one for one in ranks if rank in self.holders_of(one, copies))

    def on_each(self, label: str, work: Callable[[], _T], ranks: Ranks) -> list[_T]:
        """Run ``work`` on the first rank of each site; its results, by site, on every rank. One round. Collective.

        A :class:`CheckpointError` of one site is raised with its own type on every rank, as in :meth:`.Ranks.on_first`.
        """
        if not self.places:
            return [ranks.on_first(label, work)]

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


def meet(root: str, label: str, work: Callable[[], _T], ranks: Ranks) -> tuple[Sites, list[_T]]:
    """Find out which ranks share the directory ``root``, and run ``work`` once in each. Collective.

    Raises :class:`CheckpointError` if ranks see each other's files only in part, or if two directories have the same id.
    """
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

    def look() -> list[Any]:
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
    first_of = [first for first, _ in found]
    if any(first_of[first] != first for first in first_of):
        raise CheckpointError(
            f"{root}: some ranks see only some of the files that other ranks just created there; with local=True, use a disk of "
            f"the host's own"
        )
    places = [
        Place("", found[first][1], tuple([r for r, f in enumerate(first_of) if f == first]))
        for first in sorted(set(first_of))
    ]
    own = next(n for n, place in enumerate(places) if ranks.rank in place.ranks)

    def done() -> list[Any]:
        return [work(), id_of_place(root)]

    told = Sites(tuple(places), own).on_each(label, done, ranks)
    return Sites(_with_ids(places, [one for _, one in told]), own), [result for result, _ in told]


def _with_ids(places: Sequence[Place], ids: Sequence[str]) -> tuple[Place, ...]:
    for number, one in enumerate(ids):
        if one in ids[:number]:
            hosts = [places[n].host for n in (ids.index(one), number)]
            raise CheckpointError(
                f"the directories of {' and '.join(hosts)} have the same ID, {one}: one is a copy of the other. Remove the file "
                f"{_ID_FILE} from one of them"
            )
    return tuple([Place(one, p.host, p.ranks) for one, p in zip(ids, places, strict=True)])


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
    replace_file(path, temporary, f"{new}\n".encode())
    return id_of_place(root)  # of two runs that draw at a time the later one wins


# ----------------------------------------------------------------------------------------------------
# Publishes a step in parts, one for each host's own directory.


class PartTarget(DirectoryTarget):
    """One part of a checkpoint to be, in the directory of this rank's site. The first rank of each site does its work.

    1. Rank 0 draws the name of the temporary directory, which the others then make.
    2. When all files are written, every site gets the manifest, and seals its part.
    3. When every site has sealed its part, they appear. So a host that is lost before leaves no part, and one that is lost here
       leaves a step that only some sites hold, and a sealed part under its temporary name. :func:`settle_parts` gives it its name at the
       next start of a Checkpointer or a Trainer, and before the next load of Accelerate: all parts were sealed, so all are whole.
    """

    def __init__(self, final: str, sites: Sites) -> None:
        super().__init__(final)
        self.places, self._sites = sites.places, sites
        self._is_sealed = False

    def begin(self, folders: Sequence[str], check: Callable[[], None], ranks: Ranks) -> tuple[str, str]:
        _, first = super().begin(folders, check, ranks)
        path = os.path.join(os.path.dirname(self.final), os.path.basename(first))
        with ranks.agree("make temporary directories"):
            if self._sites.leads(ranks.rank) and self._temporary is None:
                refuse_published(self.final)
                self._temporary = path  # which rank 0 has named
                make_marked(path, folders)
        return self.final, path

    def commit(self, manifest: Callable[[], Manifest], ranks: Ranks) -> None:
        text = ranks.on_first("make the manifest", lambda: readable_text(manifest(), self.final))
        try:
            with ranks.agree("seal the parts"):
                if self._sites.leads(ranks.rank):
                    self._seal(text)
        except Exception as error:
            # No part appears: not every site has sealed its own, and all ranks know.
            if ranks.is_settled(error):
                self._is_sealed = False
            raise
        with ranks.agree("publish the parts"):
            if self._sites.leads(ranks.rank):
                self._appear()

    def _seal(self, text: bytes) -> None:
        assert self._temporary is not None
        manifest = parse_manifest(text, self.final)
        names = files_by_place(manifest)[self._sites.own]
        seal(self._temporary, text, {name: manifest.files[name] for name in names})
        # So that a power loss leaves the part under this name, or under its last one.
        fsync_directory(os.path.dirname(self._temporary))
        self._is_sealed = len(self.places) > 1

    def _appear(self) -> None:
        assert self._temporary is not None
        appear(self._temporary, self.final)
        self._temporary = None

    def discard(self, ranks: Ranks) -> None:
        """As :meth:`.Target.discard`; a sealed part stays, because others may have appeared."""
        if self._sites.leads(ranks.rank) and self._temporary is not None and not self._is_sealed:
            with ranks.patience():
                delete_part(self._temporary)


def settle_parts(root: str, sites: Sites, ranks: Ranks, *, is_held: bool = True) -> None:
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

    sealed = [[SealedPart(*one) for one in of] for of in sites.on_each("look for parts", look, ranks)]  # type: ignore[misc]
    finals = sorted({part.final for of in sealed for part in of})
    if not finals:
        return
    named = sites.on_each(
        "look for their names", lambda: [digest_of(os.path.join(root, name)) for name in finals], ranks
    )
    ids = [place.id for place in sites.places]
    appearing = {
        final: _appearing(final, sealed, [digests[number] for digests in named], ids)
        for number, final in enumerate(finals)
    }

    def finish() -> None:
        for part in sealed[sites.own]:
            appears = part.digest in appearing[part.final]
            if appears or (is_held and set(ids).issuperset(part.places)):
                settle(root, part, appears=appears)

    sites.on_each("publish the parts that are left", finish, ranks)


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
