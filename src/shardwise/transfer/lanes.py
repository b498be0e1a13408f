"""Reads what the page cache holds in several lanes: threads of a rank that each take the plan's next read.

One thread keeps one core busy when it copies from the page cache; a host may have more cores than ranks. In lanes the Python between two reads
runs beside the reads of other lanes. Their reads fail rather than wait for storage (``RWF_NOWAIT``). The first that fails ends the lanes:
all that is left goes to the one reader of the plan, which asks for bytes ahead, tries ways to read, and says what is wrong.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from functools import partial

from ..models.host_memory import HostMemory
from ..planning.records import Transfer
from ..ranks.patience import current_watch, patiently, watched
from .converted import Reader
from .copy import Destination, Staging, execute, parts_of, read_direct
from .readers import SourceReader

__all__ = ["LEAST_BYTES", "MOST_BYTES", "CachedFiles", "execute_own"]

#: Fewer bytes are read in one lane: starting threads would take longer.
LEAST_BYTES = 32 * 1024**2
#: A larger read is cut, so that all lanes end at about the same time, and to show progress.
MOST_BYTES = 16 * 1024**2
#: Progress is told after so many bytes: telling takes a hundredth of the time of reading them.
_TELL_BYTES = 4 * 1024**2


def execute_own(
    transfers: Sequence[Transfer],
    files: SourceReader,
    reader: Reader,
    destination: Destination,
    staging: Staging,
    memory: HostMemory,
) -> None:
    """Carry out transfers on this rank: in lanes those that go from the page cache straight into CPU memory, then the others.

    ``reader``: the source, of which ``files`` reads the files. Otherwise as :func:`.copy.execute`.
    """
    if count := files.lanes:
        parts: list[tuple[Transfer, int]] = []  # with their bytes
        others: list[Transfer] = []
        for transfer in transfers:
            if not (
                files.has_file(transfer.path)
                and transfer.is_direct
                and destination.tensor(transfer.wanted).is_cpu
            ):
                others.append(transfer)
            elif (nbytes := transfer.bytes_to_read) <= MOST_BYTES:
                parts.append((transfer, nbytes))
            else:
                parts += [(part, part.bytes_to_read) for part in parts_of(transfer, MOST_BYTES)]
        if sum(nbytes for _, nbytes in parts) < LEAST_BYTES:
            count = 1
        lanes = _Lanes(parts, destination, memory)
        lanes.run(count, partial(files.was_in_cache, lanes=count))
        transfers = lanes.left() + others
    execute(transfers, reader, destination, staging, memory)


class _Lanes:
    """Reads of one plan, each of which goes to whichever lane is free next."""

    def __init__(
        self, parts: Sequence[tuple[Transfer, int]], destination: Destination, memory: HostMemory
    ) -> None:
        self._parts, self._destination, self._memory = parts, destination, memory
        self._next = iter(range(len(parts)))
        self._is_read = bytearray(len(parts))
        self._is_over = False

    def run(self, count: int, on_progress: Callable[[int], None]) -> None:
        """Read in ``count`` lanes, of which the calling thread is one. At the return no thread reads any more.

        Calls ``on_progress(n)`` for the bytes of all lanes, in the calling thread.
        """
        done, watch = [0] * count, current_watch()
        told = 0

        def tell(least: int = _TELL_BYTES) -> None:
            nonlocal told
            new = sum(done) - told
            if new >= least:
                told += new
                on_progress(new)

        def beside(lane: int) -> None:
            with watched(watch):
                self._lane(done, lane, lambda: None)

        others: list[Future[None]] = []
        with ThreadPoolExecutor(max(1, count - 1), "shardwise-lane") as pool:
            try:
                with suppress(RuntimeError):  # the system has no thread left
                    for lane in range(1, count):
                        others.append(pool.submit(beside, lane))
                self._lane(done, 0, tell)
            finally:
                self._is_over = True
                patiently(wait, others)
        for other in others:
            other.result()
        tell(1)

    def left(self) -> list[Transfer]:
        """What was not read, in the order of the plan."""
        return [part for (part, _), is_read in zip(self._parts, self._is_read, strict=True) if not is_read]

    def _lane(self, done: list[int], lane: int, tell: Callable[[], None]) -> None:
        try:
            with closing(CachedFiles()) as files, suppress(OSError):  # the plan's reader says what is wrong
                for k in self._next:
                    if self._is_over:
                        return
                    part, nbytes = self._parts[k]
                    read_direct(part, files, self._destination.view(part.wanted), self._memory)
                    self._is_read[k] = True
                    done[lane] += nbytes
                    tell()
        finally:
            self._is_over = True


class CachedFiles:
    """Reads files as long as the page cache holds what is read; keeps the last one open. Raises ``OSError``."""

    def __init__(self) -> None:
        self._path, self._fd = "", -1

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        if path != self._path:
            self.close()
            self._fd = patiently(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._path = path
        if patiently(os.preadv, self._fd, [view], offset_bytes, os.RWF_NOWAIT) != view.nbytes:
            raise BlockingIOError(errno.EAGAIN, "not all of it is in the page cache")

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._path, self._fd = self._fd, "", -1
            patiently(os.close, fd)
