"""Files and directories that are on the disk, or in the store, when a call returns."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import mmap
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import CheckpointError, LockedError, SourceError
from ..format.manifest import MANIFEST_NAME, Checksums, FileEntry, Manifest, parse_manifest
from ..format.slices import Slice, header_bytes
from ..host import dense_parts, flat_bytes
from ..limits import MAX_HEADER_BYTES, brief, read_json
from ..ranks.ranks import PIECE_BYTES, Watch, current_watch, libc_function, patiently, watched, write_behind
from ..storage import exists, files_below, is_file
from ..storage.records import is_url, join, place_of
from ..storage.stores import store_of

# ----------------------------------------------------------------------------------------------------
# Checks before every commit, into a directory or a store: all files are there, and a reader will take the manifest.


def check_written(place: str, found: Mapping[str, int], files: Mapping[str, FileEntry]) -> None:
    """Raise :class:`CheckpointError` unless the sizes ``found`` at ``place``, by name, are exactly those of the manifest's ``files``."""
    wrong = [f"{n}: not ours" for n in found if n not in files]
    wrong += [f"{n}: lost" for n in files if n not in found]
    wrong += [
        f"{n}: {found[n]} bytes, expected {entry.nbytes}"
        for n, entry in files.items()
        if found.get(n, entry.nbytes) != entry.nbytes
    ]
    if wrong:
        raise CheckpointError(f"{place}: files differ from what the ranks wrote: {'; '.join(wrong[:10])}")


def readable_text(manifest: Manifest, path: str) -> bytes:
    """The manifest's text. Raises :class:`CheckpointError` if :func:`.read_manifest` would refuse it."""
    text = manifest.to_text().encode()
    try:
        parse_manifest(text, path)
    except SourceError as error:
        raise CheckpointError(f"nothing is published, because it couldn't be read back: {error}") from error
    return text


# ----------------------------------------------------------------------------------------------------
# Publishes a checkpoint in an object store, where nothing can be renamed: the manifest, written once and last, is the commit.
#
# A save first claims its prefix by an object beside it, ``<prefix>.claim``, which the store makes only if there is none: so two saves never
# write to one prefix. Then all ranks write their files under the final names. Rank 0 compares sizes, and writes the manifest, again only if there
# is none. A reader sees no checkpoint before that. A save that was killed leaves its claim, which says when it began.

_log = logging.getLogger(__name__)
_CLAIM = ".claim"
_MOST_CLAIM_BYTES = 4096
#: Name of an object that is made and deleted at once, to see what the store does with conditions.
PROBE = ".probe-"
_NO_CONDITIONS = (
    "the store doesn't support conditional writes, without which two saves could get mixed up; save to a local directory, and upload it with "
    "`shardwise copy`"
)
#: A piece of this size goes to the store's client at a time.
_PIECE_BYTES = 4 * 1024**2


class ObjectWriter:
    """Writes an object from front to back, as :class:`.FileWriter` a file; it appears when the block is left without an error.

    ``nbytes`` will be written, about: large objects need large parts. Memory: four parts of 8 MiB. Raises :class:`CheckpointError`.
    """

    def __init__(
        self, path: str, on_progress: Callable[[int], object] | None = None, *, expected_bytes: int = 0
    ) -> None:
        self.nbytes = 0
        self._on_progress = on_progress
        place = place_of(path)
        self._file = store_of(place.root).writer(place.key, expected_bytes)

    def __enter__(self) -> ObjectWriter:
        return self

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        for start in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            patiently(self._file.write, piece)
            self.nbytes += piece.nbytes
            if self._on_progress is not None:
                self._on_progress(piece.nbytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def close(self) -> None:
        """Let the object appear, after the last byte."""
        patiently(self._file.close)


def claim(url: str) -> None:
    """Take a prefix for one save. For rank 0.

    Raises :class:`CheckpointError` if something is there already, or if the store does not keep conditions of writes;
    :class:`LockedError` if another save has claimed it, or was killed.
    """
    place = place_of(url + _CLAIM)
    store = store_of(place.root)
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    own = json.dumps({"nonce": secrets.token_hex(8), "began": began}).encode()
    if not patiently(store.create, place.key, own):
        raise LockedError(
            f"{url}: claimed by another save ({_claimed(place.url)}), which is still running or was killed; if no save is running, delete {place.url} "
            f"and everything below {url}, or save to another URL"
        )
    try:
        # A store that does not know the condition takes every write.
        if patiently(store.create, place.key, own + b" "):
            raise CheckpointError(f"{url}: {_NO_CONDITIONS}")
        # Not before: a save that held the claim until now has published. The manifest by its name, because a listing may be late.
        if patiently(is_file, join(url, MANIFEST_NAME)) or patiently(exists, url):
            raise CheckpointError(f"{url}: exists already; published checkpoints are never overwritten")
    except BaseException:
        release(url)
        raise


def _claimed(url: str) -> str:
    with contextlib.suppress(SourceError, TypeError, KeyError):
        began = read_json(url, "claim", _MOST_CLAIM_BYTES)["began"]
        return f"since {brief(began).strip(chr(39))}"
    return "it can't be read"


def commit_in_store(url: str, manifest: Manifest) -> None:
    """Publish: after every rank wrote its files. For rank 0.

    Raises :class:`CheckpointError` if the objects are not exactly the manifest's, if :func:`.read_manifest` would refuse its text, or if
    there is a manifest already.
    """
    below = patiently(files_below, url, manifest.files)
    check_written(
        url, {name: stat.nbytes for name, stat in below.items() if stat is not None}, manifest.files
    )
    text = readable_text(manifest, url)
    place = place_of(join(url, MANIFEST_NAME))
    if not patiently(store_of(place.root).create, place.key, text):
        raise CheckpointError(f"{url}: was published by another program, and can't be written again")


def delete_below(url: str) -> None:
    """Delete all objects below ``url``, the manifest first: what is half deleted is no checkpoint.

    Raises :class:`SourceError`, :class:`CheckpointError`.
    """
    others = [name for name in patiently(files_below, url) if name != MANIFEST_NAME]
    for name in (MANIFEST_NAME, *others):  # the manifest also where a listing is late and does not show it
        place = place_of(join(url, name))
        patiently(store_of(place.root).delete, place.key)


def discard_in_store(url: str) -> bool:
    """As :func:`delete_below`, for what a failed save has written. Returns whether all is deleted; if not, logs why."""
    try:
        delete_below(url)
    except (SourceError, CheckpointError) as error:
        _log.warning("a save failed, and what it wrote to %s can't be deleted: %s", url, error)
        return False
    return True


def release(url: str) -> None:
    """Give up the claim of :func:`claim`. A failure is logged: the next save to that place will say what to delete."""
    place = place_of(url + _CLAIM)
    try:
        patiently(store_of(place.root).delete, place.key)
    except CheckpointError as error:
        _log.warning("%s can't be deleted: %s", place.url, error)


def refuse_without_conditions(url: str) -> None:
    """Raise :class:`CheckpointError` if the store does not keep conditions of writes. Writes and deletes one small object below ``url``."""
    place = place_of(join(url, f"{PROBE}{secrets.token_hex(8)}"))
    store = store_of(place.root)
    first, second = (secrets.token_hex(8).encode() for _ in range(2))
    try:
        keeps = patiently(store.create, place.key, first) and not patiently(store.create, place.key, second)
        held = patiently(store.get, place.key, _MOST_CLAIM_BYTES)
        keeps = keeps and held is not None and patiently(store.replace, place.key, second, held)
        keeps = keeps and held is not None and not patiently(store.replace, place.key, first, held)
    finally:
        with contextlib.suppress(CheckpointError):
            patiently(store.delete, place.key)
    if not keeps:
        raise CheckpointError(f"{url}: {_NO_CONDITIONS}")


# ----------------------------------------------------------------------------------------------------
# Makes files and directories that are on the disk when a call returns.

_WRITE_PIECE_BYTES = 16 * 1024**2


class FileWriter:
    """Writes a new file from front to back; leaving the block without an error syncs it to disk.

    Refuses to overwrite. Calls ``on_progress(n)`` after each piece. Bytes in the page cache are written to disk on the
    way, which leaves at most 128 MiB for fsync. Raises :class:`CheckpointError` naming the file (full disk, file size
    limit, I/O error, also one that only fsync reports).
    """

    def __init__(self, path: str, on_progress: Callable[[int], object] | None = None) -> None:
        self._path = path
        self._on_progress = on_progress
        self.nbytes = 0
        self._cached_bytes = 0  # in the page cache since the kernel was last told to write

    def __enter__(self) -> FileWriter:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = patiently(os.open, self._path, flags, 0o644)
        except OSError as error:
            raise CheckpointError(f"{self._path}: can't be created: {error.strerror}") from error
        return self

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        done = 0
        while done < view.nbytes:
            try:
                count = patiently(os.write, self._fd, view[done : done + _WRITE_PIECE_BYTES])
                self._count_cached(count)
            except OSError as error:
                raise self._error(error) from error
            done += count
            self.nbytes += count
            if self._on_progress is not None:
                self._on_progress(count)

    def _count_cached(self, count: int) -> None:
        self._cached_bytes += count
        if self._cached_bytes >= PIECE_BYTES:
            self._cached_bytes = 0
            patiently(write_behind, self._fd)

    def _error(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._path}: write failed after {self.nbytes} bytes: {error.strerror}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                patiently(os.fsync, self._fd)
        except OSError as failure:
            raise CheckpointError(f"{self._path}: fsync failed: {failure.strerror}") from failure
        finally:
            self._close(has_failed=kind is not None)

    def _close(self, *, has_failed: bool) -> None:
        """Close the file. On some network file systems close() is the first call to report lost bytes."""
        try:
            patiently(os.close, self._fd)
        except OSError as failure:
            if not has_failed:
                raise CheckpointError(f"{self._path}: closing failed: {failure.strerror}") from failure


def write_file(path: str, content: bytes) -> FileEntry:
    """Write and sync a small file or object whole. Returns its manifest entry: the first 100 MB, then blocks of the rest."""
    with ObjectWriter(path) if is_url(path) else FileWriter(path) as file:
        file.write(content)
    checksums = Checksums(min(len(content), MAX_HEADER_BYTES))
    checksums.add(content)
    return checksums.entry()


def replace_file(path: str, temporary: str, content: bytes) -> None:
    """Write a small file under a temporary name next to it, and give it its name; durable on return. Raises :class:`CheckpointError`."""
    write_file(temporary, content)
    try:
        patiently(os.replace, temporary, path)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be written: {error.strerror}") from error
    fsync_directory(os.path.dirname(path))


def make_directories(path: str) -> None:
    """Make a directory and its missing parents; every new name is durable on return, also one that a start which was killed, or could not
    sync, has made. Raises ``OSError``, :class:`CheckpointError`."""
    missing = []
    while not patiently(os.path.isdir, path):
        missing.append(path)
        path = os.path.dirname(path)
    _sync_name(path)
    for new in reversed(missing):
        # Another process was faster; or it is a file, and opening anything in it will fail.
        with contextlib.suppress(FileExistsError):
            patiently(os.mkdir, new)
        fsync_directory(os.path.dirname(new))


def _sync_name(path: str) -> None:
    """Make the name of a directory durable that was there. Those above it are: each was synced before the next was made.

    Not where the directory above can't be opened or synced, as that of a mount point; raises :class:`CheckpointError` if its disk fails.
    """
    try:
        fsync_directory(os.path.dirname(path))
    except CheckpointError as error:
        if getattr(error.__cause__, "errno", None) in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    try:
        fd = patiently(os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            patiently(os.fsync, fd)
        finally:
            patiently(os.close, fd)
    except OSError as error:
        raise CheckpointError(f"{path}: fsync failed: {error.strerror}") from error


# ----------------------------------------------------------------------------------------------------
# Writes large files past the page cache: it fills and hashes one buffer while another goes to the disk.

BUFFER_BYTES = 8 * 1024**2
#: Alignment of offsets, lengths and memory: a multiple of every disk's sector size.
_ALIGNMENT = 4096
#: Errors of a write past the page cache, on file systems that accept the flag itself.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
#: Linux only.
_O_DIRECT = getattr(os, "O_DIRECT", 0)


W = TypeVar("W")


class _Buffers(Generic[W]):
    """Two buffers of 8 MiB: a thread passes one to ``write`` while the caller fills the other. A later call raises the error of a write."""

    def __init__(self, write: Callable[[W, memoryview], None]) -> None:
        self.filling = _buffer()
        self._write = write
        self._failure: BaseException | None = None
        self._free: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        self._free.put(_buffer())
        self._full: queue.SimpleQueue[tuple[W, NDArray[np.uint8], int, Watch | None] | None] = (
            queue.SimpleQueue()
        )
        self._ended = threading.Event()
        self._has_thread = True
        try:
            # A daemon: the caller waits for it, and after an interrupt it must not keep the process alive.
            threading.Thread(target=self._write_each, name="shardwise-write", daemon=True).start()
        except RuntimeError:  # Python starts no thread while a process ends or when the system has none left
            self._has_thread = False
        except BaseException:
            self._full.put(None)
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the thread has stopped writing, so that files can be closed. After :meth:`close`, it has, unless Ctrl-C interrupted the wait."""
        return self._ended.is_set() or not self._has_thread

    def hand_over(self, where: W, nbytes: int) -> None:
        """Let the first bytes of :attr:`filling` be written, and take the other buffer as soon as it is free."""
        if self._failure is not None:
            raise self._failure
        if self._has_thread:
            watch = current_watch()  # the thread does this thread's work
            self._full.put((where, self.filling, nbytes, watch))
            self.filling = self._free.get()
        else:
            self._write(where, self.filling.data[:nbytes])

    def close(self, error: BaseException | None = None) -> None:
        """Wait until all is written, and raise the error of a write. With an error of the caller's, nothing more is written or raised."""
        self._failure = self._failure or error
        self._full.put(None)
        try:
            if self._has_thread:
                self._ended.wait()  # not join(): if Ctrl-C interrupts it, Python 3.11 counts the thread as ended
        except BaseException as interrupt:
            self._failure = self._failure or interrupt
            raise
        if error is None and self._failure is not None:
            raise self._failure

    def _write_each(self) -> None:
        while (found := self._full.get()) is not None:
            where, buffer, nbytes, watch = found
            try:
                if self._failure is None:
                    with watched(watch):
                        self._write(where, buffer.data[:nbytes])
            except BaseException as error:
                self._failure = error
            self._free.put(buffer)
        self._ended.set()


class DirectWriter(FileWriter):
    """A :class:`FileWriter` with a thread that writes while the caller makes the next bytes.

    Writes past the page cache (``O_DIRECT``) if the file system can, otherwise through it. Past the cache the kernel
    does not copy each byte, which costs more than hashing it, and has nothing left to flush at the end. A later call,
    or leaving the block, raises the error of a write. Memory: two buffers of 8 MiB.
    """

    def __enter__(self) -> DirectWriter:
        self._used = 0
        super().__enter__()
        try:
            self._is_direct = _switch(self._fd, on=True)
            self._buffers = _Buffers[None](lambda _, view: self._write_out(view))
        except BaseException:
            self._close(has_failed=True)
            raise
        return self

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        source = np.frombuffer(data, dtype=np.uint8)
        done = 0
        while done < len(source):
            count = min(len(source) - done, BUFFER_BYTES - self._used)
            self._buffers.filling[self._used : self._used + count] = source[done : done + count]
            self._used += count
            done += count
            if self._used == BUFFER_BYTES:
                self._hand_over()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if self._used and kind is None:
                    self._hand_over()
            except BaseException as failure:
                self._buffers.close(failure)
                raise
            self._buffers.close(error)
        except BaseException:
            if self._buffers.has_ended:  # else the thread may still write to the file's number
                self._close(has_failed=True)
            raise
        super().__exit__(kind, error, trace)

    def _hand_over(self) -> None:
        self._buffers.hand_over(None, self._used)
        if self._on_progress is not None:
            self._on_progress(self._used)
        self._used = 0

    def _write_out(self, view: memoryview) -> None:
        """On the thread."""
        aligned = view.nbytes // _ALIGNMENT * _ALIGNMENT if self._is_direct else view.nbytes
        done = 0
        while done < view.nbytes:
            if (
                self._is_direct and done == aligned
            ):  # the end of the file, or an unaligned rest of a short write
                self._is_direct = _switch(self._fd, on=False)
                aligned = view.nbytes
            try:
                count = patiently(os.write, self._fd, view[done:aligned])
                if not self._is_direct:
                    self._count_cached(count)
            except OSError as error:
                if self._is_direct and error.errno in _REFUSALS:  # needs a larger alignment, or refuses all
                    aligned = done
                    continue
                raise self._error(error) from error
            done += count
            self.nbytes += count
            if self._is_direct and done % _ALIGNMENT:
                aligned = done


def _buffer() -> NDArray[np.uint8]:
    """Aligned to pages."""
    return np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), dtype=np.uint8)


def _switch(fd: int, *, on: bool) -> bool:
    """Make writes go past the page cache, or through it. Returns whether they go past it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
        return on and _O_DIRECT != 0
    return False


# ----------------------------------------------------------------------------------------------------
# Fills files that several ranks write to at once.

#: Fewer whole blocks at once are faster through the page cache, which gathers them.
_LEAST_DIRECT_BYTES = 256 * 1024
#: What a small range takes in memory in addition to its bytes.
_ENTRY_BYTES = 256


@dataclass
class _Filled:
    """An open file. ``block``: bytes of a block; 0 if nothing goes past the page cache."""

    path: str
    fd: int
    block: int
    cached_bytes: int = 0  # since the kernel was last told to write


class FileFiller:
    """Writes byte ranges into existing files of a directory; leaving the block without an error syncs them.

    Of a large range, a thread writes the whole blocks past the page cache, as :class:`DirectWriter` does. Small ranges, and its ends, which share blocks
    with other ranges, go through the cache, many at a time, because the kernel makes each of them wait for all large writes to the file.
    Rank-local; several ranks may fill disjoint ranges of one file. Memory: 24 MiB. Raises :class:`CheckpointError`.
    """

    def __init__(self, root: str, on_progress: Callable[[int], object] | None = None) -> None:
        self.bytes_written = 0
        self._root = root
        self._files: dict[str, _Filled] = {}
        self._buffers: _Buffers[tuple[_Filled, int]] | None = None
        self._direct: tuple[_Filled, int] | None = (
            None  # the thread's: a file, and a descriptor with O_DIRECT
        )
        self._small: list[tuple[str, int, bytes]] = []  # file, offset, content
        self._small_bytes = 0
        self._on_progress = on_progress

    def __enter__(self) -> FileFiller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._buffers is not None:
                self._buffers.close(error)
            if kind is None:
                self._write_small()
                for file in self._files.values():
                    with _failing(file.path, "fsync"):
                        patiently(os.fsync, file.fd)
        finally:
            if self._buffers is None or self._buffers.has_ended:
                self._close_direct()
                while self._files:
                    patiently(os.close, self._files.popitem()[1].fd)

    def write_at(self, name: str, offset_bytes: int, view: memoryview) -> None:
        """Write bytes at an offset of a file; they are there when the block is left."""
        file = self._files.get(name)
        if file is None:
            path = os.path.join(self._root, name)
            with _failing(path, "write"):
                file = self._files[name] = _opened(path)
        start = stop = 0
        if file.block and view.nbytes >= max(_LEAST_DIRECT_BYTES, 2 * file.block):
            start = -offset_bytes % file.block
            stop = start + (view.nbytes - start) // file.block * file.block
            self._write_behind(file, offset_bytes + start, view[start:stop])
        for at, part in ((0, view[:start]), (stop, view[stop:])):
            if part.nbytes < _LEAST_DIRECT_BYTES:
                if part.nbytes:
                    self._small.append((name, offset_bytes + at, bytes(part)))
                    self._small_bytes += part.nbytes + _ENTRY_BYTES
                    self._count(part.nbytes)
                continue
            for done in range(0, part.nbytes, BUFFER_BYTES):
                piece = part[done : done + BUFFER_BYTES]
                _write_through(file, offset_bytes + at + done, piece)
                self._count(piece.nbytes)
        if self._small_bytes >= BUFFER_BYTES:
            self._write_small()

    def _write_behind(self, file: _Filled, offset_bytes: int, view: memoryview) -> None:
        """Let a thread write whole blocks past the page cache."""
        if self._buffers is None:
            self._buffers = _Buffers(self._write_blocks)
        for done in range(0, view.nbytes, BUFFER_BYTES):
            part = view[done : done + BUFFER_BYTES]
            self._buffers.filling[: part.nbytes] = np.frombuffer(part, dtype=np.uint8)
            self._buffers.hand_over((file, offset_bytes + done), part.nbytes)
            self._count(part.nbytes)

    def _count(self, nbytes: int) -> None:
        self.bytes_written += nbytes
        if self._on_progress is not None:
            self._on_progress(nbytes)

    def _write_small(self) -> None:
        """Write the small ranges, each file from front to back."""
        for name, offset, content in sorted(self._small):
            _write_through(self._files[name], offset, memoryview(content))
        self._small.clear()
        self._small_bytes = 0

    def _write_blocks(self, where: tuple[_Filled, int], view: memoryview) -> None:
        """On the thread: past the page cache; through it where the file system refuses, or has taken a part of a block."""
        file, offset_bytes = where
        block, done = file.block, 0
        with _failing(file.path, "write"):
            while done < view.nbytes and block and done % block == 0:
                try:
                    done += patiently(os.pwrite, self._direct_fd(file), view[done:], offset_bytes + done)
                except OSError as error:
                    if error.errno not in _REFUSALS:
                        raise
                    file.block = block = 0
        _write_through(file, offset_bytes + done, view[done:])

    def _direct_fd(self, file: _Filled) -> int:
        """One at a time: ranges come file by file, and a process may open only so many."""
        if self._direct is None or self._direct[0] is not file:
            self._close_direct()
            self._direct = file, patiently(os.open, file.path, os.O_WRONLY | os.O_CLOEXEC | _O_DIRECT)
        return self._direct[1]

    def _close_direct(self) -> None:
        if self._direct is not None:
            fd, self._direct = self._direct[1], None
            patiently(os.close, fd)


def _opened(path: str) -> _Filled:
    fd = patiently(os.open, path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        return _Filled(path, fd, _block_bytes(fd) if _O_DIRECT else 0)
    except BaseException:
        patiently(os.close, fd)
        raise


def _write_through(file: _Filled, offset_bytes: int, view: memoryview) -> None:
    done = 0
    with _failing(file.path, "write"):
        while done < view.nbytes:
            count = patiently(os.pwrite, file.fd, view[done : done + _WRITE_PIECE_BYTES], offset_bytes + done)
            done += count
            file.cached_bytes += count
            if file.cached_bytes >= PIECE_BYTES:
                file.cached_bytes = 0
                patiently(write_behind, file.fd)


@contextlib.contextmanager
def _failing(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {what} failed: {error.strerror}") from error


def _block_bytes(fd: int) -> int:
    """Bytes that a file's system reads and writes together, so that writes past the page cache and through it don't share them; 0: too many."""
    block = max(_ALIGNMENT, mmap.PAGESIZE, os.fstat(fd).st_blksize)
    return 0 if BUFFER_BYTES % block else block


def enlarge(path: str, nbytes: int) -> None:
    """Give a file its size, and reserve disk space for all of it. Without the space, ranks that write past the page cache wait for each other.

    File systems without ``fallocate`` (Linux) reserve nothing: ``os.posix_fallocate`` would write to every block there. Raises ``OSError``.
    """
    fallocate = libc_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    fd = patiently(os.open, path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        while fallocate is not None and patiently(fallocate, fd, 0, 0, nbytes):
            if (code := ctypes.get_errno()) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise OSError(code, os.strerror(code))
            if code != errno.EINTR:
                fallocate = None
        if fallocate is None:
            patiently(os.ftruncate, fd, nbytes)
    finally:
        patiently(os.close, fd)


# ----------------------------------------------------------------------------------------------------
# Writes one slice file: straight from the tensors, checksummed on the way, synced to disk.

#: Files of this size or more get a thread of their own.
LARGE_BYTES = 16 * 1024**2


class InPlace:
    """Takes the place of a writer where a file's bytes are already in memory."""

    def __init__(self, path: str, nbytes: int, on_progress: Callable[[int], object] | None) -> None:
        self._on_progress = on_progress

    def __enter__(self) -> InPlace:
        return self

    def write(self, data: memoryview | bytes) -> None:
        if self._on_progress is not None:
            self._on_progress(memoryview(data).nbytes)

    def __exit__(self, *_: object) -> None:
        pass


#: Opens the writer of a slice file of so many bytes; it tells ``on_progress`` of each piece.
WriterOf = Callable[[str, int, Callable[[int], object] | None], "FileWriter | ObjectWriter | InPlace"]


def writer_of(
    path: str, nbytes: int, on_progress: Callable[[int], object] | None
) -> FileWriter | ObjectWriter:
    """Of a file, or of an object of a store."""
    if is_url(path):
        return ObjectWriter(path, on_progress, expected_bytes=nbytes)
    return (DirectWriter if nbytes >= LARGE_BYTES else FileWriter)(path, on_progress)


def write_slices(
    path: str,
    slices: Sequence[Slice],
    contents: Iterable[Iterable[torch.Tensor]],
    on_progress: Callable[[int], object] | None = None,
    open_writer: WriterOf = writer_of,
) -> FileEntry:
    """Write one slice file, or object of a store, in safetensors format, and sync it. Returns its manifest entry.

    ``contents``: for each slice, in order, tensors on the CPU (any strides) that hold its box, one part after another. They
    are taken when they are written. Memory: 16 MiB for a large file, and 4 MiB for tensors that are not contiguous.
    """
    header = header_bytes(slices)
    checksums = Checksums(len(header))
    nbytes = len(header) + sum(one.nbytes for one in slices)
    with open_writer(path, nbytes, on_progress) as file:
        file.write(header)
        checksums.add(header)
        for parts in contents:
            for part in parts:
                for view in tensor_bytes(part):
                    file.write(view)
                    checksums.add(view)
    return checksums.entry()


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's elements in row-major order as raw bytes: a view if it is contiguous, else copies of ≤ 4 MiB."""
    for part in dense_parts(tensor.detach()):
        if part.numel():
            yield flat_bytes(part).numpy().data
