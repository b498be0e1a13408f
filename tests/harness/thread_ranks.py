"""Ranks as threads of one process, each with its own client of a real TCPStore: more ranks than processes can be started."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from typing import Any, TypeVar, cast

import torch.distributed as dist

from shardwise.objects import frozen
from shardwise.ranks.protocol import Agreement, Store
from shardwise.ranks.ranks import Ranks

__all__ = ["ThreadRanks", "on_threads", "rank_on"]

T = TypeVar("T")
_groups = itertools.count()


@functools.cache
def _server() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@frozen(kw_only=True)
class ThreadRanks(Ranks):
    """One rank of a group that has no process group."""

    end: Agreement | None = field(default=None, compare=False)

    def _agreement(self) -> Agreement:
        assert self.end is not None
        return self.end


class _Counting:
    """A store that counts the bytes of the values that its rank receives."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.received = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        found = self._store.get(key)
        self.received += len(found)
        return cast(bytes, found)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = self._store.multi_get(keys)
        self.received += sum(map(len, found))
        return cast(list[bytes], found)


@functools.cache
def _client(rank: int) -> Any:
    """One for all groups of the process: where names of hosts are looked up slowly, it takes seconds to connect."""
    return dist.TCPStore("127.0.0.1", _server().port, is_master=False, wait_for_workers=False)


def _made(rank: int, world_size: int, group: str, timeout_s: float) -> tuple[ThreadRanks, _Counting]:
    counting = _Counting(dist.PrefixStore(group, _client(rank)))
    return _rank(counting, rank, world_size, timeout_s), counting


def _rank(store: Any, rank: int, world_size: int, timeout_s: float) -> ThreadRanks:
    end = Agreement(cast(Store, store), rank, world_size, generation=1)
    return ThreadRanks(rank=rank, world_size=world_size, timeout_s=timeout_s, end=end)


def rank_on(port: int, rank: int, world_size: int, *, timeout_s: float) -> ThreadRanks:
    """A rank with a client of its own of the store at ``port``, which no other group of ranks uses."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return _rank(store, rank, world_size, timeout_s)


def on_threads(
    world_size: int, work: Callable[[ThreadRanks], T], *, timeout_s: float = 20.0
) -> tuple[list[T | Exception], list[int]]:
    """What ``work`` returned or raised on each rank, and the bytes of values that each rank received."""
    group = f"group {next(_groups)}"
    made = [_made(r, world_size, group, timeout_s) for r in range(world_size)]
    start = threading.Barrier(world_size)

    def run(ranks: ThreadRanks) -> T | Exception:
        start.wait()
        try:
            return work(ranks)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(run, [ranks for ranks, _ in made]))
    return found, [counting.received for _, counting in made]
