"""One step in memory as a directory for a restore: what other hosts hold arrives when it is read."""

from __future__ import annotations

import os
from collections import Counter

from ..format.manifest import MANIFEST_NAME, Manifest
from ..format.places import rank_of_file
from ..limits import inside
from ..memory.remote import Holdings, RemoteFiles
from ..memory.ring import unwritten, write_whole
from ..memory.units import are_all, units_in
from ..ranks.patience import remove_tree
from ..ranks.ranks import Ranks
from .memory_save import Host

__all__ = ["MemoryView"]


class MemoryView:
    """A directory with every file of a step: links to those that this host holds whole, and documents that its ranks bring from other hosts.
    Slices that it lacks come when they are read, and stay on their hosts."""

    def __init__(self, host: Host, ranks: Ranks, manifest: Manifest, text: bytes, holdings: Holdings) -> None:
        self.manifest = manifest
        self._host, self._ranks, self._holdings = host, ranks, holdings
        self._missing = {name for name in manifest.files if self._whole_here(name) is None}
        self._remote = RemoteFiles(manifest.files, holdings, host.reader, ranks.tick)
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
        count, beside = units_in(self.manifest.files[name]), self._host.places.beside(self._ranks.rank)
        for rank, slot, runs in self._holdings[name]:
            if rank in beside and are_all(runs, count):
                return inside(self._host.ring.slot(slot).path, name)
        return None

    def bring_documents(self) -> None:
        """Bring what this host lacks of the files that a restore reads whole: those without slices, of other hosts' ranks excepted.

        Rank-local: the ranks of a host share the work. Raises as :meth:`read_into`; :class:`LowSpaceError` if there is no room.
        """
        beside = self._host.places.beside(self._ranks.rank)
        documents = [
            name
            for name in sorted(self._missing)
            if not os.path.basename(name).startswith("shard-")
            and (not name.startswith("rank/") or rank_of_file(name) in beside)
        ]
        for name in documents[beside.index(self._ranks.rank) :: len(beside)]:
            self._remote.copy(name, inside(self.path, name))
        self._missing.difference_update(documents)

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> bool:
        """Fill ``view`` with bytes of a slice file that this host lacks. False: the host has the file. Rank-local.

        Raises as :meth:`.RemoteFiles.read_into`.
        """
        name = os.path.relpath(path, self.path)
        if name not in self._missing:
            return False
        self._remote.read_into(name, offset_bytes, view)
        return True

    @property
    def taken(self) -> dict[str, int]:
        """Bytes that this rank brought here, by host."""
        found = Counter[str]()
        for rank, nbytes in self._remote.taken.items():
            found[self._host.places.peers[rank].host] += nbytes
        return found

    def remove(self) -> None:
        """Give its memory back. Collective."""
        self._remote.close()
        with self._ranks.agree("remove the view"):
            if self._host.places.is_leader(self._ranks.rank):
                remove_tree(self.path)
