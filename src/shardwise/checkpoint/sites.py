"""Checkpoints whose parts are stored on several hosts: who has which part, and how integrations place their folders."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import xxhash

from ..engine.files import arriving
from ..errors import CheckpointError, IntegrityError, ShardwiseError, is_corruption
from ..format.manifest import MANIFEST_NAME, Manifest, Place, describe_absent, files_by_place, parse_manifest
from ..limits import inside, read_small
from ..objects import frozen
from ..planning.plan import IOOptions
from ..publish.hosts import Holdings, Reader, RemoteFiles, Server, address_toward_store, units_in
from ..publish.lock import mark, remove_ours
from ..publish.places import Target
from ..publish.sites import PartTarget, Sites, meet, settle_parts
from ..ranks.ranks import Ranks, patiently
from ..storage.records import is_url
from .verify import check_parts

# ----------------------------------------------------------------------------------------------------
# A step in parts as a directory that a restore reads: links to the files that are here, and the
# blocks of other hosts' files, which come when this host's ranks read them.


@frozen
class PartFiles:
    """The files of a step at one place that other hosts may read."""

    path: str
    names: frozenset[str]

    def readable(self, name: str) -> str:
        """The path of a file. Raises :class:`CheckpointError` for any other."""
        if name not in self.names:
            raise CheckpointError(f"{name}: is no file of this part")
        return inside(self.path, name)


def make_view(
    view: str, text: bytes, manifest: Manifest, here: Mapping[str, str], link: Callable[[str, str], None]
) -> None:
    """Fill the directory ``view``: the manifest, a ``link`` to each file that is ``here``, and files without content for the others.

    ``here``: paths of files, by name. Raises ``OSError``.
    """
    with open(os.path.join(view, MANIFEST_NAME), "xb") as file:
        file.write(text)
    for name, entry in manifest.files.items():
        new = inside(view, name)
        os.makedirs(os.path.dirname(new), exist_ok=True)
        if name in here:
            link(here[name], new)
        else:
            with open(new, "xb") as file:
                file.truncate(entry.nbytes)  # takes no room until bytes are written


@contextmanager
def reading_from(remote: RemoteFiles, view: str, names: Iterable[str]) -> Iterator[None]:
    """Reads in the block, by this thread, of the files ``names`` of a view get the bytes of other hosts."""
    by_path = {inside(view, name): name for name in names}

    def read_into(path: str, offset_bytes: int, target: memoryview) -> bool:
        name = by_path.get(path)
        if name is not None:
            remote.read_into(name, offset_bytes, target)
        return name is not None

    with arriving(read_into):
        yield


def has_slices(name: str) -> bool:
    """Whether a file of a step holds slices of tensors; a restore reads other files whole."""
    return os.path.basename(name).startswith("shard-")


def _documents_for(
    manifest: Manifest, lacking: frozenset[str], ranks: Ranks, leads: bool, also: Callable[[str], bool]
) -> list[str]:
    """The files among those ``lacking`` that a restore reads whole on this rank; on the one that ``leads`` its host, also those of all ranks
    and those that ``also`` names, of which a host needs one copy."""
    stems = ["state"] * leads + [f"rank/{ranks.rank:05d}"] * (manifest.world_size == ranks.world_size)
    names = {f"{stem}.{ending}" for stem in stems for ending in ("json", "safetensors")}
    return sorted(name for name in lacking if name in names or (leads and also(name)))


# ----------------------------------------------------------------------------------------------------
# A step whose parts lie in directories of several hosts: who holds each part, and a directory on each host with what its ranks read.

_log = logging.getLogger(__name__)


@frozen
class Found:
    """The parts of a step under one manifest, by the number of their place in it."""

    path: str
    """Of a part that is there."""
    places: list[Place]
    here: list[list[int]]
    """Of each of this run's sites, the parts that it holds whole."""
    sources: list[int]
    """For each part, the site of this run that holds it; -1 if none does."""

    @property
    def lost(self) -> list[int]:
        """The parts that no site holds."""
        return [number for number, source in enumerate(self.sources) if source < 0]

    @property
    def are_all_everywhere(self) -> bool:
        return all(len(here) == len(self.sources) for here in self.here)


def find_parts(path: str, step: int | None, at: Sites, ranks: Ranks) -> Found:
    """Check the parts of a step, and find who holds each. ``path``: of the step's directory on this rank's host. Collective.

    ``step``: None takes whichever the manifest says. Raises damage as :func:`.is_corruption` says, also where a host of this run has lost
    its part; :class:`CheckpointError` if a host is away.
    """

    def look() -> list[Any] | None:
        if not os.path.lexists(path):
            return None
        try:
            manifest, here = patiently(lambda: check_parts(path, step, ranks.tick))
        except ShardwiseError as error:
            if not is_corruption(error):
                raise
            return ["", [], str(error)]
        text = read_small(os.path.join(path, MANIFEST_NAME), "manifest")
        places = [[p.id, p.host, list(p.ranks)] for p in manifest.places]
        return [xxhash.xxh3_64_hexdigest(text), here, "", places, path]

    seen = at.on_each("check the parts of a step" if step is None else f"check step {step}", look, ranks)
    whole = [part for part in seen if part is not None and not part[2]]
    damage = "; ".join(f"{part[2]}" for part in seen if part is not None and part[2])
    if not whole:
        raise IntegrityError(damage or "not found on any host", path=None if damage else path)
    found = [_of_manifest(digest, seen) for digest in sorted({part[0] for part in whole})]
    complete = [one for one in found if not one.lost]
    if len(complete) > 1:
        raise CheckpointError(
            f"{complete[1].path}: this host's manifest differs from {complete[0].path}: these are steps of several runs, or of "
            f"branches of one. Move the directories of one of them away"
        )
    if not complete:  # of several, none of which is whole, one that a host which is away may make whole
        present = {place.id for place in at.places}
        _refuse_lost(
            max(found, key=lambda one: any(one.places[n].id not in present for n in one.lost)), damage, at
        )
    return complete[0]


def _of_manifest(digest: str, seen: Sequence[list[Any] | None]) -> Found:
    """Who holds the parts of the step with this manifest. A host that holds a step of this number with another manifest, as a save leaves
    it that one host alone has published, holds none."""
    of = [part if part is not None and part[0] == digest else None for part in seen]
    here = [[] if part is None else part[1] for part in of]
    *_, told, path = next(part for part in of if part is not None)
    places = [Place(i, host, tuple(of_place)) for i, host, of_place in told]
    sources = [
        next((n for n, parts in enumerate(here) if number in parts), -1)
        for number in range(max(1, len(places)))
    ]
    return Found(path, places, here, sources)


def _refuse_lost(held: Found, damage: str, at: Sites) -> NoReturn:
    """The text is the same on every rank."""
    path, places, lost = held.path, held.places, held.lost
    present = {place.id for place in at.places}
    if away := [n for n in lost if places[n].id not in present]:
        text = describe_absent(path, places, away, holder="this run's hosts have")
        raise CheckpointError(f"{path}: {text}")
    hosts = ", ".join(f"{places[n].host} (place {places[n].id})" for n in lost)
    raise IntegrityError(damage or f"{path}: this step's files are missing on {hosts}")


@frozen
class Opened:
    """A checkpoint while it is read."""

    path: str
    """Where this rank reads it."""
    io: IOOptions
    """How this rank reads it. Each rank reads its own shards; slices that its host lacks are fetched from the host that has them."""


@contextmanager
def opened(
    path: str,
    step: int | None,
    at: Sites,
    ranks: Ranks,
    io: IOOptions,
    also: Callable[[str], bool] = lambda name: False,
) -> Iterator[Opened]:
    """Check a step in parts, and open it for the block. Every host then serves its parts to the others: all documents of this host's ranks
    are at the path, and slices come when this thread reads them. Collective; raises as :func:`find_parts`.

    ``also``: names of files that each host gets beside the documents.
    """
    found = find_parts(path, step, at, ranks)
    own = replace(io, strategy="own")
    text = _text_for_all(path, found, at, ranks)
    manifest = parse_manifest(text, path)
    if found.are_all_everywhere:
        yield Opened(path, own)
        return
    nonce, secret = ranks.on_first("name views", lambda: [secrets.token_hex(8), secrets.token_hex(32)])
    files, mine, leads = files_by_place(manifest), found.here[at.own], at.leads(ranks.rank)
    here = frozenset(name for number in mine for name in files[number])
    lacking = frozenset(manifest.files) - here
    # A leftover, but not under the name of a sealed part.
    view = os.path.join(os.path.dirname(path), f".tmp-{nonce}-view") if lacking else path
    try:
        with ExitStack() as stack:

            def serve() -> list[Any] | None:
                if not leads or not mine:
                    return None
                address = address_toward_store()
                server = Server(PartFiles(path, here), secret.encode(), address, io.timeout_s)
                stack.callback(server.close)
                return [at.places[at.own].host, address, server.port]

            peers: list[Any] = ranks.combine("serve parts", serve, list)

            def reader_of(rank: int) -> Reader:
                host, address, port = peers[rank]
                return Reader(host, address, port, secret.encode(), io.timeout_s)

            with ranks.agree("make views"):
                if leads and lacking:
                    _make_links(view, path, text, manifest, here)
            with ranks.agree("bring documents of other hosts"):
                holdings = _holdings(manifest, [at.leaders[source] for source in found.sources])
                remote = RemoteFiles(manifest.files, holdings, reader_of, ranks.tick, most_alone=0)
                brought = _documents_for(manifest, lacking, ranks, leads, also)
                for name in brought:
                    remote.copy(name, inside(view, name))
            slices = filter(has_slices, lacking.difference(brought))
            # Ranks agree after each read of a load or restore, so no host closes its server while another one reads.
            if lacking:
                stack.enter_context(reading_from(remote, view, slices))
            yield Opened(view, own)
        _log.info("%s: fetched %d bytes from other hosts", path, remote.taken.total())
    finally:
        if leads and lacking:
            with ranks.patience():
                remove_ours(view)


def _make_links(view: str, path: str, text: bytes, manifest: Manifest, here: Iterable[str]) -> None:
    try:
        os.mkdir(view)
        mark(view)
        make_view(view, text, manifest, {n: os.path.abspath(inside(path, n)) for n in here}, os.symlink)
    except OSError as error:
        raise CheckpointError(f"{view}: can't be made: {error.strerror}") from error


def _holdings(manifest: Manifest, holders: Sequence[int]) -> Holdings:
    """The rank that serves each file, whole. ``holders``: by the number of a file's place."""
    return {
        name: [(holders[number], "", [[0, units_in(manifest.files[name])]])]
        for number, names in enumerate(files_by_place(manifest))
        for name in names
    }


def _text_for_all(path: str, found: Found, at: Sites, ranks: Ranks) -> bytes:
    """The manifest's text; sent only if a place does not hold it."""
    holder = at.leaders[found.sources[0]]

    def read() -> bytes:
        return read_small(os.path.join(path, MANIFEST_NAME), "manifest")

    if all(found.here):
        text = b""
        with ranks.agree("read the manifest"):
            text = read()
        return text
    return ranks.combine(
        "send the manifest",
        lambda: read() if ranks.rank == holder else b"",
        lambda of: of[holder],
    )


# ----------------------------------------------------------------------------------------------------
# Whose directories the checkpoints of Accelerate and the Trainer lie in.

_T = TypeVar("_T")


class Hosts:
    """Where Accelerate and the Trainer keep checkpoints: in one directory or store for all ranks, or in a directory on each host (``local``).

    Every rank makes one. Its methods are collective but for :meth:`target`, and raise alike on all ranks. ``root``: the directory or URL of
    the checkpoints, on this rank's host.
    """

    def __init__(self, *, local: bool = False) -> None:
        self.is_local = local
        self._met: dict[str, Sites] = {}

    def _at(self, root: str) -> Sites:
        """The hosts of the run, which meet in their directories when they use them first. Collective."""
        if not self.is_local:
            return Sites()
        if is_url(root):
            raise CheckpointError(
                f"{root}: local=True keeps checkpoints on the hosts' own disks; give a directory"
            )
        if root not in self._met:
            self._met[root], _ = meet(root, "name places", lambda: None, Ranks.current())
        return self._met[root]

    def on_each(self, root: str, label: str, work: Callable[[], _T]) -> list[_T]:
        """Run ``work`` on one rank of each host that has a directory of its own, else on rank 0; the results on every rank."""
        return self._at(root).on_each(label, work, Ranks.current())

    def on_own(self, root: str, label: str, work: Callable[[], _T]) -> _T:
        """As :meth:`on_each`; the result of this rank's host."""
        return self.on_each(root, label, work)[self._at(root).own]

    def target(self, target: Target) -> Target:
        """Where this rank's host publishes what all would publish at ``target``. After a call with its root."""
        return PartTarget(target.final, self._at(os.path.dirname(target.final))) if self.is_local else target

    def settle(self, root: str, *, is_held: bool) -> None:
        """Publish or delete what killed saves left in directories of the hosts' own, as :func:`.settle_parts`."""
        if self.is_local:
            settle_parts(root, self._at(root), Ranks.current(), is_held=is_held)

    def holds(self, path: str) -> bool:
        """Whether hosts with directories of their own hold all parts of a checkpoint, as far as a check without payload can tell; says
        why not. True for a directory of all: its reader finds damage. Raises :class:`CheckpointError` if a host that has a part is away."""
        if not self.is_local:
            return True
        ranks = Ranks.current()
        try:
            find_parts(path, None, self._at(os.path.dirname(path)), ranks)
        except ShardwiseError as error:
            if not is_corruption(error):
                raise
            if ranks.rank == 0:
                _log.warning("skipping %s: %s", path, error)
            return False
        return True

    @contextmanager
    def opened(
        self, path: str, step: int | None = None, also: Callable[[str], bool] = lambda name: False
    ) -> Iterator[Opened]:
        """A checkpoint, open for the block. ``also``: files that each host needs in addition to the documents.

        Raises damage as :func:`.is_corruption` says, :class:`CheckpointError` if a host that has a part is away; for one directory of all
        the reader finds damage.
        """
        if not self.is_local:
            yield Opened(path, IOOptions())
            return
        at = self._at(os.path.dirname(path))
        with opened(path, step, at, Ranks.current(), IOOptions(), also) as found:
            yield found


def hosts_of(*, local: bool, fallback: str | None) -> Hosts:
    """For an adapter's ``local=`` and ``fallback=``. Raises :class:`CheckpointError` if both are given."""
    if local and fallback is not None:
        raise CheckpointError(
            f"{fallback}: local=True keeps each host's part of a checkpoint on its own disk, and takes no fallback; drop one of them"
        )
    return Hosts(local=local)
