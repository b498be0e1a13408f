"""The steps of a run in memory: keeping them, finding the newest that is held and proved, and a view of it for a restore."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import xxhash

from ..errors import CheckpointError, RankError, ShardwiseError
from ..format.manifest import MANIFEST_NAME, Manifest, parse_manifest, step_of_manifest
from ..limits import inside, read_small
from ..memory.link import Server, address_toward_store
from ..memory.maps import Maps
from ..memory.options import InMemoryCheckpoints
from ..memory.places import Peer, Places
from ..memory.record import Record, new_word, read_or_make_record, write_record
from ..memory.remote import Holdings
from ..memory.ring import Ring, Slot
from ..memory.units import are_all, proved_units, runs_of, units_in
from ..objects import frozen
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from .collect import Lineage, compare, take
from .low_bit_save import agree_on_forms
from .memory_save import Host, MemorySave
from .memory_view import MemoryView

__all__ = ["HeldStep", "MemorySteps"]

_log = logging.getLogger(__name__)
_NUMBERS = itertools.count()


@frozen
class HeldStep:
    """A step that some hosts have a manifest of."""

    step: int
    checksum: str
    """Of its manifest."""


class MemorySteps:
    """Every rank makes one. Collective, and raises alike on all ranks: :class:`CheckpointError`, :class:`RankError`."""

    def __init__(self, tier: InMemoryCheckpoints, root: str, ranks: Ranks) -> None:
        self._tier, self._root = tier, root
        self.newest: int | None = None
        """The newest step that this run has in memory, or had taken from there."""
        self._slot, self._is_off, self._has_line = 1, False, False
        self._has_warned = False
        self._saving: MemorySave | None = None
        self.failed: list[HeldStep] = []
        """Steps that were tried, and are not held whole."""

        def begin() -> list[str]:
            record = read_or_make_record(root)
            # Rank 0 names the channel of the threads' agreements: other ranks may have had another number of runs.
            return [record.name, record.line, secrets.token_hex(32), f"memory-{next(_NUMBERS)}-"]

        self._name, self._line, secret, self._channel = ranks.on_first("begin the memory tier", begin)

        self._server: Server | None = None

        def told() -> list[Any]:
            ring = Ring(tier.root, self._name)
            address = tier.address or address_toward_store()
            self._server = Server(ring, secret.encode(), address, tier.timeout_s)
            self._ring = ring
            return [tier.host_name, address, self._server.port]

        try:
            peers = ranks.combine("meet the hosts", told, list)
        except BaseException:  # the caller gets no object to close
            if self._server is not None:
                self._server.close()
            raise
        places = Places([Peer(*one) for one in peers])
        self._host = Host(tier, self._ring, places, secret.encode(), Maps())
        if ranks.rank == 0 and places.hosts < tier.copies:
            _log.warning(
                "memory tier: %d copies are asked for, and there are %d hosts: each slice is held on %d",
                tier.copies,
                places.hosts,
                min(places.hosts, tier.copies),
            )

    # -- keeping ------------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether the tier keeps this step."""
        return step % self._tier.every == 0 and step != self.newest

    def save(self, state: TrainState, step: int, lineage: Lineage, ranks: Ranks) -> int:
        """Copy the state into memory and let a thread do the rest. Returns the copied bytes; 0 if the step is left out. Collective."""
        self._settle_if_done()
        if not self._has_line:
            self.begin_line(None, ranks)
        forms = agree_on_forms(state, ranks)
        saving = None if self._saving is not None or self._is_off else self._new_save(step, ranks)
        if saving is None or not saving.start():
            compare(lambda: None, ranks)
            return 0
        self._saving = (
            saving  # also after Ctrl-C in the copy: its thread has to end before the next one begins
        )
        try:
            is_kept = saving.copy(lambda: take(state, step, lineage, forms, ranks.rank))
        except Exception:
            self._saving = None  # the thread has ended, or is about to
            raise
        if not is_kept:
            self._saving = None
            return 0
        return saving.nbytes

    def _new_save(self, step: int, ranks: Ranks) -> MemorySave:
        behind = Ranks.current(timeout_s=ranks.timeout_s, channel=self._channel)
        level = (
            logging.INFO if self._has_warned else logging.WARNING
        )  # one warning, until a step is held whole

        def warn(text: str) -> None:
            self._has_warned = True
            if ranks.rank == 0:
                _log.log(level, "%s", text)

        return MemorySave(step, self._host, 1 - self._slot, ranks, behind, warn)

    def wait(self) -> int | None:
        """Wait for the thread. Returns the newest step that is held."""
        if self._saving is not None:
            self._saving.join()
            self._settle_if_done()
        return self.newest

    def _settle_if_done(self) -> None:
        saving = self._saving
        if saving is None or saving.is_running:
            return
        self._saving = None
        if saving.is_complete:
            self.newest, self._slot = saving.step, 1 - self._slot
        self._has_warned = self._has_warned and not saving.has_copies
        if isinstance(saving.error, RankError) and saving.error.missing:
            self._is_off = True  # ranks are out of step

    def close(self, *, keep: bool, ranks: Ranks) -> None:
        """Wait, and give the memory back unless the next start wants it."""
        self.wait()
        assert self._server is not None
        self._server.close()
        self._host.maps.forget()
        if not keep and self._host.places.is_leader(ranks.rank):
            self._ring.remove()

    def begin_line(self, step: int | None, ranks: Ranks) -> None:
        """From here on nothing but steps up to ``step`` may ever be taken from memory, on hosts that are here. Collective."""
        line = ranks.on_first("begin a line", new_word)

        def begin() -> int:
            """The slot on this host that holds the step; -1: none."""
            found = -1
            if self._host.places.is_leader(ranks.rank):
                is_ours = self._line in self._ring.lines
                for name in self._ring.slots():
                    held = _held_in(self._ring.slot(name))
                    if not is_ours or step is None or held is None or held.step > step:
                        self._ring.slot(name).clear()
                    elif held.step == step and name.startswith("own"):
                        found = int(name[-1])
                self._ring.set_lines([self._line, line] if is_ours else [line])
            return found

        self._slot = ranks.combine("begin a line", begin, _agreed_slot)
        ranks.on_first("write the line", lambda: write_record(self._root, Record(self._name, line)))
        self.newest, self._line, self._has_line = None, line, True

    def took(self, held: HeldStep) -> None:
        """A resume has taken this step: it stays until a newer one is held."""
        self.newest = held.step

    def path_of(self, held: HeldStep) -> str:
        """Where a step is held, for people."""
        return f"{self._ring.path} step {held.step}"

    # -- finding ------------------------------------------------------------------------------------------

    def candidates(self, ranks: Ranks) -> list[HeldStep]:
        """Steps of which some host has a manifest, newest first; nothing is proved yet. Waits for one that is on its way. Collective."""
        self.wait()

        def look() -> list[list[Any]]:
            if self._line not in self._ring.lines:
                return []
            found = [_held_in(self._ring.slot(name)) for name in self._ring.slots()]
            return [[one.step, one.checksum] for one in found if one is not None]

        seen = ranks.combine("look into memory", look, _newest_first)
        return [HeldStep(*one) for one in seen]

    def view(self, held: HeldStep, ranks: Ranks) -> MemoryView:
        """Prove a step, and make a directory of it on this host. Collective; raises :class:`CheckpointError` alike if any unit is
        held by no host."""
        mine: dict[str, list[str]] = {}  # this host's slots of the step, and their files
        text = b""

        def find() -> dict[str, list[str]]:
            nonlocal text
            if self._line in self._ring.lines:
                for name in self._ring.slots():
                    slot = self._ring.slot(name)
                    found = _manifest_of(slot)
                    if xxhash.xxh3_64_hexdigest(found) == held.checksum:
                        mine[name] = sorted(slot.files())
                        text = found
            return mine

        first, only_copies = ranks.combine("who has the manifest", find, _first_and_copies)
        text = ranks.combine("send the manifest", lambda: text if first == ranks.rank else b"", _only)
        with ranks.agree("read the manifest in memory"):
            manifest = parse_manifest(text, self._ring.path)
        # Hosts prove their own slices, and at once copies of those whose own host is lost; other copies only where those are damaged.
        of_step = frozenset(manifest.files)  # slots may hold files of other ranks, which an older step had
        wanted = {"own": of_step, "held": of_step.intersection(only_copies)}
        holdings, lost = ranks.combine(
            "prove a step in memory",
            partial(self._proved, manifest, mine, wanted, ranks),
            partial(_merged, manifest, {}),
        )
        if lost:
            wanted = {"own": frozenset(), "held": frozenset(lost).difference(only_copies)}
            holdings, lost = ranks.combine(
                "prove copies in memory",
                partial(self._proved, manifest, mine, wanted, ranks),
                partial(_merged, manifest, holdings),
            )
        if lost:
            raise CheckpointError(f"step {held.step} in memory: no host holds all of {', '.join(lost[:5])}")
        return MemoryView(self._host, ranks, manifest, text, holdings)

    def _proved(
        self,
        manifest: Manifest,
        slots: Mapping[str, Sequence[str]],
        wanted: Mapping[str, Collection[str]],
        ranks: Ranks,
    ) -> dict[str, Any]:
        """What this rank proves of the files that are wanted of each kind of slot; the ranks of a host share the work."""
        beside = self._host.places.beside(ranks.rank)
        index = beside.index(ranks.rank)
        found: dict[str, Any] = {}
        for slot, files in slots.items():
            of_slot = [f for f in files if f in wanted[slot.partition("-")[0]]]
            for name in of_slot[index :: len(beside)]:
                path = inside(self._ring.slot(slot).path, name)
                if units := proved_units(path, manifest.files[name], ranks.tick):
                    found.setdefault(name, []).append([ranks.rank, slot, runs_of(units)])
        return found


def _manifest_of(slot: Slot) -> bytes:
    """The text of a slot's manifest; empty if it can't be read."""
    try:
        return read_small(os.path.join(slot.path, MANIFEST_NAME))
    except ShardwiseError:
        return b""


def _held_in(slot: Slot) -> HeldStep | None:
    """What a slot holds by its manifest, if that is intact."""
    text = _manifest_of(slot)
    try:
        return HeldStep(step_of_manifest(text, slot.path), xxhash.xxh3_64_hexdigest(text))
    except ShardwiseError:
        return None


def _agreed_slot(found: list[int]) -> int:
    """The slot that must stay, from the hosts that have one."""
    return max((n for n in found if n >= 0), default=1)


def _newest_first(found: list[list[list[Any]]]) -> list[list[Any]]:
    return sorted(([s, c] for s, c in {tuple(one) for of in found for one in of}), reverse=True)


def _first_and_copies(found: list[dict[str, list[str]]]) -> list[Any]:
    """The first rank whose host has the manifest, and the files of which only copies are there, on other hosts than their own."""
    by_kind: dict[str, set[str]] = {"own": set(), "held": set()}
    for slots in found:
        for slot, files in slots.items():
            by_kind[slot.partition("-")[0]].update(files)
    first = next((rank for rank, slots in enumerate(found) if slots), None)
    if first is None:
        raise CheckpointError("the step in memory is gone: no host has its manifest any more")
    return [first, sorted(by_kind["held"] - by_kind["own"])]


def _only(found: list[bytes]) -> bytes:
    return next(text for text in found if text)


def _merged(manifest: Manifest, before: Holdings, new: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All holdings, and the files of which a unit is held by no rank."""
    merged: dict[str, list[Any]] = {name: [] for name in manifest.files}
    for one in (before, *new):
        for name, holders in one.items():
            merged[name] += holders
    lost = [
        name
        for name, entry in manifest.files.items()
        if not are_all([run for _, _, runs in merged[name] for run in runs], units_in(entry))
    ]
    return [merged, lost]
