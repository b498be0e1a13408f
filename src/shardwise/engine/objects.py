"""Reads a source's files, local ones or objects in a store: several requests at a time, in the order in which a load needs the bytes."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import tee
from threading import Event, Lock
from types import TracebackType

from ..catalog.records import StoredFile
from ..errors import SourceError
from ..planning.plan import IOOptions, Transfer
from ..planning.proof import Span
from ..storage.records import Moved, counted_here, is_url
from ..storage.stores import fetch
from .files import Chosen, FileReader, holds, steps

# ----------------------------------------------------------------------------------------------------
# Reads from object stores: several requests at a time, in the order in which a load needs the bytes.
#
# A store takes milliseconds before it sends the first byte of a reply: a reader that makes one request after the other mostly waits.
# A load announces its next ranges (:meth:`ObjectReader.expecting`); threads fetch them, in parts, into memory of a fixed size, and the
# load copies them from there.

#: Bytes of one request. Stores serve one stream at about 100 MB/s.
PART_BYTES = 8 * 1024**2
#: Requests at a time. Another one is made if it and those under way hold at most so many bytes, with ``PART_BYTES`` for each new one.
REQUESTS, IN_FLIGHT_BYTES = 16, 48 * 1024**2
#: A request also fetches a gap of at most so many bytes between two ranges: a second request would cost as much.
GAP_BYTES = 64 * 1024
#: The last request of a run of bytes asks for fewer than this, and so takes what would be a short request of its own. Thus the
#: requests of a run are at most its bytes / ``PART_BYTES``, or one; a gap's worth is left, because a run of two parts may lack some
#: bytes of them.
LAST_BYTES = 2 * PART_BYTES - GAP_BYTES
#: A smaller part gets memory of its own, a larger one a buffer that is used again.
_SMALL_BYTES = 256 * 1024
_LOOK_S = 0.2


def requests_for(spans: Iterable[Span]) -> Iterator[Span]:
    """What a reader of these spans asks stores for, one request each, in this order. Spans of local files are left out."""
    return steps((span for span in spans if is_url(span[0])), PART_BYTES, GAP_BYTES, LAST_BYTES)


@dataclass(slots=True)
class _Part:
    span: Span
    buffer: memoryview
    coming: Future[None]


class ObjectReader:
    """Reads byte ranges of objects into given memory, as :class:`.FileReader` those of files. Not thread-safe; rank-local.

    ``files``: the objects, with the versions that are read; another one raises :class:`.Moved`. Of an object that is not among
    them, the version that is read first. ``bytes_read`` counts the bytes
    that were asked for, ``requests`` the requests. Memory: ``IN_FLIGHT_BYTES`` and ``PART_BYTES``.
    """

    def __init__(self, files: Iterable[StoredFile], on_progress: Callable[[int], None] | None = None) -> None:
        self.bytes_read = 0
        self.requests = 0
        self._versions: dict[str, str | None] = {file.path: file.version for file in files}
        self._on_progress = on_progress
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: Iterator[Span] = iter(())
        self._parts: deque[_Part] = deque()
        self._nbytes = 0
        self._free: list[memoryview] = []
        self._stopped = Event()
        self._lock = Lock()

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads, when the requests that are under way have ended."""
        self._stopped.set()
        self._forget_all()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._free.clear()

    @contextmanager
    def expecting(self, spans: Iterable[Span]) -> Iterator[None]:
        """The reads in this block are of these spans, in this order. May be nested."""
        before, parts = self._waiting, self._parts
        self._waiting, self._parts = requests_for(spans), deque()
        try:
            yield
        finally:
            self._forget_all()
            self._waiting, self._parts = before, parts

    def describe_reads(self) -> str:
        """How this reader reads, and how many requests it made."""
        return f"{self.requests} requests of up to {2 * PART_BYTES >> 20} MiB, at most {REQUESTS} at a time"

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes at ``offset_bytes``. Raises :class:`SourceError`; :class:`IntegrityError` if the
        object is too short, gone, or another one."""
        done = 0
        while done < view.nbytes:
            at = offset_bytes + done
            part = self._part_with(path, at)
            if part is None:
                stop = min(at + PART_BYTES, offset_bytes + view.nbytes)
                self.requests += 1
                self.bytes_read += stop - at
                direct = self._submit((path, at, stop), view[done : done + stop - at])
                self._wait(direct)
            else:
                self._wait(part.coming)
                _, start, end = part.span
                stop = min(end, offset_bytes + view.nbytes)
                view[done : done + stop - at] = part.buffer[at - start : stop - start]
                if stop == end:
                    self._forget(self._parts.popleft())
            if self._on_progress is not None:
                self._on_progress(stop - at)
            done += stop - at

    def _part_with(self, path: str, at: int) -> _Part | None:
        """The part that holds a byte, as the first of those that are fetched; None if it was not announced."""
        self._fetch_more()
        for k, part in enumerate(self._parts):
            if holds(part.span, path, at):
                for _ in range(k):
                    self._forget(self._parts.popleft())
                self._fetch_more()
                return part
        return None

    def _fetch_more(self) -> None:
        """Ask for announced parts, as many as may be under way."""
        while len(self._parts) < REQUESTS and (
            not self._parts or self._nbytes + PART_BYTES <= IN_FLIGHT_BYTES
        ):
            span = next(self._waiting, None)
            if span is None:
                return
            nbytes = span[2] - span[1]
            self.requests += 1
            self.bytes_read += nbytes
            buffer = self._buffer(nbytes)
            self._nbytes += buffer.nbytes
            self._parts.append(_Part(span, buffer, self._submit(span, buffer[:nbytes])))

    def _submit(self, span: Span, view: memoryview) -> Future[None]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(REQUESTS, "shardwise-objects")
        return self._pool.submit(counted_here(self._fetch), span, view)

    def _fetch(self, span: Span, view: memoryview) -> None:
        path, start, _ = span
        if not self._stopped.is_set():
            found = fetch(path, start, view, version=self._versions.get(path), on_progress=self._go_on)
            if found is not None and found.version is not None:
                self._one_version(path, found.version)

    def _go_on(self, nbytes: int) -> None:
        """Called while bytes come: ends requests that are of no use any more."""
        if self._stopped.is_set():
            raise SourceError("the reader was closed")

    def _one_version(self, path: str, version: str) -> None:
        """Several requests may be the first of an object: all must have been answered with one version."""
        with self._lock:
            known = self._versions.get(path)
            self._versions[path] = known or version
        if known is not None and known != version:
            raise Moved("was replaced while it was read: parts of two objects came; read it again", path=path)

    def _wait(self, coming: Future[None]) -> None:
        """Wait for a request. A store that sends nothing is no progress: its own timeouts end the request."""
        while True:
            try:
                return coming.result(_LOOK_S)
            except NotYet:
                if coming.done():
                    return coming.result()
                if self._on_progress is not None:
                    self._on_progress(0)

    def _buffer(self, nbytes: int) -> memoryview:
        if nbytes < _SMALL_BYTES:
            return memoryview(bytearray(nbytes))
        for k, buffer in enumerate(self._free):
            if buffer.nbytes >= nbytes:
                return self._free.pop(k)
        self._free.clear()
        return memoryview(mmap.mmap(-1, max(PART_BYTES, nbytes)))

    def _forget(self, part: _Part) -> None:
        """Use a part's memory again, once nothing writes there."""
        self._nbytes -= part.buffer.nbytes
        if part.buffer.nbytes >= PART_BYTES and (part.coming.done() or part.coming.cancel()):
            self._free.append(part.buffer)

    def _forget_all(self) -> None:
        while self._parts:
            self._forget(self._parts.popleft())


# ----------------------------------------------------------------------------------------------------
# The reader of a source's files: local ones, objects of a store, or both.


class SourceReader:
    """Reads byte ranges, each by the reader for its kind: :class:`.FileReader` or :class:`.ObjectReader`.

    ``files``: what will be read; objects are read in the versions that they had then, and ahead. ``io``: of local files ``reads`` and
    ``read_threads``, as ``page_cache``; None: plain reads in one thread. Not thread-safe; rank-local.
    """

    def __init__(
        self,
        on_progress: Callable[[int], None] | None = None,
        *,
        files: Iterable[StoredFile] = (),
        io: IOOptions | None = None,
        page_cache: Chosen = "keep",
    ) -> None:
        self._on_progress = on_progress
        self._known = tuple(files)
        self._local = {file.path for file in self._known if not is_url(file.path)}
        self._has_objects = any(is_url(file.path) for file in self._known)
        reads, threads = ("plain", 1) if io is None else (io.reads, io.read_threads)
        self._files = FileReader(on_progress, page_cache=page_cache, reads=reads, threads=threads)
        self._objects: ObjectReader | None = None

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file, and end the threads."""
        self._files.close()
        if self._objects is not None:
            self._objects.close()

    def hold(self, paths: Iterable[str]) -> None:
        """As :meth:`.FileReader.hold`. An object that is replaced or deleted meanwhile is an error of the read."""
        self._files.hold(path for path in paths if not is_url(path))

    @property
    def bytes_read(self) -> int:
        """Bytes that were asked for."""
        return self._files.bytes_read + (0 if self._objects is None else self._objects.bytes_read)

    def has_file(self, path: str) -> bool:
        """Whether a path names one of the local files."""
        return path in self._local

    def descriptor(self, path: str) -> int:
        """As :meth:`.FileReader.descriptor`."""
        return self._files.descriptor(path)

    def lanes(self, *, onto_device: bool = False) -> int:
        """In how many lanes cached bytes may be read; 0 where the order of the reads counts."""
        return self._files.lanes(onto_device=onto_device)

    def was_in_cache(self, nbytes: int, *, lanes: int) -> None:
        """Count bytes that so many lanes have read beside this reader."""
        self._files.was_in_cache(nbytes, lanes=lanes)

    @property
    def requests(self) -> int:
        """Requests to stores."""
        return 0 if self._objects is None else self._objects.requests

    @contextmanager
    def expecting(self, spans: Iterable[Span]) -> Iterator[None]:
        """The reads in this block are of these spans, in this order. May be nested."""
        if not self._has_objects:
            with self._files.expecting(spans):
                yield
            return
        local, remote = tee(spans)
        with ExitStack() as stack:
            stack.enter_context(self._stores().expecting(remote))
            stack.enter_context(self._files.expecting(s for s in local if not is_url(s[0])))
            yield

    def read_into(self, path: str, offset_bytes: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes at ``offset_bytes``. Raises :class:`SourceError`, or :class:`IntegrityError` if the
        file is too short or another one."""
        reader = self._stores() if is_url(path) else self._files
        reader.read_into(path, offset_bytes, view)

    def elements(self, transfer: Transfer) -> None:
        """None: they are read."""

    def describe_reads(self) -> str:
        """How this reader reads, and why."""
        if self._objects is None:
            return self._files.describe_reads()
        found = self._objects.describe_reads()
        return f"{found}; files {self._files.describe_reads()}" if self._files.bytes_read else found

    def _stores(self) -> ObjectReader:
        if self._objects is None:
            self._objects = ObjectReader(self._known, self._on_progress)
        return self._objects
