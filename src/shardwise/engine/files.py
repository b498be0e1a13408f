"""Reads local files: positioned reads by several threads, look-ahead, the page cache, and the ring of pinned memory for devices."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import pairwise
from queue import SimpleQueue
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist

from ..errors import IntegrityError, SourceError
from ..host import flat_bytes
from ..internals.torch import empty_host_cache
from ..planning.plan import IOOptions, Reads, Transfer
from ..planning.proof import Span
from ..ranks.ranks import patiently

# ----------------------------------------------------------------------------------------------------
# Asks the kernel for the bytes that a load reads next, if that is faster than the kernel's own readahead.
#
# The kernel reads ahead within a file, up to the device's setting (128 KiB by default), and does not know the plan. A load knows
# its plan: while it copies one range, the kernel fetches the next ones. But the kernel puts bytes that it is asked for into small
# pages. Its own readahead may use large ones, which cost less. So the load times both.
#
# Source: ``posix_fadvise(2)``; ``force_page_cache_ra`` and ``page_cache_ra_order`` in mm/readahead.c of Linux.

#: At most so many bytes are asked for and not yet read. They lie in the page cache, not in this process.
AHEAD_BYTES = 32 * 1024**2
#: Bytes asked for at a time. The kernel ignores what one call asks for beyond the larger of its own readahead (128 KiB by
#: default) and the device's largest request.
STEP_BYTES = 128 * 1024
#: A shorter gap is asked for as well: a second request would cost as much.
GAP_BYTES = 16 * 1024
#: After a change of the way, the first bytes are not timed, because the other way has fetched them. The next are timed, and then
#: the choice is made anew.
_SETTLE_BYTES, _WINDOW_BYTES = AHEAD_BYTES, 16 * 1024**2

Kind = Literal["plain", "ahead"]


class Quicker:
    """Chooses the way to read bytes from storage that takes less time for each byte. Rank-local.

    Both ways are tried in turn; then the quicker goes on, until it takes longer than the other last took.
    """

    def __init__(self) -> None:
        self.kind: Kind = "ahead"
        #: Seconds for each byte, as last measured; 0 before.
        self._cost: dict[Kind, float] = {"ahead": 0.0, "plain": 0.0}
        self._settled = self._window = 0
        self._seconds = 0.0

    def took(self, nbytes: int, seconds: float) -> None:
        """Note a read in the chosen way."""
        if self._settled < _SETTLE_BYTES:
            self._settled += nbytes
            return
        self._window += nbytes
        self._seconds += seconds
        if self._window >= _WINDOW_BYTES:
            self._cost[self.kind] = self._seconds / self._window
            self._window, self._seconds = 0, 0.0
            if self._cost[self._other] < self._cost[self.kind]:
                self.kind, self._settled = self._other, 0

    def describe(self) -> str:
        """How much longer the other way took, if both were timed."""
        if not all(self._cost.values()):
            return ""
        return f"; {self._other} took {self._cost[self._other] / self._cost[self.kind]:.2f} times as long"

    @property
    def _other(self) -> Kind:
        return "plain" if self.kind == "ahead" else "ahead"


class LookAhead:
    """Asks for ``spans`` in this order, at most ``AHEAD_BYTES`` ahead of their reader. Rank-local.

    ``ask(path, start, stop)`` is called for a piece of a file that will be read soon.
    """

    def __init__(self, spans: Iterable[Span], ask: Callable[[str, int, int], None]) -> None:
        self._steps = steps(spans)
        self._ask = ask
        self._asked: deque[Span] = deque()
        self._nbytes = 0

    def reading(self, path: str, at: int) -> None:
        """The reader calls this before it reads byte ``at`` of a file; it has read all earlier spans."""
        while self._asked and not holds(self._asked[0], path, at):
            self._forget()
        if not self._asked:  # the first call, or what is read was not asked for
            found = next((step for step in self._steps if holds(step, path, at)), None)
            if found is None:
                return
            self._take(found)
        while self._nbytes < AHEAD_BYTES:
            step = next(self._steps, None)
            if step is None:
                return
            self._take(step)

    def _take(self, step: Span) -> None:
        self._ask(*step)
        self._asked.append(step)
        self._nbytes += step[2] - step[1]

    def _forget(self) -> None:
        _, start, stop = self._asked.popleft()
        self._nbytes -= stop - start


def steps(
    spans: Iterable[Span],
    step_bytes: int = STEP_BYTES,
    gap_bytes: int = GAP_BYTES,
    last_bytes: int | None = None,
) -> Iterator[Span]:
    """Spans in the same order, in pieces of ``step_bytes``. Spans with gaps of at most ``gap_bytes`` become one.

    The last piece of a span has fewer than ``last_bytes``: by default fewer than the others.
    """
    last_bytes = last_bytes or step_bytes
    path, start, stop = "", 0, 0
    for file, first, last in spans:
        if file == path and start <= first <= stop + gap_bytes:
            stop = max(stop, last)
        else:
            if stop > start:
                yield path, start, stop
            path, start, stop = file, first, last
        while stop - start >= last_bytes:
            yield path, start, start + step_bytes
            start += step_bytes
    if stop > start:
        yield path, start, stop


def holds(step: Span, path: str, at: int) -> bool:
    """Whether a span has a byte of a file."""
    return step[0] == path and step[1] <= at < step[2]


# ----------------------------------------------------------------------------------------------------
# Files whose bytes come from elsewhere when they are read.

#: Called with a path, an offset and memory for the bytes there, before a reader reads them. True: it has filled the memory. False: the
#: file has the bytes.
Arrive = Callable[[str, int, memoryview], bool]

_arrive: ContextVar[Arrive | None] = ContextVar("arrive", default=None)


@contextmanager
def arriving(arrive: Arrive) -> Iterator[None]:
    """Readers of local files that this thread makes in the block ask ``arrive`` before each read; it raises what the read then raises."""
    token = _arrive.set(arrive)
    try:
        yield
    finally:
        _arrive.reset(token)


def arrival() -> Arrive | None:
    """What a new reader must ask before each read."""
    return _arrive.get()


# ----------------------------------------------------------------------------------------------------
# Decides whether read files stay in the kernel's page cache, and releases their pages if not.
#
# Bytes read with ``preadv`` stay in the page cache until memory runs short. If a device shares memory with the host,
# they are a second copy of the model in the memory that the model needs.

#: A resolved ``io.page_cache``, without ``"auto"``.
Chosen = Literal["keep", "release"]

#: The last bytes read stay for a while: tensors end within pages, and another rank may read the same pages soon after.
WINDOW_BYTES = 64 * 1024**2
#: Bytes released at a time: each release may make the kernel look at the lists of all cores.
_STEP_BYTES = 16 * 1024**2
#: Ranges this near to each other count as one: the kernel reads ahead the bytes between them.
_GAP_BYTES = 128 * 1024
#: The kernel keeps pages in groups, and releases only groups that lie wholly in a range. So each range begins before
#: the group in which the last range ended.
_GROUP_BYTES = 4 * 1024**2


def page_cache_for(io: IOOptions, devices: Iterable[torch.device]) -> Chosen:
    """Resolve ``io.page_cache`` for tensors on these devices: ``"auto"`` releases if one shares the host's memory."""
    if io.page_cache != "auto":
        return io.page_cache
    return "release" if any(shares_memory(device) for device in set(devices)) else "keep"


def shares_memory(device: torch.device) -> bool:
    """Whether a device other than the CPU uses the host's memory: MPS, and GPUs that report to be integrated."""
    if device.type in ("cpu", "meta"):
        return False
    if device.type == "mps":
        return True
    try:
        properties = torch.get_device_module(device).get_device_properties(device)
    except (RuntimeError, AssertionError, AttributeError):  # no driver, or a backend that does not report it
        return False
    # CUDA and ROCm say it by the first name, XPU by the second.
    return any(getattr(properties, name, False) for name in ("is_integrated", "is_integrated_gpu"))


class Pages:
    """Releases the pages that one reader has read. Rank-local; not thread-safe.

    At most about 80 MiB of read pages stay cached, and none of a file after the last process that reads it has called
    :meth:`close`. Pages that another process has mapped stay (the kernel's rule). Linux (``posix_fadvise``); on macOS
    the file is read past the cache (``F_NOCACHE``).
    """

    def __init__(self) -> None:
        self._read: deque[list[int]] = deque()  # [fd, start, stop], oldest first
        self._nbytes = 0

    def open(self, fd: int) -> None:
        """Call before a file is read."""
        if not hasattr(os, "posix_fadvise") and hasattr(fcntl, "F_NOCACHE"):
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)

    def read(self, fd: int, start: int, stop: int) -> None:
        """Note that bytes ``start`` to ``stop`` of a file were read and are not needed again."""
        last = self._read[-1] if self._read else None
        if last is not None and last[0] == fd and last[1] <= start <= last[2] + _GAP_BYTES:
            self._nbytes += max(0, stop - last[2])
            last[2] = max(last[2], stop)
        else:
            self._read.append([fd, start, stop])
            self._nbytes += stop - start
        if self._nbytes >= WINDOW_BYTES + _STEP_BYTES:
            self._give_back(self._nbytes - WINDOW_BYTES)

    def close(self, fd: int) -> None:
        """Call before a file is closed: releases the rest of it, with its header and the pages read ahead."""
        for run in [run for run in self._read if run[0] == fd]:
            self._read.remove(run)
            self._nbytes -= run[2] - run[1]
        _advise(fd, 0, 0)

    def _give_back(self, nbytes: int) -> None:
        while nbytes > 0:
            fd, start, stop = run = self._read[0]
            count = min(nbytes, stop - start)
            first = max(0, start // mmap.PAGESIZE * mmap.PAGESIZE - _GROUP_BYTES)
            _advise(fd, first, start + count - first)
            if count == stop - start:
                self._read.popleft()
            else:
                run[1] += count
            self._nbytes -= count
            nbytes -= count


def _advise(fd: int, start: int, length: int) -> None:
    """Release pages. ``length`` 0: to the end of the file."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)


# ----------------------------------------------------------------------------------------------------
# Threads that share a large read. One thread keeps one core busy when it copies from the page cache; hosts have more cores.

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


# ----------------------------------------------------------------------------------------------------
# Positioned reads from local files straight into memory.

# Linux returns at most 0x7ffff000 bytes per call; smaller pieces show progress.
_PIECE_BYTES = 64 * 1024**2
# Between two pieces the next ranges are asked for.
_PIECE_FROM_STORAGE_BYTES = 4 * 1024**2
# A step of a large run has thousands of files; a process may often open only 1,024.
_MOST_OPEN = 64
# Linux: advice, and reads that fail instead of waiting for storage.
_CAN_ASK = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")


class FileReader:
    """Reads byte ranges into given memory, and keeps recently opened files open. Not thread-safe; rank-local.

    ``bytes_read`` counts requested bytes. Calls ``on_progress(n)`` after each piece. With ``page_cache="release"`` it
    gives the kernel's pages back after reading. ``reads`` is as :attr:`IOOptions.reads`, for the ranges in a block of
    :meth:`expecting`; others are plain reads. ``threads`` share each large read; None: as :func:`threads_of_this_rank`.
    """

    def __init__(
        self,
        on_progress: Callable[[int], None] | None = None,
        *,
        page_cache: Chosen = "keep",
        reads: Reads = "plain",
        threads: int | None = 1,
    ) -> None:
        self.bytes_read = 0
        self.page_cache = page_cache
        self._reads = reads if _CAN_ASK else "plain"
        self._reason = "asked for" if _CAN_ASK or reads == "plain" else "this system can't be asked"
        self._from_storage = self._reads == "ahead"
        self._ahead: LookAhead | None = None
        self._quicker = Quicker()
        self._pages = Pages() if page_cache == "release" else None
        self._asked_threads = threads
        self._threads = Threads(threads_of_this_rank() if threads is None else threads)
        self._opening = threading.Lock()
        self._fds: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._on_progress = on_progress
        self._arrive = arrival()
        self._arrived_bytes = 0

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file, and end the threads."""
        self._threads.close()
        for opened in (self._fds, self._held):
            while opened:
                self._close(opened.popitem()[1])

    def hold(self, paths: Iterable[str]) -> None:
        """Open these files now and keep them open: they stay readable after deletion.

        Opens at most half as many as the process may have open; the rest are opened when they are read. Raises as
        :meth:`read_into` does.
        """
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        for path in paths:
            if len(self._held) < most and path not in self._held:
                self._held[path] = self._open_new(path)

    @contextmanager
    def expecting(self, spans: Iterable[Span]) -> Iterator[None]:
        """The reads in this block are of these spans, in this order. May be nested.

        From the first byte on that is not in the page cache, the kernel is asked for the next spans while one is read.
        ``spans`` is not looked at before that.
        """
        before = self._ahead
        self._ahead = None if self._reads == "plain" else LookAhead(spans, self._ask)
        try:
            yield
        finally:
            self._ahead = before

    def elements(self, transfer: Transfer) -> None:
        """None: they are read."""

    def describe_reads(self) -> str:
        """How this reader reads, why, and by how many threads if several shared a read."""
        threads = f"; using {self._threads.count} threads" if self._threads.shared_bytes else ""
        arrived = f"; {self._arrived_bytes} bytes from other hosts" if self._arrived_bytes else ""
        return self._way() + threads + arrived

    def _way(self) -> str:
        if self._reads == "plain":
            return f"plain: {self._reason}"
        if self._reads == "ahead":
            return "ahead: asked for"
        if not self._from_storage:
            has_read = self.bytes_read > self._arrived_bytes
            return "plain: all bytes were in the page cache" if has_read else "plain: nothing was read"
        return f"{self._quicker.kind}: {self._reason}{self._quicker.describe()}"

    def descriptor(self, path: str) -> int:
        """Another descriptor of the file that this reader has open at ``path``, also where a new file has taken the name since.

        The caller closes it. Several threads may call it. Raises as :meth:`read_into` does.
        """
        with self._opening:
            return os.dup(self._fd(path))

    def lanes(self, *, onto_device: bool = False) -> int:
        """How many lanes may read cached bytes; 0 unless this reader may choose how to read, and keeps pages."""
        if self._reads != "auto" or self._from_storage or self._pages is not None or self._arrive is not None:
            return 0
        if onto_device and self._asked_threads is None:
            return threads_of_this_rank(MOST_ONTO_DEVICE)
        return self._threads.count

    def was_in_cache(self, nbytes: int, *, lanes: int) -> None:
        """Count bytes that so many lanes have read."""
        self._threads.shared_bytes += nbytes if lanes > 1 else 0
        self._count(nbytes)

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes at ``offset_bytes``. Raises :class:`SourceError`, or :class:`IntegrityError` if
        the file is too short."""
        done, length = 0, view.nbytes
        if self._arrive is not None and self._arrive(path, offset_bytes, view):
            self._arrived_bytes += length
            self._count(length)
            return
        while done < length:
            at = offset_bytes + done
            try:
                fd, count = self._read(path, at, view[done : done + _PIECE_BYTES])
            except OSError as error:
                raise SourceError(
                    f"reading {length} bytes at {offset_bytes} failed: {error.strerror}", path=path
                ) from error
            if count == 0:
                raise IntegrityError(
                    f"ends at byte {offset_bytes + done}, but {length} bytes were expected at {offset_bytes}: truncated",
                    path=path,
                )
            if self._pages is not None:
                self._pages.read(fd, at, at + count)
            done += count
            self._count(count)

    def _count(self, nbytes: int) -> None:
        self.bytes_read += nbytes
        if self._on_progress is not None:
            self._on_progress(nbytes)

    def _read(self, path: str, at: int, piece: memoryview) -> tuple[int, int]:
        """Read a piece or its beginning. Returns the file that it was read from, and the number of bytes."""
        preadv = self._threads.preadv
        if self._ahead is None:
            fd = self._fd(path)
            return fd, patiently(preadv, fd, piece, at)
        if not self._from_storage:
            fd = self._fd(path)
            try:
                count = patiently(preadv, fd, piece, at, os.RWF_NOWAIT)
            except BlockingIOError:
                self._reason = (
                    f"some bytes weren't in the page cache, starting at byte {self.bytes_read} of the load"
                )
            except OSError:  # not supported here, or a failure that comes again below
                self._reason = "the file system does not say what is in the page cache"
            else:
                if count:
                    return fd, count
                return fd, patiently(preadv, fd, piece, at)
            self._from_storage = True
        started = time.perf_counter()
        if self._reads == "ahead" or self._quicker.kind == "ahead":
            self._ahead.reading(path, at)
        fd = self._fd(path)  # not before: asking opens files, and so may close this one
        count = patiently(preadv, fd, piece[:_PIECE_FROM_STORAGE_BYTES], at)
        if self._reads == "auto":
            self._quicker.took(count, time.perf_counter() - started)
        return fd, count

    def _ask(self, path: str, start: int, stop: int) -> None:
        with suppress(OSError, IntegrityError, SourceError):  # the read says what is wrong
            patiently(os.posix_fadvise, self._fd(path), start, stop - start, os.POSIX_FADV_WILLNEED)

    def _fd(self, path: str) -> int:
        fd = self._held.get(path, self._fds.get(path))
        return self._open(path) if fd is None else fd

    def _open(self, path: str) -> int:
        fd = self._open_new(path)
        while len(self._fds) >= _MOST_OPEN:  # the oldest is the least likely to be read again
            self._close(self._fds.pop(next(iter(self._fds))))
        self._fds[path] = fd
        return fd

    def _open_new(self, path: str) -> int:
        fd = _open(path)
        if self._pages is not None:
            self._pages.open(fd)
        return fd

    def _close(self, fd: int) -> None:
        if self._pages is not None:
            self._pages.close(fd)
        patiently(os.close, fd)


def _open(path: str) -> int:
    try:
        return patiently(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise IntegrityError("lost: no such file", path=path) from error
    except OSError as error:
        raise SourceError(f"can't be opened: {error.strerror}", path=path) from error


# ----------------------------------------------------------------------------------------------------
# Copies from files to accelerators through a ring of pinned memory: the host reads into some slots while a device copies from others.
#
# Everything goes through ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``: CUDA, ROCm, XPU and other backends.

#: Threads that read fill one each, while the device copies from others.
SLOTS = 8

#: Fills a slot's bytes, and returns them as the elements to copy: a view of the slot.
Fill = Callable[[torch.Tensor], torch.Tensor]


class DeviceRings:
    """A ring for each device that a load fills. Rank-local; several threads may fill slots at a time.

    Bytes go to the device as they are stored; casts and scattered writes run there. The host waits for the copy from a
    slot before it reads into that slot again, and once for each device at the end. Then the current stream waits for
    the copies. Memory: ``limit_bytes`` pinned on the host for each device; on the device, where bytes are cast, scattered or
    compared, a slot for each thread that does so at the moment, to compare a few.
    """

    def __init__(self, limit_bytes: int) -> None:
        """``limit_bytes``: of pinned memory. Slots are powers of two, because torch's host allocator makes them so."""
        self.slot_bytes = 1 << (limit_bytes // SLOTS).bit_length() - 1
        self.pinned_bytes = 0
        """Pinned memory that was allocated; the system has it back at the end."""
        self._rings: dict[torch.device, _Ring] = {}

    def __enter__(self) -> DeviceRings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pinned_bytes = sum(ring.nbytes for ring in self._rings.values())
        while self._rings:
            self._rings.popitem()[1].finish(wait=error is None)
        if self.pinned_bytes:
            empty_host_cache()

    @property
    def are_used(self) -> bool:
        """Whether a device has a ring."""
        return bool(self._rings)

    def prepare(self, device: torch.device) -> None:
        """Make a device's ring: copies come after what this thread's current stream has been given. Before other threads fill slots of it."""
        if device not in self._rings:
            self._rings[device] = _Ring(device, self.slot_bytes)

    def put(self, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        """Copy what ``fill`` reads, ``nbytes`` bytes at most :attr:`slot_bytes`, into ``target`` on its device."""
        self.prepare(target.device)
        self._rings[target.device].put(target, nbytes, fill)

    def compare(self, transfer: Transfer, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        """Compare what ``fill`` reads with ``target`` on its device, bit by bit, in the dtype of ``target``.

        ``transfer``: to be named by :meth:`differing`.
        """
        self.prepare(target.device)
        self._rings[target.device].compare(transfer, target, nbytes, fill)

    def differing(self) -> list[Transfer]:
        """The transfers that were compared and differ. The host waits once for each device."""
        return [transfer for ring in self._rings.values() for transfer in ring.differing()]


class _Slot:
    """Pinned memory, and what its next use waits for."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.event: torch.Event | None = None


class _Ring:
    def __init__(self, device: torch.device, slot_bytes: int) -> None:
        self._device, self._slot_bytes = device, slot_bytes
        self._free: SimpleQueue[_Slot] = SimpleQueue()  # the one that was used longest ago comes first
        self._slots = 0
        self._lock = threading.Lock()  # around the making of slots
        self._compared: list[Transfer] = []
        self._differ: list[torch.Tensor] = []
        self._side = torch.Stream(device)
        self._threads = threading.local()
        # What allocated the targets, and what the program enqueued on them, comes first.
        self._side.wait_stream(torch.accelerator.current_stream(device))

    @property
    def nbytes(self) -> int:
        return self._slots * self._slot_bytes

    def put(self, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        with self._filled(nbytes, fill) as (raw, staged):
            if staged.dtype == target.dtype and staged.is_contiguous() and target.is_contiguous():
                target.copy_(staged, non_blocking=True)
            else:
                target.copy_(self._on_device(raw, staged))

    def compare(self, transfer: Transfer, target: torch.Tensor, nbytes: int, fill: Fill) -> None:
        with self._filled(nbytes, fill) as (raw, staged):
            there = self._on_device(raw, staged).to(target.dtype)
            # As bits NaN equals NaN, and -0 differs from 0.
            self._differ.append((flat_bytes(there) != flat_bytes(target)).any())
        self._compared.append(transfer)

    def differing(self) -> list[Transfer]:
        if not self._differ:
            return []
        with self._entered():
            differ = torch.stack(self._differ).tolist()
        return [transfer for transfer, is_so in zip(self._compared, differ, strict=True) if is_so]

    def _on_device(self, slot: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
        """``staged``, a view of the slot, as a view of a copy of the slot's bytes."""
        raw = torch.empty(slot.numel(), dtype=torch.uint8, device=self._device)
        raw.copy_(slot, non_blocking=True)
        return torch.as_strided(raw.view(staged.dtype), staged.size(), staged.stride())

    @contextmanager
    def _filled(self, nbytes: int, fill: Fill) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A slot's first bytes, and the elements that ``fill`` made of them. The block enqueues what uses them, on the ring's stream."""
        slot = self._free_slot()
        try:
            raw = slot.memory[:nbytes]
            staged = fill(raw)
            with self._entered() as stream:
                yield raw, staged
                slot.event = stream.record_event(slot.event)
        finally:
            self._free.put(slot)

    def _entered(self) -> torch.Stream:
        """The ring's stream, to be entered by this thread: an object of its own, since it keeps what was current before."""
        if (stream := getattr(self._threads, "stream", None)) is None:
            side = self._side
            stream = self._threads.stream = torch.Stream(
                stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type
            )
        return stream

    def _free_slot(self) -> _Slot:
        with self._lock:
            if self._slots < SLOTS:
                with self._entered():  # a thread begins on the first device, and would open a context there
                    slot = _Slot(torch.empty(self._slot_bytes, dtype=torch.uint8, pin_memory=True))
                self._slots += 1
                return slot
        slot = self._free.get()
        if (event := slot.event) is not None:
            event.synchronize()
        return slot

    def finish(self, *, wait: bool) -> None:
        """Order the current stream after the copies. ``wait``: until they are done, so that a failed one is raised here."""
        torch.accelerator.current_stream(self._device).wait_stream(self._side)
        if wait and not self._side.query():
            self._side.synchronize()
