"""Reads cached bytes in lanes: threads of a rank, each of which takes the plan's next read.

One thread keeps one core busy when it copies from the page cache; a host may have more cores than ranks. In lanes the Python between two reads
runs beside the reads of other lanes. A read goes into the tensor's own memory, or into a slot of the ring of its device, from which the lane
has the device copy it. Their reads fail rather than wait for storage (``RWF_NOWAIT``). The first that fails ends the lanes:
all that is left goes, in the plan's order, to the one reader of the plan. It asks for bytes ahead, tries ways to read, makes the read that
failed once more, and says what is wrong.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from ..devices import copies_late
from ..errors import SourceError
from ..models.host_memory import HostMemory
from ..planning.records import Transfer
from ..ranks.patience import current_watch, patiently, watched
from .converted import Reader
from .copy import Destination, Staging, execute, parts_of, put, read_direct
from .readers import SourceReader
from .to_device import DeviceRings

__all__ = ["LEAST_FOR_THREADS", "MOST_BYTES", "WINDOW", "CachedFiles", "execute_own"]

#: Fewer bytes are read in one lane: starting threads would take longer.
LEAST_FOR_THREADS = 32 * 1024**2
#: A larger read is cut, so that all lanes end at about the same time, and to show progress.
MOST_BYTES = 16 * 1024**2
#: Progress is told after so many bytes: telling takes a hundredth of the time of reading them.
_TELL_BYTES = 4 * 1024**2
#: So many transfers are made from the plan at a time: one of 1,024 ranks has hundreds of thousands.
WINDOW = 4096


def execute_own(
    transfers: Sequence[Transfer],
    files: SourceReader,
    reader: Reader,
    destination: Destination,
    staging: Staging,
    memory: HostMemory,
) -> None:
    """Carry out transfers on this rank: in lanes those that go from the page cache onto a device, or straight into CPU memory; then the others.

    ``reader``: the source, of which ``files`` reads the files. Otherwise as :func:`.copy.execute`.
    """
    made = iter(transfers)
    with staging.rings() as rings:
        for start in range(0, len(transfers), WINDOW):
            if not files.lanes():
                execute(_Rest([], transfers, start), reader, destination, staging, memory)
                return
            window = list(islice(made, WINDOW))
            lanes = _Lanes(_fitting(window, files, destination, rings), files, destination, rings, memory)
            lanes.run()
            left = lanes.left_of(window)
            if lanes.has_failed:
                execute(_Rest(left, transfers, start + WINDOW), reader, destination, staging, memory)
                return
            if left:
                execute(left, reader, destination, staging, memory)


class _Rest:
    """Some transfers, and then those of a plan from a place on, made one by one each time they are gone through."""

    def __init__(self, first: Sequence[Transfer], transfers: Sequence[Transfer], start: int) -> None:
        self._first, self._transfers, self._start = first, transfers, start

    def __iter__(self) -> Iterator[Transfer]:
        yield from self._first
        yield from islice(self._transfers, self._start, None)


#: A read of a lane: the place of its transfer in the window, the transfer or a part of it, and the bytes.
_Part = tuple[int, Transfer, int]


def _fitting(
    window: Sequence[Transfer], files: SourceReader, destination: Destination, rings: DeviceRings
) -> list[_Part]:
    """Transfers from a local file, as it is into CPU memory or onto a device in any way; the large ones in parts."""
    found: list[_Part] = []
    for place, transfer in enumerate(window):
        if not files.has_file(transfer.path):
            continue
        device = destination.tensor(transfer.wanted).device
        if copies_late(device):
            rings.prepare(device)
            most = rings.slot_bytes
        elif device.type == "cpu" and transfer.is_direct:
            most = MOST_BYTES
        else:
            continue
        nbytes = transfer.bytes_to_read
        if nbytes <= most:
            found.append((place, transfer, nbytes))
        else:
            found += [(place, part, part.bytes_to_read) for part in parts_of(transfer, most)]
    return found


class _Lanes:
    """Reads of one plan, each of which goes to whichever lane is free next."""

    def __init__(
        self,
        parts: Sequence[_Part],
        files: SourceReader,
        destination: Destination,
        rings: DeviceRings,
        memory: HostMemory,
    ) -> None:
        self._parts, self._files, self._destination = parts, files, destination
        self._rings, self._memory = rings, memory
        few = sum(nbytes for _, _, nbytes in parts) < LEAST_FOR_THREADS
        self._count = 1 if few else files.lanes(onto_device=rings.are_used)
        self._next = iter(range(len(parts)))
        self._is_read = bytearray(len(parts))
        self._done = [0] * self._count
        self._told = 0
        self._is_over = False
        self._errors: list[BaseException] = []
        self.has_failed = False

    def run(self) -> None:
        """Read, in the calling thread and others. At the return no thread reads any more.

        The reader of the files counts the bytes of all lanes, in the calling thread.
        """
        watch = current_watch()

        def beside(lane: int) -> None:
            with watched(watch):
                try:
                    self._lane(lane, lambda: None)
                except BaseException as error:
                    self._errors.append(error)

        others: list[threading.Thread] = []
        try:
            with suppress(RuntimeError):  # the system has no thread left
                for lane in range(1, self._count):
                    # An interrupt may come while a thread starts: the thread then finds that all is over, and reads nothing.
                    others.append(threading.Thread(target=beside, args=(lane,), name="shardwise-lane"))
                    others[-1].start()
            self._lane(0, self._tell)
        finally:
            self._is_over = True
            for other in others:
                if other.is_alive():
                    patiently(other.join)
        if self._errors:
            raise self._errors[0]
        self._tell(least=1)

    def left_of(self, window: Sequence[Transfer]) -> list[Transfer]:
        """What the lanes did not read of a window, in its order."""
        taken = {place for place, _, _ in self._parts}
        left = [(place, transfer) for place, transfer in enumerate(window) if place not in taken]
        left += [
            (place, part)
            for (place, part, _), is_read in zip(self._parts, self._is_read, strict=True)
            if not is_read
        ]
        return [transfer for _, transfer in sorted(left, key=lambda one: one[0])]

    def _lane(self, lane: int, tell: Callable[[], None]) -> None:
        files = CachedFiles(self._files)
        try:
            for k in self._next:
                if self._is_over:
                    return
                _, part, nbytes = self._parts[k]
                try:
                    if self._destination.tensor(part.wanted).is_cpu:
                        read_direct(part, files, self._destination.view(part.wanted), self._memory)
                    else:
                        put(part, files, self._destination, self._rings)
                except (OSError, SourceError):  # the plan's reader says what is wrong
                    self.has_failed = True
                    return
                self._is_read[k] = True
                self._done[lane] += nbytes
                tell()
        finally:
            self._is_over = True
            files.close()

    def _tell(self, least: int = _TELL_BYTES) -> None:
        new = sum(self._done) - self._told
        if new >= least:
            self._told += new
            self._files.was_in_cache(new, lanes=sum(map(bool, self._done)))


class CachedFiles:
    """Reads files as long as the page cache holds what is read, from where a reader has opened them; keeps the last one.

    Raises ``OSError``, or as the reader does for a file that can't be opened.
    """

    def __init__(self, files: SourceReader) -> None:
        self._files, self._path, self._fd = files, "", -1

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        if path != self._path:
            self.close()
            self._fd = self._files.descriptor(path)
            self._path = path
        if patiently(os.preadv, self._fd, [view], offset_bytes, os.RWF_NOWAIT) != view.nbytes:
            raise BlockingIOError(errno.EAGAIN, "not all of it is in the page cache")

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._path, self._fd = self._fd, "", -1
            with suppress(OSError):  # it was only read
                patiently(os.close, fd)
