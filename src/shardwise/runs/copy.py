"""``copy``: a checkpoint or a model's directory to another place, local or in a store, proved to be the same there.

Files come first, the one that says what belongs together (``manifest.json``, an index, a config) last: a copy that was stopped is
none. It goes on where it stopped, because a file that is there already is compared, not sent again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from ..catalog.records import StoredFile
from ..checkpoint.verify import Progress
from ..errors import CheckpointError, IntegrityError, SourceError
from ..format.manifest import BLOCK_BYTES, MANIFEST_NAME, FileEntry, Manifest, read_manifest
from ..limits import inside
from ..storage import (
    absolute,
    exists,
    files_below,
    is_directory,
    is_file,
    is_url,
    place_of,
    stat_of,
    store_of,
)
from ..store.write import FileWriter, fsync_directory, make_directories
from ..transfer import SourceReader

__all__ = ["CopyReport", "copy"]

#: A piece of a file that is read and written at a time.
_PIECE_BYTES = 8 * 1024**2
#: Files at a time. Each holds a few pieces.
_AT_ONCE = 4
#: Written last, in this order: a reader that finds one of them finds all that it names.
_LAST = ("config.json", "model.safetensors.index.json", MANIFEST_NAME)
_UNFINISHED = ".copying"


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did."""

    path: str
    source: str
    files: int
    nbytes: int
    """Of all files."""
    files_sent: int
    """Those that were not there already."""
    bytes_sent: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def copy(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, on_progress: Progress | None = None
) -> CopyReport:
    """Copy a checkpoint, or a directory of a model, to ``out``; either may be a URL.

    Of a checkpoint, exactly the files of its manifest are copied, and each is compared with the manifest's checksums while it is
    read. Every file is read back from ``out`` and compared. A local ``out``, which must not exist, appears whole, by a rename; in a
    store the manifest (else the index and the config) is written last. A copy that was stopped goes on: what is there already is
    compared, and only sent if it differs. Two copies to one place at a time are an error of the caller, which the comparison finds
    if they differ.

    ``on_progress(done, total)`` counts bytes, each once when it is sent and once when it is compared. Call it in one process.
    Memory: 48 MiB for each of 4 files that are read from a store at a time, else 8 MiB; and as much for writing to a store.

    Raises :class:`SourceError` for a source that can't be read, :class:`IntegrityError` if it is damaged,
    :class:`CheckpointError` if ``out`` exists, can't be written, or differs from the source in the end.
    """
    started = time.perf_counter()
    origin, final = absolute(source), absolute(out)
    manifest = read_manifest(origin) if is_file(os.path.join(origin, MANIFEST_NAME)) else None
    sizes = _files_of(origin, manifest)
    place = final if is_url(final) else final + _UNFINISHED
    if not is_url(final) and os.path.lexists(final):
        raise CheckpointError(f"{final}: exists already; give a path that does not")
    work = _Copy(origin, place, sizes, manifest, on_progress)
    last = [name for name in _LAST if name in sizes]
    with ThreadPoolExecutor(_AT_ONCE, "shardwise-copy") as pool:
        try:
            list(pool.map(work.one, [name for name in sizes if name not in last]))
        except BaseException:
            work.stop()
            raise
    for name in last:
        work.one(name)
    if not is_url(final):
        _appear(place, final, set(sizes))
    return CopyReport(
        final,
        origin,
        len(sizes),
        sum(sizes.values()),
        work.files_sent,
        work.bytes_sent,
        time.perf_counter() - started,
    )


def _files_of(origin: str, manifest: Manifest | None) -> dict[str, int]:
    """Sizes of what is copied, by relative name. Raises :class:`SourceError`."""
    if manifest is not None:
        stat = stat_of(os.path.join(origin, MANIFEST_NAME))
        assert stat is not None
        return {**{n: entry.nbytes for n, entry in manifest.files.items()}, MANIFEST_NAME: stat.nbytes}
    if not is_directory(origin):
        what = "is a file; give its directory" if exists(origin) else "no such directory"
        raise SourceError(what, path=origin)
    found = {}
    for name, seen in files_below(origin).items():
        stat = seen or stat_of(inside(origin, name))
        if stat is None:
            raise SourceError("was deleted, or is a link to nothing", path=inside(origin, name))
        found[name] = stat.nbytes
    if not found:
        raise SourceError("holds no file", path=origin)
    return found


class _Copy:
    """One copy: files, one by one, in several threads."""

    def __init__(
        self,
        origin: str,
        place: str,
        sizes: Mapping[str, int],
        manifest: Manifest | None,
        on_progress: Progress | None,
    ) -> None:
        self.files_sent = self.bytes_sent = 0
        self._origin, self._place, self._sizes = origin, place, sizes
        self._entries = {} if manifest is None else manifest.files
        self._there = files_below(place) if is_directory(place) else {}
        self._lock = threading.Lock()
        self._stopped = False
        self._done, self._total = 0, 2 * sum(sizes.values())
        self._on_progress = on_progress

    def stop(self) -> None:
        """Let no thread begin another piece."""
        self._stopped = True

    def one(self, name: str) -> None:
        """Copy a file, unless it is there; then compare both."""
        nbytes = self._sizes[name]
        source, target = inside(self._origin, name), inside(self._place, name)
        if self._nbytes_there(name) == nbytes:
            expected = self._digest(source, nbytes, self._entries.get(name))
            if self._digest(target, nbytes) == expected:
                return
            self._count(-2 * nbytes)
        expected = self._send(source, target, nbytes, self._entries.get(name))
        with self._lock:
            self.files_sent += 1
            self.bytes_sent += nbytes
        if self._digest(target, nbytes) != expected:
            raise CheckpointError(
                f"{target}: was written, and then read back with other content; does another program write there?"
            )

    def _nbytes_there(self, name: str) -> int | None:
        if name not in self._there:
            return None
        stat = self._there[name] or stat_of(inside(self._place, name))
        return None if stat is None else stat.nbytes

    def _send(self, source: str, target: str, nbytes: int, entry: FileEntry | None) -> str:
        """Write a file at the target; returns the digest of what was read."""
        digest = xxhash.xxh3_128()
        pieces = self._pieces(source, nbytes, entry, digest)
        if is_url(target):
            where = place_of(target)
            store_of(where.root).write(where.key, pieces, nbytes)
            return digest.hexdigest()
        try:
            make_directories(os.path.dirname(target))
            with suppress(FileNotFoundError):
                os.unlink(target)
        except OSError as error:
            raise CheckpointError(f"{target}: can't be written: {error.strerror}") from error
        with FileWriter(target) as file:
            for piece in pieces:
                file.write(piece)
        return digest.hexdigest()

    def _digest(self, path: str, nbytes: int, entry: FileEntry | None = None) -> str:
        digest = xxhash.xxh3_128()
        for _ in self._pieces(path, nbytes, entry, digest):
            pass
        return digest.hexdigest()

    def _pieces(
        self, path: str, nbytes: int, entry: FileEntry | None, digest: xxhash.xxh3_128
    ) -> Iterator[memoryview]:
        """A file's bytes, which ``digest`` takes and which are compared with the manifest's ``entry``.

        Each piece has memory of its own: a store may still send it while the next one is read.
        """
        check = None if entry is None else _Checksums(entry, path)
        with SourceReader(files=[StoredFile(path, nbytes)]) as reader, reader.expecting([(path, 0, nbytes)]):
            for start in range(0, nbytes, _PIECE_BYTES):
                if self._stopped:
                    raise CheckpointError("the copy was stopped by the error of another file")
                piece = memoryview(bytearray(min(_PIECE_BYTES, nbytes - start)))
                reader.read_into(path, start, piece)
                digest.update(piece)
                if check is not None:
                    check.take(piece)
                yield piece
                self._count(piece.nbytes)
        if check is not None:
            check.end()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._on_progress is not None:
                self._on_progress(max(0, min(self._done, self._total)), self._total)


class _Checksums:
    """Compares a file's bytes, as they come, with those of its entry in a manifest."""

    def __init__(self, entry: FileEntry, path: str) -> None:
        self._path = path
        ends = [entry.header_bytes]
        while ends[-1] < entry.nbytes:
            ends.append(min(ends[-1] + BLOCK_BYTES, entry.nbytes))
        self._blocks = iter(zip(ends, (entry.header_xxh3, *entry.blocks), strict=False))
        self._at = 0
        self._hash = xxhash.xxh3_64()
        self._end, self._expected = next(self._blocks)

    def take(self, piece: memoryview) -> None:
        """The next bytes. Raises :class:`IntegrityError`."""
        while piece.nbytes:
            some = piece[: self._end - self._at]
            self._hash.update(some)
            self._at += some.nbytes
            piece = piece[some.nbytes :]
            if self._at == self._end and piece.nbytes:
                self._compare()
                self._end, self._expected = next(self._blocks, (self._at + piece.nbytes, ""))

    def end(self) -> None:
        """All bytes came."""
        self._compare()

    def _compare(self) -> None:
        if self._hash.hexdigest() != self._expected:
            raise IntegrityError(
                f"differs from its checksum in the manifest before byte {self._end}: damaged, and not copied",
                path=self._path,
            )
        self._hash.reset()


def _appear(place: str, final: str, names: set[str]) -> None:
    """Give a whole local copy its name. Raises :class:`CheckpointError`."""
    for name in files_below(place):
        if name not in names:  # of an earlier copy of something else
            os.unlink(inside(place, name))
    folders = sorted({os.path.dirname(name) for name in names} | {""}, key=len, reverse=True)
    for folder in folders:
        fsync_directory(os.path.join(place, folder) if folder else place)
    try:
        os.rename(place, final)
    except OSError as error:
        raise CheckpointError(f"{final}: can't be given its name: {error.strerror}") from error
    fsync_directory(os.path.dirname(final))
