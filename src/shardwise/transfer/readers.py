"""The reader of a source's files: local ones, objects of a store, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import tee
from types import TracebackType

from ..catalog.records import StoredFile
from ..planning.buckets import Span
from ..planning.records import IOOptions, Transfer
from ..storage import is_url
from .files import FileReader
from .objects import ObjectReader
from .page_cache import Chosen

__all__ = ["SourceReader"]


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
