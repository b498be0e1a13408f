"""A step whose parts lie in directories of several hosts: who holds each part, and a directory on each host with what its ranks read."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import xxhash

from ..errors import CheckpointError, IntegrityError, ShardwiseError, is_damage
from ..format.manifest import MANIFEST_NAME, Manifest, Place, parse_manifest
from ..format.places import describe_absent, files_by_place
from ..limits import read_small
from ..memory.link import Reader, Server, address_toward_store
from ..memory.units import Unit
from ..objects import frozen
from ..planning import IOOptions
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..store.marks import remove_ours
from .check import check_parts
from .local_places import LocalPlaces
from .part_view import PartFiles, bring, document_units, make_view, slice_units

__all__ = ["Parts", "find_parts", "opened"]

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
        raise IntegrityError(damage or "lost: no such directory on any host", path=None if damage else path)
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
class _Held:
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


def _of_manifest(digest: str, seen: Sequence[list[Any] | None]) -> _Held:
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
    return _Held(path, places, here, sources)


def _lacks_host(held: _Held, at: LocalPlaces) -> bool:
    present = {place.id for place in at.places}
    return any(held.places[n].id not in present for n in held.lost)


def _refuse_lost(held: _Held, damage: str, at: LocalPlaces) -> NoReturn:
    """The text is the same on every rank."""
    path, places, lost = held.path, held.places, held.lost
    present = {place.id for place in at.places}
    if away := [n for n in lost if places[n].id not in present]:
        text = describe_absent(path, places, away, holder="the hosts of this run hold")
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
                _log.info("%s: %d bytes were brought from other hosts", path, nbytes)

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
