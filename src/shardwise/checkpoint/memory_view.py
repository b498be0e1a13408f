"""One step in memory as a directory for a restore: what other hosts hold arrives when it is read."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

from ..errors import CheckpointError, IntegrityError
from ..format.manifest import MANIFEST_NAME, Manifest
from ..format.places import rank_of_file
from ..limits import inside
from ..memory.copies import copy_units
from ..memory.link import Reader
from ..memory.ring import unwritten, write_whole
from ..memory.units import units_of
from ..ranks.patience import remove_tree
from ..ranks.ranks import Ranks
from .memory_save import Host

__all__ = ["Holdings", "MemoryView"]

#: For each file of a step, the ranks that have proved units of it: rank, slot, and numbers of the units.
Holdings = Mapping[str, Sequence[tuple[int, str, Sequence[int]]]]


class MemoryView:
    """A directory with every file of a step: links to the files that this host holds whole, and room for units that its ranks bring from
    other hosts."""

    def __init__(self, host: Host, ranks: Ranks, manifest: Manifest, text: bytes, holdings: Holdings) -> None:
        self.manifest = manifest
        self._host, self._ranks, self._holdings = host, ranks, holdings
        self.taken: dict[str, int] = {}
        """Bytes that this rank brought here, by host."""
        self._readers: dict[int, Reader] = {}
        self._missing = {
            name: frozenset(range(len(units_of(entry))))
            for name, entry in manifest.files.items()
            if self._whole_here(name) is None
        }
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
            try:
                os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
                if whole := self._whole_here(name):
                    os.link(whole, path)
                else:
                    with open(path, "xb") as file:
                        file.truncate(entry.nbytes)
            except OSError as error:
                raise unwritten(path, error) from error

    def _whole_here(self, name: str) -> str | None:
        count, beside = len(units_of(self.manifest.files[name])), self._host.places.beside(self._ranks.rank)
        for rank, slot, units in self._holdings[name]:
            if rank in beside and len(units) == count:
                return inside(self._host.ring.slot(slot).path, name)
        return None

    def bring_documents(self) -> None:
        """Bring what this host lacks of the files that a restore reads whole: those without slices, of other hosts' ranks excepted.

        Rank-local: the ranks of a host share the work. Raises as :meth:`bring`.
        """
        beside = self._host.places.beside(self._ranks.rank)
        documents = [
            name
            for name in sorted(self._missing)
            if not os.path.basename(name).startswith("shard-")
            and (not name.startswith("rank/") or rank_of_file(name) in beside)
        ]
        for name in documents[beside.index(self._ranks.rank) :: len(beside)]:
            self._bring(name, self._missing[name])
        for name in documents:
            del self._missing[name]

    def bring(self, path: str, start: int, stop: int) -> None:
        """Bring the units of these bytes of a slice file, if this host lacks them. Rank-local; ranks of a host may bring one unit twice.

        Raises :class:`CheckpointError` if no host sends them, :class:`IntegrityError` if they arrive damaged.
        """
        name = os.path.relpath(path, self.path)
        if missing := self._missing.get(name):
            units = units_of(self.manifest.files[name])
            self._bring(name, {n for n in missing if units[n].start < stop and start < units[n].stop})

    def _bring(self, name: str, wanted: Collection[int]) -> None:
        """Bring units of a file from the first of their holders that sends them."""
        left, problem = set(wanted), "no host holds all of it"
        units = units_of(self.manifest.files[name])
        for rank, slot, found in self._holdings[name]:
            now = sorted(left.intersection(found))
            if not now:
                continue
            try:
                nbytes = copy_units(
                    self._reader(rank),
                    f"{slot}/{name}",
                    [units[n] for n in now],
                    inside(self.path, name),
                    self._ranks.tick,
                )
            except (CheckpointError, IntegrityError) as error:
                problem = str(error)
                continue
            host = self._host.places.peers[rank].host
            self.taken[host] = self.taken.get(host, 0) + nbytes
            left.difference_update(now)
        if left:
            raise CheckpointError(f"{name}: {problem}")
        self._missing[name] = self._missing[name] - set(wanted)

    def _reader(self, rank: int) -> Reader:
        if rank not in self._readers:
            self._readers[rank] = self._host.reader(rank)
        return self._readers[rank]

    def remove(self) -> None:
        """Give its memory back. Collective."""
        for reader in self._readers.values():
            reader.close()
        with self._ranks.agree("remove the view"):
            if self._host.places.is_leader(self._ranks.rank):
                remove_tree(self.path)
