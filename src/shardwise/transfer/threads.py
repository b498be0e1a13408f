"""Threads that share a large read. One thread keeps one core busy when it copies from the page cache; hosts have more cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise

import torch.distributed as dist

__all__ = ["LEAST_BYTES", "MOST_ONTO_DEVICE", "MOST_THREADS", "Threads", "threads_of_this_rank"]

#: With more threads, those of one rank would wait for each other in the kernel, or for storage.
MOST_THREADS = 4
#: Reads into pinned memory cause no page faults, so more threads pay: 18 GB/s with 4, 27 with 8, 22 with 12 (H200, 16 cores).
MOST_ONTO_DEVICE = 8
#: A smaller part of a read costs less than handing it to a thread.
LEAST_BYTES = 1024**2


def threads_of_this_rank(most: int = MOST_THREADS) -> int:
    """The cores that the host has for each of its ranks, at least 1 and at most ``most``. Rank-local.

    The ranks of a host are ``LOCAL_WORLD_SIZE``, which launchers set; without it, all ranks of the process group. A process that
    is bound to some cores uses no others.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local) if local.isascii() and local.isdigit() else _world_size()
    cores = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return max(1, min(most, bound, cores // max(1, ranks)))


class Threads:
    """Reads from files in ``count`` threads, the caller's among them. Starts them with the first read that is large enough.

    Not thread-safe; rank-local.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.shared_bytes = 0
        """Bytes of reads in which several threads took part."""
        self._pool: ThreadPoolExecutor | None = None
        self._may_start = True

    def preadv(self, fd: int, view: memoryview, offset_bytes: int, flags: int = 0) -> int:
        """``os.preadv`` into one buffer: returns the number of bytes read from ``offset_bytes`` on without a gap.

        No thread writes into ``view`` after the return. Raises ``OSError`` as ``os.preadv`` does, for the first part that fails. Where
        the system can start no thread, the caller's thread reads all of this and of all later reads.
        """
        cuts = _cuts(view.nbytes, self.count if self._may_start else 1)
        if len(cuts) == 2:
            return os.preadv(fd, [view], offset_bytes, flags)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count - 1, "shardwise-read")
        parts = [(view[start:stop], offset_bytes + start) for start, stop in pairwise(cuts)]
        others: list[Future[int]] = []
        try:
            try:
                for part, at in parts[1:]:
                    others.append(self._pool.submit(os.preadv, fd, [part], at, flags))
            except RuntimeError:  # no thread could start
                # The threads that run read their parts before this returns.
                self.close()
                self._may_start = False
                return os.preadv(fd, [view], offset_bytes, flags)
            counts = [os.preadv(fd, [parts[0][0]], parts[0][1], flags)]
        finally:
            wait(others)
        counts += [other.result() for other in others]
        done = 0
        for count, (part, _) in zip(counts, parts, strict=True):
            done += count
            if count < part.nbytes:
                break
        self.shared_bytes += done
        return done

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _cuts(nbytes: int, parts: int) -> Sequence[int]:
    """Where to cut a read of ``nbytes`` into at most so many parts of ``LEAST_BYTES`` or more: 0, …, ``nbytes``."""
    parts = max(1, min(parts, nbytes // LEAST_BYTES))
    return [nbytes * k // parts // 4096 * 4096 for k in range(parts)] + [nbytes]
