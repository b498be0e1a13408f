"""Which rank lies on which host, and whose slices each rank copies. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..objects import frozen

__all__ = ["Peer", "Places"]


@frozen
class Peer:
    """A rank's host, and where other ranks reach its server."""

    host: str
    address: str
    port: int


class Places:
    """The hosts of a run, in the order of their first ranks. The same on every rank."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = tuple(peers)
        self._by_host: dict[str, list[int]] = {}
        for rank, peer in enumerate(peers):
            self._by_host.setdefault(peer.host, []).append(rank)
        self._hosts = list(self._by_host)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self._hosts)

    def beside(self, rank: int) -> list[int]:
        """The ranks on the host of ``rank``, itself included."""
        return self._by_host[self.peers[rank].host]

    def is_leader(self, rank: int) -> bool:
        """Whether a rank is the first on its host. That rank does the work that a host needs once."""
        return self.beside(rank)[0] == rank

    def holders_of(self, rank: int, copies: int) -> list[int]:
        """The ranks on other hosts that copy the slices of ``rank``: one on each of the next ``copies - 1`` hosts.

        Ranks of one host spread over those of the next.
        """
        own, index = self._hosts.index(self.peers[rank].host), self.beside(rank).index(rank)
        found = []
        for k in range(1, min(copies, self.hosts)):
            there = self._by_host[self._hosts[(own + k) % self.hosts]]
            found.append(there[index % len(there)])
        return found

    def sources_of(self, rank: int, copies: int) -> list[int]:
        """The ranks whose slices ``rank`` copies."""
        host = self._hosts.index(self.peers[rank].host)
        before = {self._hosts[(host - k) % self.hosts] for k in range(1, min(copies, self.hosts))}
        ranks = [one for name in before for one in self._by_host[name]]
        return sorted(one for one in ranks if rank in self.holders_of(one, copies))
