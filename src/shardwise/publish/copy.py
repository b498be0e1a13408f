"""``copy``: copies a checkpoint or a model's directory, proved to be the same there; and mirrors of a run."""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat as stat_mode
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import xxhash

from ..catalog.records import StoredFile
from ..engine.objects import SourceReader
from ..errors import CheckpointError, IntegrityError, ShardwiseError, SourceError, is_corruption
from ..format.manifest import MANIFEST_NAME, FileEntry, Unit, parse_manifest, refuse_part, units_of
from ..limits import inside, read_small, refuse_link_out
from ..objects import frozen
from ..operations.operation import Operation, announced, in_background, this_operation
from ..operations.printed import Printed
from ..ranks.ranks import patiently
from ..storage import absolute, exists, files_below, is_directory, is_file, looking_once, stat_of
from ..storage.records import Stat, is_url, join, place_of
from ..storage.stores import store_of
from .line import Line
from .lock import NOTE_NAME, has_note, mark, remove_ours, unmark
from .places import MOST_NAME_BYTES, shortened
from .write import FileWriter, discard_in_store, fsync_directory, make_directories

# ----------------------------------------------------------------------------------------------------
# ``copy``: a checkpoint or a model's directory to another place, local or in a store, proved to be the same there.
#
# Files come first, the one that says what belongs together (``manifest.json``, an index, a config) last: a copy that was stopped is
# none. It goes on where it stopped, because a file that is there already is compared, not sent again.

#: A piece of a file that is read and written at a time.
_PIECE_BYTES = 8 * 1024**2
#: Files at a time. Each holds a few pieces.
_AT_ONCE = 4
#: Written last, in this order: a reader that finds one of them finds all that it names.
LAST = ("config.json", "model.safetensors.index.json", MANIFEST_NAME)
_UNFINISHED = ".copying-"


@frozen
class CopyReport(Printed):
    """The result of a copy."""

    path: str
    source: str
    files: int
    nbytes: int
    """Total bytes of all files."""
    files_sent: int
    """Number of files that weren't at the destination yet."""
    bytes_sent: int
    seconds: float


@announced("copy", "source", "out")
def copy_checkpoint(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> CopyReport:
    """Copy a checkpoint or a model directory to ``out``, and verify the copy. Source and destination can be URLs.

    For a checkpoint, exactly the files in its manifest are copied, and each is checked against the manifest's checksums as it is read. Every
    file is then read back from ``out`` and compared. A local ``out`` must not exist; it appears complete, by a rename. In a store, the
    manifest (or the index and the config) is written last. An interrupted copy can be continued: files that are already there are
    compared, and sent again if they differ. A destination in a store that contains anything else is refused. Until it is complete, a local copy
    is in ``out.copying-<nonce>``, with a marker file that names its owner. Don't run two copies to the same destination at the same time; the
    final comparison fails if they differ. Links to files are followed.

    Call it in one process. :func:`progress` counts each byte twice: when it is sent and when it is compared. Memory: 48 MiB for each of up to
    4 files read from a store at a time, otherwise 8 MiB, and the same again for writing to a store.

    Raises :class:`SourceError` for a source that can't be read, :class:`IntegrityError` if it is damaged or changes during the copy, and
    :class:`CheckpointError` if the source is one host's part of a step, or if ``out`` exists (in a store: with other files), can't be
    written, or differs from the source at the end.
    """
    started = time.perf_counter()
    origin, final = absolute(source), absolute(out)
    if f"{final}/".startswith(f"{origin}/") or f"{origin}/".startswith(f"{final}/"):
        raise CheckpointError(f"{final}: is inside the source, or the source inside it: {origin}")
    if not is_url(final) and os.path.lexists(final):
        raise CheckpointError(f"{final}: exists already; give a path that does not")
    with looking_once(origin):
        files = _files_of(origin)
    if is_url(final):
        with suppress(SourceError):  # this process may have rights below it alone
            if is_file(final):
                raise CheckpointError(f"{final}: is a file; give the URL of a directory")
        for name in files:
            place_of(inside(final, name))  # raises for names that no store has
    work = _Copy(origin, final if is_url(final) else _begun(final), files, this_operation(final))
    last = [name for name in LAST if name in files]
    work.check_target(last)
    with ThreadPoolExecutor(_AT_ONCE, "shardwise-copy") as pool:
        list(pool.map(work.try_one, [name for name in files if name not in last]))
    if work.error is not None:
        raise work.error
    for name in last:
        work.one(name)
    if not is_url(final):
        _appear(work.place, final, set(files))
    return CopyReport(
        final,
        origin,
        len(files),
        sum(file.nbytes for file in files.values()),
        work.files_sent,
        work.bytes_sent,
        time.perf_counter() - started,
    )


@frozen
class _File:
    """A file that is copied."""

    nbytes: int
    version: str | None = None
    entry: FileEntry | None = None
    """Its checksums in a manifest."""
    content: bytes | None = None
    """Of a manifest, whose content was checked: no other one is copied."""


def _files_of(origin: str) -> dict[str, _File]:
    """The files of a source, by relative name. Raises :class:`SourceError`."""
    path = os.path.join(origin, MANIFEST_NAME)
    if is_file(path):
        content = read_small(path, "manifest")
        manifest = parse_manifest(content, path)
        refuse_part(origin, manifest)
        entries = manifest.files
        seen = files_below(origin) if is_url(origin) else {}
        found = {
            name: _File(entry.nbytes, _version(seen.get(name)), entry) for name, entry in entries.items()
        }
        return {**found, MANIFEST_NAME: _File(len(content), content=content)}
    if not is_directory(origin):
        what = "is a file; give its directory" if exists(origin) else "no such directory"
        raise SourceError(what, path=origin)
    found = {}
    try:
        below = files_below(origin)
        if not is_url(origin):
            _refuse_what_is_left_out(origin)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror}", path=str(error.filename)) from error
    for name, stat in below.items():
        if not is_url(origin):
            refuse_link_out(origin, inside(origin, name))
        found[name] = _File(_nbytes_of(inside(origin, name)) if stat is None else stat.nbytes, _version(stat))
    if not found:
        raise SourceError("contains no file", path=origin)
    return found


def _digest_of(pieces: Iterable[memoryview]) -> str:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _version(stat: Stat | None) -> str | None:
    return None if stat is None else stat.version


def _raise(error: OSError) -> None:
    raise error


def _refuse_what_is_left_out(origin: str) -> None:
    """Raises ``OSError`` for a folder that can't be read, :class:`SourceError` for a link to one."""
    for folder, folders, _ in os.walk(origin, onerror=_raise):
        for name in folders:
            if os.path.islink(path := os.path.join(folder, name)):
                raise SourceError(
                    "is a link to a directory, which is not copied; replace it by the directory", path=path
                )


def _nbytes_of(path: str) -> int:
    """Size of a regular local file. Raises :class:`SourceError`."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror}", path=path) from error
    if not stat_mode.S_ISREG(status.st_mode):
        raise SourceError("can't be copied: not a regular file", path=path)
    return status.st_size


class _Copy:
    """One copy: files, one by one, in several threads."""

    def __init__(self, origin: str, place: str, files: Mapping[str, _File], counted: Operation) -> None:
        self.files_sent = self.bytes_sent = 0
        self.place = place
        self._origin, self._files = origin, files
        self._there = files_below(place) if is_directory(place) else {}
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        """The first error of a file. Others stop because of it."""
        self._done = self._most = 0
        self._counted = counted
        counted.expect(lambda: 2 * sum(file.nbytes for file in files.values()))

    def check_target(self, last: Sequence[str]) -> None:
        """Refuse a prefix of a store that holds something else than a part of this copy. Raises :class:`CheckpointError`."""
        if not is_url(self.place):
            return
        others = [name for name in self._there if name not in self._files]
        others += [name for name in last if name in self._there and not self._is_there(name)]
        self._done = 0
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            raise CheckpointError(
                f"{self.place}: holds something else: {', '.join(sorted(others)[:3])}{more}; give another URL, or delete it"
            )

    def try_one(self, name: str) -> None:
        """Copy a file as :meth:`one` does, and keep its error."""
        try:
            self.one(name)
        except BaseException as error:
            with self._lock:
                self.error = self.error or error

    def one(self, name: str) -> None:
        """Copy a file, unless it is there; then compare both."""
        if self._is_there(name):
            return
        target, nbytes = inside(self.place, name), self._files[name].nbytes
        expected = self._send(name, target)
        with self._lock:
            self.files_sent += 1
            self.bytes_sent += nbytes
        found = self._digest(name) if self._size_there(name, anew=True) == nbytes else None
        if found != expected:
            raise CheckpointError(
                f"{target}: was written, and then read back with other content; does another program write there?"
            )

    def _is_there(self, name: str) -> bool:
        """Whether the target has this file with the content of the source's."""
        nbytes = self._files[name].nbytes
        if self._size_there(name) != nbytes:
            return False
        if _digest_of(self._pieces(name)) == self._digest(name):
            return True
        self._count(-2 * nbytes)  # it is sent and compared now
        return False

    def _size_there(self, name: str, *, anew: bool = False) -> int | None:
        """The size of a file of the target; None if there is none, or if it is no regular file."""
        path = inside(self.place, name)
        if is_url(path):
            stat = stat_of(path) if anew else self._there.get(name)
            return None if stat is None else stat.nbytes
        try:
            status = os.lstat(path)
        except OSError:
            return None
        return status.st_size if stat_mode.S_ISREG(status.st_mode) else None

    def _send(self, name: str, target: str) -> str:
        """Write a file at the target; returns the digest of what was read."""
        digest = xxhash.xxh3_128()

        def pieces() -> Iterator[memoryview]:
            for piece in self._pieces(name):
                digest.update(piece)
                yield piece

        if is_url(target):
            where = place_of(target)
            store_of(where.root).write(where.key, pieces(), self._files[name].nbytes)
            return digest.hexdigest()
        try:
            make_directories(os.path.dirname(target))
            with suppress(FileNotFoundError):
                os.unlink(target)
        except OSError as error:
            raise CheckpointError(f"{target}: can't be written: {error.strerror}") from error
        with FileWriter(target) as file:
            for piece in pieces():
                file.write(piece)
        return digest.hexdigest()

    def _digest(self, name: str) -> str:
        """Of a file of the target."""
        return _digest_of(self._read(inside(self.place, name), _File(self._files[name].nbytes)))

    def _pieces(self, name: str) -> Iterator[memoryview]:
        """A file of the source, which is compared with its checksums, if the manifest has any."""
        file, path = self._files[name], inside(self._origin, name)
        if file.content is not None:
            yield memoryview(file.content)
            self._count(file.nbytes)
            return
        before = None if is_url(path) else _identity(path)
        yield from self._read(path, file)
        if before is not None and _identity(path) != before:
            raise IntegrityError("was changed while it was copied; copy it again", path=path)

    def _read(self, path: str, file: _File) -> Iterator[memoryview]:
        """A file's bytes, each unit of them compared with its checksum if there is one.

        Each piece has memory of its own: a store may still send it while the next one is read.
        """
        stored, entry = StoredFile(path, file.nbytes, file.version), file.entry
        units = [Unit(0, file.nbytes, None)] if entry is None else units_of(entry, path=path)
        with SourceReader(files=[stored]) as reader, reader.expecting([(path, 0, file.nbytes)]):
            for unit in units:
                total = xxhash.xxh3_64()
                for start in range(unit.start, unit.stop, _PIECE_BYTES):
                    if self.error is not None:
                        raise CheckpointError("the copy was stopped by the error of another file")
                    piece = memoryview(bytearray(min(_PIECE_BYTES, unit.stop - start)))
                    reader.read_into(path, start, piece)
                    if entry is not None:
                        total.update(piece)
                    yield piece
                    self._count(piece.nbytes)
                if entry is not None and total.hexdigest() != unit.xxh3:
                    raise IntegrityError(
                        f"differs from its checksum in the manifest before byte {unit.stop}: damaged, and not copied",
                        path=path,
                    )

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            more = max(0, self._done - self._most)
            self._most += more
        self._counted.add(more)


def discard_copy(out: str) -> None:
    """Delete what a copy that failed has written. Logs what can't be deleted."""
    if is_url(out):
        discard_in_store(out)
    else:
        for place in _unfinished(out):
            remove_ours(place)


def _unfinished(final: str) -> list[str]:
    """Local directories that copies to ``final`` have begun: with its name and a nonce, and with our note. No other is taken for one."""
    folder, stem = _stem_of(final)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    pattern = re.compile(re.escape(stem) + "[0-9a-f]{16}")
    return [path for n in names if pattern.fullmatch(n) and has_note(path := os.path.join(folder, n))]


def _stem_of(final: str) -> tuple[str, str]:
    folder, name = os.path.split(final)
    if len(os.fsencode(name)) > MOST_NAME_BYTES:  # two long names that begin alike are told apart by a hash
        digest = xxhash.xxh3_64_hexdigest(os.fsencode(name))
        name = f"{shortened(name, MOST_NAME_BYTES - 17)}-{digest}"
    return folder, name + _UNFINISHED


def _begun(final: str) -> str:
    """The directory in which a local copy is made: that of a copy that was stopped, or a new one. Raises :class:`CheckpointError`."""
    try:
        for place in _unfinished(final):
            for folder, folders, names in os.walk(place):
                for path in [os.path.join(folder, name) for name in (*folders, *names)]:
                    if os.path.islink(path):  # a copy makes none, and writes through none
                        os.unlink(path)
            return place
        folder, stem = _stem_of(final)
        make_directories(folder)
        place = os.path.join(folder, f"{stem}{secrets.token_hex(8)}")
        os.mkdir(place)
    except OSError as error:
        raise CheckpointError(f"{final}: can't be written: {error.strerror}") from error
    mark(place)
    return place


def _identity(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror}", path=path) from error
    return status.st_size, status.st_mtime_ns


def _appear(place: str, final: str, names: set[str]) -> None:
    """Give a whole local copy its name. Raises :class:`CheckpointError`."""
    try:
        for folder, folders, files in os.walk(place, topdown=False):
            for name in (*files, *folders):  # what an earlier copy of something else left
                path = os.path.join(folder, name)
                if name == NOTE_NAME and folder == place:
                    continue
                if os.path.islink(path) or (name in files and os.path.relpath(path, place) not in names):
                    os.unlink(path)
            if not os.listdir(folder) and folder != place:
                os.rmdir(folder)
            else:
                fsync_directory(folder)
        unmark(place)
        os.rename(place, final)
    except OSError as error:
        raise CheckpointError(f"{final}: can't be given its name: {error.strerror}") from error
    fsync_directory(os.path.dirname(final))


# ----------------------------------------------------------------------------------------------------
# A second place for the steps of a run: a thread of rank 0 copies each published step there, and proves the copy.

_log = logging.getLogger(__name__)
_SLICE_S = 5.0


def is_same(path: str, copy: str) -> bool | None:
    """Whether two steps have the same manifest; if not, they are of two branches of a run. None if one can't be read.

    Raises :class:`SourceError` if a manifest can't be read, and is not damaged.
    """
    try:
        first, second = (read_small(join(one, MANIFEST_NAME), "manifest") for one in (path, copy))
    except SourceError as error:
        if is_corruption(error) or isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise
    return first == second


class Mirror:
    """Copies what a line has and its mirror has not: the newest step first.

    Every rank makes one; rank 0 alone calls its methods. A mirror that is slower than the saves skips steps that retention deletes.
    ``retain(line, newest)`` applies the run's retention. A failure is logged, and the copy tried again after the next save:
    training does not depend on the mirror.
    """

    def __init__(self, line: Line, source: Line, retain: Callable[[Line, int], None]) -> None:
        self.line = line
        self._source = source
        self._retain = retain
        self._lock = threading.Lock()
        self._again = False
        self._idle = threading.Event()
        self._idle.set()
        self._newest: int | None = None
        self._copying: int | None = None
        self._same: set[tuple[str, str]] = set()
        """Names of steps, in both places, whose manifests were compared."""

    @property
    def newest(self) -> int | None:
        """The newest step that this process has copied and proved."""
        return self._newest

    @property
    def copying(self) -> int | None:
        """The step that is being copied now: retention of the first place spares it."""
        return self._copying

    def follow(self) -> None:
        """Copy in the background what is missing."""
        with self._lock:
            self._again = True
            if not self._idle.is_set():
                return
            self._idle.clear()
        try:
            threading.Thread(target=self._run, name="shardwise-mirror").start()
        except RuntimeError as error:  # the system is out of threads, or the process ends
            self._idle.set()
            _log.warning("%s: copying to the mirror failed: %s", self.line.root, error)

    def wait(self) -> None:
        """Block until the thread has copied what it can."""
        while not patiently(self._idle.wait, _SLICE_S):
            pass

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._again:
                    self._idle.set()
                    return
                self._again = False
            try:
                tried: set[int] = set()
                while self._copy_one(tried):
                    pass
            except ShardwiseError as error:
                _log.warning("%s: copying to the mirror failed: %s", self.line.root, error)
            except Exception:
                _log.exception("%s: copying to the mirror failed", self.line.root)

    def _copy_one(self, tried: set[int]) -> bool:
        """Copy the newest step that is missing and was not ``tried``; whether there was one."""
        here = self._source.seen_steps()
        self.line.held_steps()  # begins a line, if there is none
        there = self._without_another_branch(self.line.steps(), here)
        missing = [step for step in here if step not in there and step not in tried]
        if not missing:
            return False
        step = missing[0]
        tried.add(step)
        name = self.line.fresh_name(step)
        target = join(self.line.root, name)
        self._copying = step
        try:
            with in_background():
                copy_checkpoint(join(self._source.root, here[step]), target)
        except ShardwiseError as error:
            discard_copy(target)
            gone = step not in self._source.seen_steps()
            if gone or is_corruption(error):
                why = "retention has deleted it" if gone else str(error)
                _log.warning("%s: step %d is not mirrored: %s", self.line.root, step, why)
                return True
            raise
        finally:
            self._copying = None
        self.line.add(step, name)
        newest = max((step, *there))
        self._newest = max(step, self._newest or 0)
        self._retain(self.line, newest)
        self.line.tidy(newest)
        return True

    def _without_another_branch(self, there: dict[int, str], here: Mapping[int, str]) -> dict[int, str]:
        """The mirror's steps, without those that the run has saved anew since: these are set aside."""
        pairs = [(step, (here[step], name)) for step, name in there.items() if step in here]
        new = [(step, pair) for step, pair in pairs if pair not in self._same]
        stale = [
            step
            for step, (own, name) in new
            if is_same(join(self._source.root, own), join(self.line.root, name)) is False
        ]
        if stale:
            self.line.take(max(there), dict.fromkeys(stale, "superseded"))
        self._same |= {pair for step, pair in new if step not in stale}
        return {step: name for step, name in there.items() if step not in stale}
