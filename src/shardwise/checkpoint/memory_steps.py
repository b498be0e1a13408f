"""The steps of a run in memory: keeping them, finding the newest that is held and proved, and a view of it for a restore."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

from ..errors import CheckpointError, FormatError, RankError, ShardwiseError
from ..format.manifest import MANIFEST_NAME, Manifest, parse_manifest
from ..limits import inside, read_small
from ..memory.copies import copy_units
from ..memory.link import Server, address_towards_store
from ..memory.options import MemoryTier
from ..memory.places import Peer, Places
from ..memory.record import Record, new_word, read_or_make_record, write_record
from ..memory.ring import Ring, Slot, write_whole
from ..memory.units import Unit, proved_units, units_of
from ..ranks.patience import remove_tree
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..storage import is_url
from .collect import Lineage, collect
from .memory_save import Host, MemorySave

__all__ = ["HeldStep", "MemorySteps"]

_log = logging.getLogger(__name__)
_NUMBERS = itertools.count()
#: For each file of a step, the ranks that have proved units of it: rank, slot, and numbers of the units.
Holdings = Mapping[str, Sequence[tuple[int, str, Sequence[int]]]]


@dataclass(frozen=True, slots=True)
class HeldStep:
    """A step that some hosts have a manifest of."""

    step: int
    checksum: str
    """Of its manifest."""


class MemorySteps:
    """Every rank makes one. Collective, and raises alike on all ranks: :class:`CheckpointError`, :class:`RankError`."""

    def __init__(self, tier: MemoryTier, root: str, ranks: Ranks) -> None:
        if is_url(root):
            raise ValueError(f"memory= needs a directory for the run's steps, not a URL: {root}")
        self._tier, self._root = tier, root
        self.newest: int | None = None
        """The newest step that this run has in memory, or had taken from there."""
        self._slot, self._is_off, self._has_line = 1, False, False
        self._saving: MemorySave | None = None
        self.failed: list[HeldStep] = []
        """Steps that were tried, and are not held whole."""

        def begin() -> list[str]:
            record = read_or_make_record(root)
            # Rank 0 names the channel of the threads' agreements: other ranks may have had another number of runs.
            return [record.name, record.line, secrets.token_hex(32), f"memory-{next(_NUMBERS)}-"]

        self._name, self._line, secret, self._channel = ranks.on_first("begin the memory tier", begin)

        def told() -> list[Any]:
            ring = Ring(tier.root, self._name)
            address = tier.address or address_towards_store()
            self._server = Server(ring, secret.encode(), address, tier.timeout_s)
            self._ring = ring
            return [tier.host_name, address, self._server.port]

        peers = ranks.combine("meet the hosts", told, list)
        places = Places([Peer(*one) for one in peers])
        self._host = Host(tier, self._ring, places, secret.encode())
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
        slot = ranks.combine("keep a step", self._ready, _agreed_slot)
        if slot is None:
            return 0
        self._slot = slot
        collected = collect(state, step, lineage, ranks)
        group = Ranks.current(timeout_s=ranks.timeout_s, channel=self._channel)
        self._saving = MemorySave(collected, self._host, 1 - self._slot, group)
        self._saving.copy()
        return self._saving.nbytes

    def _ready(self) -> int | None:
        """The slot of the newest step; -1 if this host has none, None if no step can be kept now."""
        if self._saving is not None or self._is_off:
            return None
        if self.newest is None:
            return -1
        held = [_held_in(self._ring.slot(f"own-{n}")) for n in (0, 1)]
        return next((n for n, one in enumerate(held) if one is not None and one.step == self.newest), -1)

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
        if isinstance(saving.error, RankError) and saving.error.missing:
            self._is_off = True  # ranks are out of step

    def close(self, *, keep: bool, ranks: Ranks) -> None:
        """Wait, and give the memory back unless the next start wants it."""
        self.wait()
        self._server.close()
        if not keep and self._host.places.is_leader(ranks.rank):
            self._ring.remove()

    def begin_line(self, step: int | None, ranks: Ranks) -> None:
        """From here on nothing but steps up to ``step`` may ever be taken from memory, on hosts that are here. Collective."""
        line = ranks.on_first("begin a line", new_word)
        with ranks.agree("begin a line"):
            if self._host.places.is_leader(ranks.rank):
                is_ours = self._line in self._ring.lines
                for name in self._ring.slots():
                    held = _held_in(self._ring.slot(name))
                    if not is_ours or step is None or held is None or held.step > step:
                        self._ring.slot(name).clear()
                self._ring.set_lines([self._line, line] if is_ours else [line])
        ranks.on_first("write the line", lambda: write_record(self._root, Record(self._name, line)))
        self._line, self._has_line = line, True

    def took(self, held: HeldStep) -> None:
        """A resume has taken this step: it stays until a newer one is held."""
        self.newest = held.step

    def path_of(self, held: HeldStep) -> str:
        """Where a step is held, for people."""
        return f"{self._ring.path} step {held.step}"

    # -- finding ------------------------------------------------------------------------------------------

    def candidates(self, ranks: Ranks) -> list[HeldStep]:
        """Steps of which some host has a manifest, newest first; nothing is proved yet. Collective."""

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
        mine: list[str] = []
        text = b""

        def find() -> bool:
            nonlocal text
            if self._line in self._ring.lines:
                for name in self._ring.slots():
                    if _held_in(self._ring.slot(name)) == held:
                        mine.append(name)
                        text = read_small(os.path.join(self._ring.slot(name).path, MANIFEST_NAME))
            return bool(mine)

        has = ranks.combine("who has the manifest", find, list)
        text = ranks.combine(
            "send the manifest", lambda: text if has.index(True) == ranks.rank else b"", _only
        )
        with ranks.agree("read the manifest in memory"):
            manifest = parse_manifest(text, self._ring.path)
        holdings: Holdings = {}
        for kind in ("own", "held"):
            holdings, lost = ranks.combine(
                "prove a step in memory",
                lambda kind=kind: self._proved(manifest, [n for n in mine if n.startswith(kind)], ranks),  # type: ignore[misc]
                partial(_merged, manifest, holdings),
            )
            if not lost:
                break
        else:
            raise CheckpointError(f"step {held.step} in memory: no host holds all of {', '.join(lost[:5])}")
        return MemoryView(self._host, ranks, manifest, text, holdings)

    def _proved(self, manifest: Manifest, slots: Sequence[str], ranks: Ranks) -> dict[str, Any]:
        beside = self._host.places.beside(ranks.rank)
        index, found = beside.index(ranks.rank), {}
        for slot in slots:
            files = [f for f in sorted(self._ring.slot(slot).files()) if f in manifest.files]
            for name in files[index :: len(beside)]:
                path = inside(self._ring.slot(slot).path, name)
                if units := proved_units(path, manifest.files[name], ranks.tick):
                    found[name] = [[ranks.rank, slot, units]]
        return found


class MemoryView:
    """A directory with every file of a step: links to what this host holds whole, and room for what ranks bring from others."""

    def __init__(self, host: Host, ranks: Ranks, manifest: Manifest, text: bytes, holdings: Holdings) -> None:
        self.manifest = manifest
        self._host, self._ranks, self._holdings = host, ranks, holdings
        self.taken: dict[str, int] = {}
        """Bytes that this rank brought here, by host."""
        leader = host.places.beside(ranks.rank)[0]
        made = ranks.combine("name views", lambda: host.ring.new_view() if ranks.rank == leader else "", list)
        self.path = made[leader]
        with ranks.agree("make a view"):
            if ranks.rank == leader:
                host.ring.sweep_views()
                self._make(text)

    def _make(self, text: bytes) -> None:
        write_whole(os.path.join(self.path, MANIFEST_NAME), text)
        for name, entry in self.manifest.files.items():
            path = inside(self.path, name)
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            if whole := self._whole_here(name):
                os.link(whole, path)
            else:
                with open(path, "xb") as file:
                    file.truncate(entry.nbytes)

    def _whole_here(self, name: str) -> str | None:
        count, beside = len(units_of(self.manifest.files[name])), self._host.places.beside(self._ranks.rank)
        for rank, slot, units in self._holdings[name]:
            if rank in beside and len(units) == count:
                return inside(self._host.ring.slot(slot).path, name)
        return None

    def bring(self) -> None:
        """Bring what this host lacks; its ranks share the work. Rank-local. Raises :class:`CheckpointError`, :class:`IntegrityError`."""
        beside = self._host.places.beside(self._ranks.rank)
        lacking = [name for name in self.manifest.files if self._whole_here(name) is None]
        for name in lacking[beside.index(self._ranks.rank) :: len(beside)]:
            self._bring(name)

    def _bring(self, name: str) -> None:
        units = units_of(self.manifest.files[name])
        left = set(range(len(units)))
        for rank, slot, found in self._holdings[name]:
            now: list[Unit] = [units[n] for n in found if n in left]
            if not now:
                continue
            reader = self._host.reader(rank)
            try:
                nbytes = copy_units(reader, f"{slot}/{name}", now, inside(self.path, name), self._ranks.tick)
            finally:
                reader.close()
            host = self._host.places.peers[rank].host
            self.taken[host] = self.taken.get(host, 0) + nbytes
            left.difference_update(found)
        if left:
            raise CheckpointError(f"{name}: no host holds all of it")

    def remove(self) -> None:
        """Give its memory back. Collective."""
        with self._ranks.agree("remove the view"):
            if self._host.places.is_leader(self._ranks.rank):
                remove_tree(self.path)


def _held_in(slot: Slot) -> HeldStep | None:
    try:
        text = read_small(os.path.join(slot.path, MANIFEST_NAME))
        return HeldStep(parse_manifest(text, slot.path).step, xxhash.xxh3_64_hexdigest(text))
    except (ShardwiseError, FormatError):
        return None


def _agreed_slot(found: list[int | None]) -> int | None:
    """The slot that must stay, from the hosts that have one."""
    return None if None in found else max((n for n in found if n is not None and n >= 0), default=1)


def _newest_first(found: list[list[list[Any]]]) -> list[list[Any]]:
    return sorted(([s, c] for s, c in {tuple(one) for of in found for one in of}), reverse=True)


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
        if len({n for _, _, units in merged[name] for n in units}) < len(units_of(entry))
    ]
    return [merged, lost]
