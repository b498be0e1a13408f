"""A run whose hosts keep their parts of each step in directories of their own: ``Checkpointer(local=True)``."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from ..errors import CheckpointError, IntegrityError, ShardwiseError, is_damage
from ..format.manifest import MANIFEST_NAME, Place, parse_manifest
from ..format.places import describe_absent, files_by_place
from ..limits import read_small
from ..memory.link import Reader, Server, address_towards_store
from ..operations.operation import this_operation
from ..planning import IOOptions
from ..ranks.patience import patiently, remove_tree
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..store.part_target import PartTarget
from ..store.target import Target
from .check import check_parts
from .directories import Restore
from .local_places import LocalPlaces, id_of_place
from .part_view import PartFiles, bring, make_view, units_needed
from .resume_report import ResumeReport
from .run_steps import Candidate, RunSteps

__all__ = ["LocalDirectories"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    """The parts of a step, by the number of their place in its manifest."""

    here: list[list[int]]
    """Of each of this run's places, the parts that it holds whole."""
    sources: list[int]
    """For each part, the place of this run that holds it."""


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
        found = self._find(one, ranks)
        this_operation().begin_again(one.path)
        own = replace(io, strategy="own")  # no rank sees what another host holds
        if all(len(here) == len(found.sources) for here in found.here):
            return restore(state, one.path, ranks, own)
        with self._viewed(state, one, found, ranks, own) as path:
            return replace(restore(state, path, ranks, own), path=one.path)

    def _find(self, one: Candidate, ranks: Ranks) -> _Found:
        """Check the parts of a step, and find who holds each. Raises damage, and :class:`CheckpointError` if a host is away."""

        def look() -> list[Any] | None:
            if not os.path.lexists(one.path):
                return None
            try:
                manifest, here = patiently(lambda: check_parts(one.path, one.step, ranks.tick))
            except ShardwiseError as error:
                if not is_damage(error):
                    raise
                return ["", [], str(error)]
            text = read_small(os.path.join(one.path, MANIFEST_NAME), "manifest")
            places = [[p.id, p.host, list(p.ranks)] for p in manifest.places]
            return [xxhash.xxh3_64_hexdigest(text), here, "", places, one.path]

        seen = self._at.on_each(f"check step {one.step}", look, ranks)
        whole = [part for part in seen if part is not None and not part[2]]
        damage = "; ".join(f"{part[2]}" for part in seen if part is not None and part[2])
        if not whole:
            raise IntegrityError(damage)
        if unlike := [part for part in whole if part[0] != whole[0][0]]:
            raise CheckpointError(
                f"{unlike[0][4]}: this host's manifest of step {one.step} is another one than {whole[0][4]}: these are steps of "
                f"several runs, or of branches of one"
            )
        here = [part[1] if part is not None else [] for part in seen]
        *_, told, path = whole[0]
        places = [Place(i, host, tuple(of)) for i, host, of in told]
        sources = [
            next((n for n, parts in enumerate(here) if number in parts), -1)
            for number in range(max(1, len(places)))
        ]
        self._refuse_lost(path, places, [n for n, source in enumerate(sources) if source < 0], damage)
        return _Found(here, sources)

    def _refuse_lost(self, path: str, places: Sequence[Place], lost: Sequence[int], damage: str) -> None:
        """``path``: of a part that is there. The text is the same on every rank."""
        present = {place.id for place in self._at.places}
        if away := [n for n in lost if places[n].id not in present]:
            text = describe_absent(path, places, away, holder="the hosts of this run hold")
            raise CheckpointError(f"{path}: {text}")
        if lost:
            hosts = ", ".join(f"{places[n].host} (place {places[n].id})" for n in lost)
            raise IntegrityError(
                damage
                or f"{path}: {hosts} lacks its part: lost, or the save was killed before the part got its name"
            )

    @contextmanager
    def _viewed(
        self, state: TrainState, one: Candidate, found: _Found, ranks: Ranks, io: IOOptions
    ) -> Iterator[str]:
        """The path of a directory with all that this host's ranks need of a step. Collective."""
        nonce, secret = ranks.on_first("name views", lambda: [secrets.token_hex(8), secrets.token_hex(32)])
        text = self._text_for_all(one, found, ranks)
        manifest = parse_manifest(text, one.path)
        files, mine, leads = files_by_place(manifest), found.here[self._at.own], self._at.leads(ranks.rank)
        here = frozenset(name for number in mine for name in files[number])
        lacking = frozenset(manifest.files) - here
        view = os.path.join(self._root, f".tmp-view-{nonce}") if lacking else one.path
        try:
            with ExitStack() as stack:

                def serve() -> list[Any] | None:
                    if not leads or not mine:
                        return None
                    address = address_towards_store()
                    server = Server(PartFiles(one.path, here), secret.encode(), address, io.timeout_s)
                    stack.callback(server.close)
                    return [self._at.places[self._at.own].host, address, server.port]

                peers: list[Any] = ranks.combine("serve parts", serve, list)
                with ranks.agree("make views"):
                    if leads and lacking:
                        make_view(view, one.path, text, manifest, here)
                with ranks.agree("bring what other hosts hold"):
                    if lacking:

                        def reader_of(number: int) -> Reader:
                            host, address, port = peers[self._at.leaders[found.sources[number]]]
                            return Reader(host, address, port, secret.encode(), io.timeout_s)

                        needed = units_needed(state, view, manifest, lacking, ranks, with_shared=leads)
                        nbytes = bring(view, needed, manifest, reader_of, ranks)
                        _log.info("%s: %d bytes were brought from other hosts", one.path, nbytes)
            yield view
        finally:
            if leads and lacking:
                with ranks.patience():
                    remove_tree(view)

    def _text_for_all(self, one: Candidate, found: _Found, ranks: Ranks) -> bytes:
        """The manifest's text; sent only if a place does not hold it."""
        holder = self._at.leaders[found.sources[0]]

        def read() -> bytes:
            return read_small(os.path.join(one.path, MANIFEST_NAME), "manifest")

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

    def go_on_from(self, step: int, damaged: Mapping[int, Mapping[int, str]], ranks: Ranks) -> list[int]:
        lists = self._at.on_each(
            "set newer steps aside", lambda: self._steps.go_on_from(step, damaged), ranks
        )
        return sorted(set().union(*lists), reverse=True)

    def raise_if_taken(self, ranks: Ranks) -> None:
        self._at.on_each("look at the steps again", self._steps.raise_if_taken, ranks)

    def raise_if_lost(self, step: int | None, damaged: Mapping[int, Mapping[int, str]], ranks: Ranks) -> None:
        self._at.on_each("find a checkpoint", lambda: self._steps.raise_if_lost(step, damaged), ranks)
