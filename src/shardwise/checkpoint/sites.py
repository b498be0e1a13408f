"""Checkpoints whose parts are stored on several hosts: who has which part, and how integrations place their folders."""

from __future__ import annotations

import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn, Protocol, TypeVar

import xxhash

from ..catalog.checkpoint import catalog_of_checkpoint, catalog_of_optimizer
from ..catalog.records import StoredTensor
from ..dtypes import itemsize
from ..errors import CheckpointError, IntegrityError, ShardwiseError, is_damage
from ..format.manifest import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Place,
    describe_absent,
    files_by_place,
    parse_manifest,
)
from ..format.slices import StateKey
from ..limits import inside, read_small
from ..objects import frozen
from ..operations.operation import this_operation
from ..planning.plan import IOOptions
from ..publish.hosts import Reader, Server, Unit, address_toward_store, copy_units, units_of
from ..publish.lock import mark, remove_ours
from ..publish.places import PartTarget, Target, delete_sealed
from ..publish.sites import LocalPlaces, id_of_place, settle_parts
from ..ranks.ranks import Ranks, patiently
from ..state.optimizer import TrainState
from ..storage.records import is_url
from ..tensors.boxes import Box, whole
from ..tensors.live import describe
from .resume_report import ResumeReport
from .run import Candidate, Restore, RunSteps
from .verify import check_parts, model_of

__all__ = [
    "Hosts",
    "LocalDirectories",
    "LocalHosts",
    "OneForAll",
    "Opened",
    "PartFiles",
    "Parts",
    "bring",
    "document_units",
    "find_parts",
    "hosts_of",
    "make_view",
    "opened",
    "slice_units",
]


# ----------------------------------------------------------------------------------------------------
# A step in parts as a directory that a restore reads: links to the files that are here, and the
# blocks of other hosts' files that this host's ranks need.

#: Where a stored tensor lies in the model of this run: its shape there, and the boxes of this rank.
_Held = Mapping[str, tuple[tuple[int, ...], Sequence[Box]]]


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


def make_view(view: str, path: str, text: bytes, manifest: Manifest, here: frozenset[str]) -> None:
    """Make the directory ``view``: links to the files ``here`` below ``path``, and files without content for the others.

    Raises :class:`CheckpointError`.
    """
    try:
        os.mkdir(view)
        mark(view)
        with open(os.path.join(view, MANIFEST_NAME), "xb") as file:
            file.write(text)
        for name, entry in manifest.files.items():
            new = inside(view, name)
            os.makedirs(os.path.dirname(new), exist_ok=True)
            if name in here:
                os.symlink(os.path.abspath(inside(path, name)), new)
            else:
                with open(new, "xb") as file:
                    file.truncate(entry.nbytes)  # takes no room until units are written
    except OSError as error:
        raise CheckpointError(f"{view}: can't be made: {error.strerror}") from error


def bring(
    view: str,
    needed: Mapping[str, Sequence[Unit]],
    manifest: Manifest,
    reader_of: Callable[[int], Reader],
    ranks: Ranks,
) -> int:
    """Copy units of files that are not here into a view; each is proved when it arrives. Returns their bytes. Rank-local.

    ``reader_of`` gets the number of the place that holds the files. One connection is open at a time, and none afterwards: a host
    serves some ranks at a time. Raises :class:`CheckpointError`, :class:`IntegrityError`.
    """
    total = 0
    for number, names in enumerate(files_by_place(manifest)):
        if wanted := [name for name in names if needed.get(name)]:
            reader = reader_of(number)
            try:
                for name in wanted:
                    total += copy_units(reader, name, needed[name], inside(view, name), ranks.tick)
            finally:
                reader.close()
    return total


def document_units(
    manifest: Manifest,
    lacking: Collection[str],
    ranks: Ranks,
    *,
    with_shared: bool,
    also: Callable[[str], bool],
) -> dict[str, list[Unit]]:
    """The units of the documents among the files ``lacking`` that a restore reads on this rank. Rank-local.

    ``with_shared``: also the documents of all ranks and the files that ``also`` names, of which a host needs one copy.
    """
    stems = ["state"] * with_shared + [f"rank/{ranks.rank:05d}"] * (manifest.world_size == ranks.world_size)
    names = {f"{stem}.{ending}" for stem in stems for ending in ("json", "safetensors")}
    names |= {name for name in lacking if with_shared and also(name)}
    return {name: units_of(manifest.files[name], path=name) for name in sorted(names) if name in lacking}


def slice_units(
    state: TrainState, path: str, manifest: Manifest, lacking: Collection[str]
) -> dict[str, list[Unit]]:
    """The units of slices among the files ``lacking`` that a restore of ``state`` reads on this rank. Reads nothing. Rank-local.

    They share an element with what the rank holds; of a tensor that this run does not know under that name and shape, every slice.
    """
    names = {inside(path, name): name for name in lacking}
    spans = defaultdict[str, list[tuple[int, int]]](list)
    for tensor, held in _tensors(state, path, manifest):
        parameter = held.get(tensor.name)
        boxes = [whole(tensor.shape)] if parameter is None or parameter[0] != tensor.shape else parameter[1]
        for box in boxes:
            for chunk in tensor.chunks_touching(box):
                end = chunk.offset_bytes + chunk.box.numel * itemsize(tensor.dtype)
                if (name := names.get(chunk.path)) is not None:
                    spans[name].append((chunk.offset_bytes, end))
    return {name: _touched(manifest.files[name], of) for name, of in spans.items()}


def _touched(entry: FileEntry, spans: Sequence[tuple[int, int]]) -> list[Unit]:
    """The blocks of payload that share a byte with a span."""
    _, *blocks = units_of(entry)  # first: a manifest may claim a file of any size
    numbers: set[int] = set()
    for start, end in spans:
        first, last = (at - entry.header_bytes for at in (start, end - 1))
        numbers.update(range(first // BLOCK_BYTES, last // BLOCK_BYTES + 1))
    return [blocks[number] for number in sorted(numbers)]


def _tensors(state: TrainState, path: str, manifest: Manifest) -> Iterator[tuple[StoredTensor, _Held]]:
    """The stored tensors of the models and optimizers of a run, and where they lie by stored name."""
    for name, model in state.models.items():
        if name not in manifest.models:
            continue  # the restore says so
        wanted = describe(model).layout().wanted
        held = {n: (w.shape, [b.box for b in w.boxes]) for w in wanted for n in (w.name, *w.aliases)}
        for tensor in catalog_of_checkpoint(path, name, manifest=manifest).tensors.values():
            yield tensor, held
        for optimizer in state.optimizers:
            if optimizer in manifest.packed and model_of(manifest, optimizer) == name:
                for tensor in catalog_of_optimizer(path, manifest, optimizer, name).tensors.values():
                    parameter = held.get(StateKey.of(tensor.name).parameter)
                    yield tensor, {} if parameter is None else {tensor.name: parameter}


# ----------------------------------------------------------------------------------------------------
# A step whose parts lie in directories of several hosts: who holds each part, and a directory on each host with what its ranks read.

_log = logging.getLogger(__name__)


@frozen
class Found:
    """The parts of a step, by the number of their place in its manifest."""

    here: list[list[int]]
    """Of each of this run's places, the parts that it holds whole."""
    sources: list[int]
    """For each part, the place of this run that holds it."""

    @property
    def are_all_everywhere(self) -> bool:
        return all(len(here) == len(self.sources) for here in self.here)


def find_parts(path: str, step: int | None, at: LocalPlaces, ranks: Ranks) -> Found:
    """Check the parts of a step, and find who holds each. ``path``: of the step's directory on this rank's host. Collective.

    ``step``: None takes whichever the manifest says. Raises damage as :func:`.is_damage` says, also where a host of this run has lost
    its part; :class:`CheckpointError` if a host is away.
    """

    def look() -> list[Any] | None:
        if not os.path.lexists(path):
            return None
        try:
            manifest, here = patiently(lambda: check_parts(path, step, ranks.tick))
        except ShardwiseError as error:
            if not is_damage(error):
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
        _refuse_lost(max(found, key=lambda one: _lacks_host(one, at)), damage, at)
    return Found(complete[0].here, complete[0].sources)


@frozen
class _HeldPart:
    """The parts of a step under one manifest."""

    path: str
    """Of a part that is there."""
    places: list[Place]
    here: list[list[int]]
    sources: list[int]
    """As of :class:`Found`; -1 for a part that no place holds."""

    @property
    def lost(self) -> list[int]:
        """The parts that no place holds."""
        return [number for number, source in enumerate(self.sources) if source < 0]


def _of_manifest(digest: str, seen: Sequence[list[Any] | None]) -> _HeldPart:
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
    return _HeldPart(path, places, here, sources)


def _lacks_host(held: _HeldPart, at: LocalPlaces) -> bool:
    present = {place.id for place in at.places}
    return any(held.places[n].id not in present for n in held.lost)


def _refuse_lost(held: _HeldPart, damage: str, at: LocalPlaces) -> NoReturn:
    """The text is the same on every rank."""
    path, places, lost = held.path, held.places, held.lost
    present = {place.id for place in at.places}
    if away := [n for n in lost if places[n].id not in present]:
        text = describe_absent(path, places, away, holder="this run's hosts have")
        raise CheckpointError(f"{path}: {text}")
    hosts = ", ".join(f"{places[n].host} (place {places[n].id})" for n in lost)
    raise IntegrityError(damage or f"{path}: this step's files are missing on {hosts}")


class Parts:
    """A step as this rank's host can read it."""

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        lacking: frozenset[str],
        fetch: Callable[[Mapping[str, Sequence[Unit]]], None],
        ranks: Ranks,
        io: IOOptions,
    ) -> None:
        self.path = path
        """Of a directory with all documents of this host's ranks, and the slices that :meth:`bring` has brought."""
        self.manifest = manifest
        self.io = io
        """For reading there: no rank sees what another host holds."""
        self._lacking, self._fetch, self._ranks = lacking, fetch, ranks

    def bring(self, state: TrainState) -> None:
        """Fetch the slices of other hosts that a restore of ``state``, or a load of its models, reads on this rank. Collective."""
        with self._ranks.agree("bring what other hosts hold"):
            if self._lacking:
                self._fetch(slice_units(state, self.path, self.manifest, self._lacking))


@contextmanager
def opened(
    path: str,
    step: int | None,
    at: LocalPlaces,
    ranks: Ranks,
    io: IOOptions,
    also: Callable[[str], bool] = lambda name: False,
) -> Iterator[Parts]:
    """Check a step, and open it for the block. Every host then serves its parts to the others. Collective; raises as :func:`find_parts`.

    ``also``: names of files that each host gets beside the documents.
    """
    found = find_parts(path, step, at, ranks)
    own = replace(io, strategy="own")
    text = _text_for_all(path, found, at, ranks)
    manifest = parse_manifest(text, path)
    if found.are_all_everywhere:
        yield Parts(path, manifest, frozenset(), lambda units: None, ranks, own)
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

            def reader_of(number: int) -> Reader:
                host, address, port = peers[at.leaders[found.sources[number]]]
                return Reader(host, address, port, secret.encode(), io.timeout_s)

            def fetch(units: Mapping[str, Sequence[Unit]]) -> None:
                nbytes = bring(view, units, manifest, reader_of, ranks)
                _log.info("%s: fetched %d bytes from other hosts", path, nbytes)

            with ranks.agree("make views"):
                if leads and lacking:
                    make_view(view, path, text, manifest, here)
            with ranks.agree("bring documents of other hosts"):
                if lacking:
                    fetch(document_units(manifest, lacking, ranks, with_shared=leads, also=also))
            yield Parts(view, manifest, lacking, fetch, ranks, own)
    finally:
        if leads and lacking:
            with ranks.patience():
                remove_ours(view)


def _text_for_all(path: str, found: Found, at: LocalPlaces, ranks: Ranks) -> bytes:
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
# Whose directories the checkpoints of Accelerate and the Trainer lie in: one for all ranks, or one on each host (``local=True``).
#
# What the two do with directories goes through one of these, and is the same code for both.

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


# ----------------------------------------------------------------------------------------------------
# A run whose hosts keep their parts of each step in directories of their own: ``Checkpointer(local=True)``.


class LocalDirectories:
    """See :class:`.Directories`. The first rank of each place does its work."""

    def __init__(self, steps: RunSteps) -> None:
        self._steps = steps
        self._root = steps.root_of(0)
        self._at: LocalPlaces

    def open(self, take: Callable[[], str], ranks: Ranks) -> str:
        self._at = LocalPlaces(self._root, ranks)
        found = self._at.on_each(
            "lock checkpoint directories", lambda: [take(), id_of_place(self._root)], ranks
        )
        self._at.with_ids([one for _, one in found])
        settle_parts(self._root, self._at, ranks)
        return found[0][0]

    def name_of_next(self, name: Callable[[], str], ranks: Ranks) -> str:
        return self._at.on_each("check checkpoint directories", name, ranks)[0]

    def target(self, name: str, place: int) -> Target:
        return PartTarget(self._steps.path_of(place, name), self._at.places, self._at.own)

    def after_save(self, step: int, place: int, ranks: Ranks) -> None:
        """A step counts if every place holds its own part whole; so all places delete the same steps."""
        lists = self._at.on_each(
            "look at the steps", lambda: self._steps.newest_whole(step, self._is_own_part_whole(ranks)), ranks
        )
        agreed = sorted(set.intersection(*map(set, lists)), reverse=True)
        with ranks.agree("retention"):
            if self._at.leads(ranks.rank):
                self._steps.keep_newest(step, agreed)
                delete_sealed(self._root)  # those of older steps are of no use now

    def _is_own_part_whole(self, ranks: Ranks) -> Callable[[str, int], bool]:
        own = self._at.places[self._at.own].id

        def is_whole(path: str, step: int) -> bool:
            try:
                manifest, here = patiently(lambda: check_parts(path, step, ranks.tick, heads=False))
            except ShardwiseError as error:
                _log.warning("retention does not count %s: %s", path, error)
                return False
            return all(number in here for number, p in enumerate(manifest.places) if p.id == own)

        return is_whole

    def candidates(self, step: int | None, ranks: Ranks) -> list[Candidate]:
        lists = self._at.on_each("scan checkpoint directories", lambda: self._steps.candidates(None), ranks)
        names = {s: name for found in lists for s, _, name in found if step in (None, s)}
        if step is not None and not names:
            there = sorted({s for found in lists for s, _, _ in found})
            raise CheckpointError(f"{self._root}: no step {step} on any host; there are {there}")
        return [Candidate(s, 0, self._steps.path_of(0, names[s])) for s in sorted(names, reverse=True)]

    def restore(
        self, restore: Restore, state: TrainState, one: Candidate, ranks: Ranks, io: IOOptions
    ) -> ResumeReport:
        with opened(one.path, one.step, self._at, ranks, io) as parts:
            this_operation().begin_again(one.path)
            parts.bring(state)
            return replace(restore(state, parts.path, ranks, parts.io), path=one.path)

    def go_on_from(self, step: int, damaged: Mapping[int, Mapping[int, str]], ranks: Ranks) -> list[int]:
        lists = self._at.on_each("rename newer steps", lambda: self._steps.go_on_from(step, damaged), ranks)
        return sorted(set().union(*lists), reverse=True)

    def raise_if_taken(self, ranks: Ranks) -> None:
        self._at.on_each("check the steps again", self._steps.raise_if_taken, ranks)

    def raise_if_lost(self, step: int | None, damaged: Mapping[int, Mapping[int, str]], ranks: Ranks) -> None:
        self._at.on_each("find a checkpoint", lambda: self._steps.raise_if_lost(step, damaged), ranks)
