"""Who may write in a directory: an advisory lock, marks of what is ours, and what other hosts see of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import xxhash

from ..errors import CheckpointError, LockedError, ShardwiseError, SourceError
from ..format.header import misnamed
from ..format.manifest import MANIFEST_NAME, Manifest, read_manifest
from ..limits import read_json, read_small
from ..ranks.ranks import Ranks, patiently, remove_tree
from ..storage import names_in
from ..storage.records import is_url
from .write import fsync_directory, make_directories, write_file

# ----------------------------------------------------------------------------------------------------
# One run per checkpoint directory: an advisory lock that the kernel drops when its process ends.

#: Locks of this process, by the real path of their directory.
_HELD: dict[str, DirectoryLock] = {}
_TAKEN = (errno.EACCES, errno.EAGAIN)
_BEGINNING = '{"host": "'
#: How a lock file of ours begins, unless it is empty, or a crash has cut its note or left only its size. No other file is written to.
_NOTE = re.compile(
    rf"{re.escape(_BEGINNING)}|(?:{'|'.join(re.escape(_BEGINNING[:n]) for n in range(len(_BEGINNING)))})\x00*\Z"
)
#: Linux has locks of the open file. Other systems have only locks of the process.
_SET_LOCK = getattr(fcntl, "F_OFD_SETLK", None)
_closes_in_forks = False


class DirectoryLock:
    """A lock on ``<root>/.lock``, or a file of another ``name``. Rank 0 holds it while a Checkpointer is open.

    On Linux the lock belongs to the open file (``F_OFD_SETLK``): reading or copying the file in this process, as a
    backup does, does not drop it. With locks of the process only (``lockf``) it does drop it, and :meth:`check` takes
    it again. A killed run's lock ends with the run: forked data-loader workers close the file as soon as they start.
    Raises :class:`LockedError` naming the holder.
    """

    def __init__(self, root: str, *, name: str = ".lock") -> None:
        self._path = os.path.join(root, name)
        self._root = os.path.realpath(root)
        self._pid = os.getpid()
        if self._root in _HELD:  # a lock of the process does not exclude its own process
            raise LockedError(
                f"{root}: another Checkpointer in this process already holds it; close that one"
            )
        try:
            make_directories(root)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
            self._fd = patiently(os.open, self._path, flags, 0o644)
        except OSError as error:
            if os.path.exists(root) and not os.path.isdir(root):
                raise CheckpointError(
                    f"{root}: is a file; give the directory that holds a run's steps"
                ) from error
            if os.path.islink(self._path):
                raise CheckpointError(
                    f"{self._path}: can't be locked, because it is a link, which is not followed; remove it"
                ) from error
            raise CheckpointError(f"{self._path}: can't be created: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise CheckpointError(
                f"{self._path}: can't be locked, because it is not a regular file; remove it"
            )
        if not _NOTE.match(self._holder()):
            os.close(self._fd)
            raise CheckpointError(
                f"{self._path}: can't be locked, because another program wrote it: it does not name a holder; move it away"
            )
        _HELD[self._root] = self  # before locking: a fork from here on must close the file
        _close_in_forks()
        try:
            patiently(lock_file, self._fd)
            self._note_holder()
        except OSError as error:
            holder = self._holder()
            self.release()
            if error.errno not in _TAKEN:
                raise CheckpointError(f"{self._path}: can't be locked: {error.strerror}") from error
            raise LockedError(
                f"{root}: another run is writing checkpoints here ({holder or 'unknown'}); stop it, or use a "
                f"different directory for this run"
            ) from error

    def _note_holder(self) -> None:
        """Write the holder into the file: for people, and for :meth:`check`."""
        note = {"host": socket.gethostname(), "pid": self._pid, "lease": secrets.token_hex(8)}
        # On a full disk the note fails, but the lock holds without it.
        with contextlib.suppress(OSError):
            patiently(os.ftruncate, self._fd, 0)
            patiently(os.pwrite, self._fd, json.dumps(note).encode(), 0)
        self._lease = self._holder()

    def _holder(self) -> str:
        return patiently(os.pread, self._fd, 1000, 0).decode(errors="replace").strip()

    def check(self) -> None:
        """Raise :class:`LockedError` unless this process still holds the directory.

        It holds it if the file under this name is the locked one, the lock is its own, and no other run has noted
        itself as holder since. A dropped lock (a server restarted) that no other run took is taken again. Raises
        :class:`SourceError` if storage does not say.
        """
        problem = self._problem()
        if problem:
            raise LockedError(
                f"{self._path}: this run has lost its lock on the directory ({problem}); nothing is published. "
                f"Stop the other run if there is one, leave {os.path.basename(self._path)} alone, and start again"
            )

    def _problem(self) -> str:
        if self._fd < 0 or self._pid != os.getpid():
            return "this process did not take it, or released it"
        try:
            if not self._has_its_name():
                return "another file has its name"
            patiently(lock_file, self._fd)
            holder = self._holder()
        except FileNotFoundError:
            return "the file was deleted"
        except OSError as error:
            if (
                error.errno not in _TAKEN
            ):  # storage fails: the lock may still be held, and the next save may succeed
                raise SourceError(
                    f"the lock can't be inspected: {error.strerror}", path=self._path
                ) from error
            return f"another run has locked it: {error.strerror}"
        return "" if holder == self._lease else f"it was taken by {holder or 'another run'}"

    def has_its_name(self) -> bool:
        """Whether the file that was locked is still the one that the next run will open."""
        try:
            return self._has_its_name()
        except OSError:
            return False

    def _has_its_name(self) -> bool:
        return os.path.samestat(patiently(os.stat, self._path), patiently(os.fstat, self._fd))

    def release(self) -> None:
        """Release the lock. The file stays: deleting it would let two runs lock two files."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            if _HELD.get(self._root) is self:
                del _HELD[self._root]
            with contextlib.suppress(OSError):  # the file is closed anyway, which drops the lock
                patiently(os.close, fd)


def holder_of(root: str) -> str:
    """What the holder of a directory has noted in its lock file; empty if there is no such file. Rank-local."""
    try:
        fd = patiently(os.open, os.path.join(root, ".lock"), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        return patiently(os.pread, fd, 1000, 0).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        patiently(os.close, fd)


def check_held(root: str) -> None:
    """Raise :class:`LockedError` if this process holds a lock on ``root`` and has lost it; see `DirectoryLock.check`.

    Called before anything in a directory appears, is renamed or is deleted. Costs four system calls.
    """
    lock = _HELD.get(os.path.realpath(root))
    if lock is not None:
        lock.check()


def lock_file(fd: int) -> None:
    """Lock an open file, unless this process has locked it. Raises ``OSError``; with `_TAKEN` if another holds it."""
    if _SET_LOCK is not None:
        # struct flock: type, whence, start, length (0: all), pid (must be 0)
        whole = struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(fd, _SET_LOCK, whole)
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: a kernel, or an emulated one, without this command
                raise
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _close_in_forks() -> None:
    """Forked children close lock files, because an inherited descriptor would keep a killed run's lock alive."""
    global _closes_in_forks
    if not _closes_in_forks:
        _closes_in_forks = True
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    """Runs in a forked child: the locks are the parent's. Closing unlocks nothing: the parent has the file open."""
    for lock in _HELD.values():
        fd, lock._fd = lock._fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)
    _HELD.clear()


# ----------------------------------------------------------------------------------------------------
# On a shared file system ranks may see new files late. Rank 0's view decides; other ranks wait until theirs matches.

#: Network file systems cache a directory for at most this long (NFS: acdirmax).
_MOST_PATIENCE_S = 60.0
#: On a disk of a host's own nothing comes late.
_PATIENCE_OF_DISK_S = 2.0
_PAUSE_S = 0.05


def manifest_seen_by_first(path: str, ranks: Ranks) -> Callable[[], Manifest]:
    """Rank 0 reads a checkpoint and tells the other ranks its view. Collective. Returns a function that reads the manifest on this rank.

    The function waits until this rank sees the directory as rank 0 does, unless rank 0 could not read it. It raises as
    ``read_manifest``; :class:`SourceError` if this rank's view still differs from rank 0's after a minute or the time limit.
    """
    manifest: Manifest | None = None

    def look() -> list[Any] | None:
        nonlocal manifest
        try:
            checksum = _checksum(path)
            manifest = read_manifest(path)
            return [checksum, sorted(_unseen(path, manifest.files))]
        except (OSError, ShardwiseError):  # every rank then finds the error itself
            return None

    view = None if ranks.world_size == 1 else ranks.on_first("look at manifest", look)
    expected, lost = view or ("", [])

    def is_manifest() -> bool:
        try:
            return bool(_checksum(path) == expected)
        except SourceError:
            return False

    def read() -> Manifest:
        if manifest is not None:
            return manifest
        if view is None:
            return read_manifest(path)
        _wait(ranks, is_manifest, path, MANIFEST_NAME)
        found = read_manifest(path)
        names = set(found.files).difference(lost)
        _wait(ranks, lambda: not _unseen(path, names), path, "files of its manifest")
        return found

    return read


def open_for_all(root: str, open_first: Callable[[], str], ranks: Ranks) -> str:
    """Rank 0 locks a run's directory by ``open_first``; every other rank checks that it sees the same directory.
    Returns on every rank what ``open_first`` returned on rank 0. Collective.

    Raises what ``open_first`` raises, and :class:`RankError` naming ranks and hosts that have no directory in common with rank 0.
    """

    def opened() -> list[str]:
        found = open_first()
        return [found, "" if is_url(root) else holder_of(root), f"{root} on host {socket.gethostname()}"]

    found, holder, first = ranks.on_first("lock checkpoint directory", opened)
    if holder and ranks.world_size > 1:  # on a full disk no holder is noted
        with ranks.agree("look at checkpoint directory"):
            _wait_for_directory(root, holder, first, ranks)
    return str(found)


def _wait_for_directory(root: str, holder: str, first: str, ranks: Ranks) -> None:
    """Wait until this rank sees in ``root`` what rank 0 has noted in its lock file there. Rank-local.

    ``first``: the directory and host of rank 0, for the error. Raises :class:`CheckpointError` after a minute or the time limit, on
    a local file system after two seconds: the ranks have no directory in common, and no save could succeed.
    """
    if holder_of(root) == holder:
        return
    from ..loading.strategies import on_network  # and with it what loads, for which no first save waits

    patience_s = min(_MOST_PATIENCE_S if on_network(root) else _PATIENCE_OF_DISK_S, ranks.timeout_s)
    if not _comes(ranks, lambda: holder_of(root) == holder, patience_s):
        there = "another directory than rank 0's" if os.path.isdir(root) else "no such directory"
        found = holder_of(root)
        seen = f"; its lock was noted by {found}" if found else ""
        raise CheckpointError(
            f"{root}: rank {ranks.rank} on host {socket.gethostname()} sees {there} after {patience_s:g} s; rank 0 has locked "
            f"{first}{seen}. Give every rank the same path on a file system that all hosts share, or the URL of an object "
            f"store (if the path contains the time, rank 0 must make it and send it to all ranks)"
        )


def wait_for_folders(path: str, folders: Sequence[str], ranks: Ranks) -> None:
    """Wait until this rank sees a directory that rank 0 has just made, with its folders. Rank-local.

    Raises :class:`CheckpointError` after a minute or the time limit.
    """
    try:
        for folder in folders:
            _wait(ranks, partial(os.path.isdir, os.path.join(path, folder)), path, folder)
    except SourceError as error:
        raise CheckpointError(str(error)) from error


def _checksum(path: str) -> str:
    return xxhash.xxh3_64_hexdigest(read_small(os.path.join(path, MANIFEST_NAME), "manifest"))


def _unseen(path: str, names: Collection[str]) -> set[str]:
    """The files that are not listed. Lists each folder once instead of asking for every file of every rank.

    None below a URL: objects are read by name, and a listing may be late.
    """
    if is_url(path):
        return set()
    seen = set()
    for folder in {os.path.dirname(name) for name in names}:
        try:
            seen |= {os.path.join(folder, name) for name in names_in(os.path.join(path, folder))}
        except (FileNotFoundError, NotADirectoryError):
            continue
    return set(names) - seen


def _wait(ranks: Ranks, is_there: Callable[[], bool], path: str, what: str) -> None:
    patience_s = min(_MOST_PATIENCE_S, ranks.timeout_s)
    if not _comes(ranks, is_there, patience_s):
        raise SourceError(
            f"rank 0 sees {what}, rank {ranks.rank} does not after {patience_s:g} s; every rank needs the same "
            f"shared file system under this path",
            path=path,
        )


def _comes(ranks: Ranks, is_there: Callable[[], bool], patience_s: float) -> bool:
    """Wait for something. Returns whether it came in time."""
    end = time.monotonic() + patience_s
    while not is_there():
        if time.monotonic() > end:
            return False
        ranks.tick()
        time.sleep(_PAUSE_S)
    return True


# ----------------------------------------------------------------------------------------------------
# Which unfinished files and directories shardwise made, and may delete: a name never proves that.
#
# * A name of ours ends with a nonce, as ``.tmp-step-00000005-0123456789abcdef``.
# * A directory under such a name holds a note with the same nonce before anything else, or a manifest that belongs to its name. Without
#   either it is ours only while nothing else is in it. The note goes when the manifest is on the disk.
# * A file under such a name holds what its kind may hold, or the beginning of it, or zeros, as a power loss leaves it.
#
# So a deletion takes the note last, or the manifest where there is no note: what it leaves when it is cut, also by a power loss, can be told
# again. Links are never ours.

NOTE_NAME = ".shardwise"
_PROOFS = (NOTE_NAME, MANIFEST_NAME)
_MOST_BYTES = 1000
_NONCE = "(?P<nonce>[0-9a-f]{16})"
_FOLDER = re.compile(rf"\.(?:tmp|trash)-(?P<of>.+)-{_NONCE}|\.tmp-(?P<view>[0-9a-f]{{16}})-view")
_COPYING = re.compile(rf".+\.copying-{_NONCE}")
#: Files that appear by a rename, by the beginning of their names, and what they may hold.
_FILES = {
    "latest": re.compile(rb"(s|st|ste|step|step-\d*\n?)?"),
    "place": re.compile(rb"[0-9a-f]{0,16}\n?"),
    "memory": re.compile(rb'(\{"format": .*)?', re.DOTALL),
}
_FILE = re.compile(rf"\.tmp-(?P<kind>{'|'.join(_FILES)})-{_NONCE}")
_PROBE = re.compile(r"\.tmp-probe-[0-9a-f]{16}-\d+")


def mark(path: str) -> None:
    """Write the note into a new directory and sync both, so that no file can survive a power loss without it.

    Raises :class:`CheckpointError`.
    """
    note = {
        "shardwise": "unfinished or deleted: shardwise may delete this directory",
        "nonce": _nonce_of(path),
    }
    write_file(os.path.join(path, NOTE_NAME), json.dumps(note).encode())
    fsync_directory(path)


def unmark(path: str) -> None:
    """Delete the note, durably, before a directory gets its final name. Raises ``OSError``, :class:`CheckpointError`."""
    with contextlib.suppress(FileNotFoundError):
        patiently(os.unlink, os.path.join(path, NOTE_NAME))
        fsync_directory(path)


def has_note(path: str) -> bool:
    """Whether a directory, and no link to one, holds the note with the nonce of its name."""
    nonce = _nonce_of(path)
    if not nonce or not _is(stat.S_ISDIR, path) or not _is(stat.S_ISREG, os.path.join(path, NOTE_NAME)):
        return False
    try:
        note = read_json(os.path.join(path, NOTE_NAME), "note", _MOST_BYTES)
    except SourceError:
        return False
    return isinstance(note, dict) and "shardwise" in note and note.get("nonce") == nonce


def run_of(path: str) -> str | None:
    """The run of a checkpoint: of a directory, and no link to one, with an intact manifest that belongs to its name. None for anything else."""
    if not _is(stat.S_ISDIR, path) or not _is(stat.S_ISREG, os.path.join(path, MANIFEST_NAME)):
        return None
    try:
        manifest = patiently(read_manifest, path)
    except SourceError:
        return None
    unfinished = _FOLDER.fullmatch(os.path.basename(path))
    final = path if unfinished is None else unfinished["of"] or ""
    return None if misnamed(final, manifest.step, manifest.files) else manifest.run_id


def is_checkpoint(path: str) -> bool:
    """Whether a directory is a checkpoint of ours, of whatever run: see :func:`run_of`."""
    return run_of(path) is not None


def is_ours(path: str) -> bool:
    """Whether shardwise made this unfinished file or directory, so that it may be deleted. Rank-local."""
    name = os.path.basename(path)
    if _FOLDER.fullmatch(name) and _is(stat.S_ISDIR, path):
        return has_note(path) or is_checkpoint(path) or _has_no_content(path)
    if not _is(stat.S_ISREG, path):
        return False
    if _PROBE.fullmatch(name):
        return os.lstat(path).st_size == 0
    found = _FILE.fullmatch(name)
    try:
        return found is not None and bool(
            _FILES[found["kind"]].fullmatch(patiently(read_small, path, "file", _MOST_BYTES).rstrip(b"\0"))
        )
    except SourceError:
        return False


def remove_ours(path: str) -> None:
    """Delete a file or a directory of ours, what proves it to be ours last. What can't be deleted stays; links are not followed."""
    if not _is(stat.S_ISDIR, path):
        with contextlib.suppress(OSError):
            patiently(os.unlink, path)
        return
    # Not both: a power loss could take the note alone, and leave a manifest that never came to the disk.
    proofs = (NOTE_NAME,) if has_note(path) else _PROOFS
    remove_tree(path, spared=proofs)
    with contextlib.suppress(OSError, CheckpointError):
        if all(name in proofs for name in patiently(os.listdir, path)):
            fsync_directory(path)  # a power loss must not bring back what they prove without them
            for name in proofs:
                with contextlib.suppress(FileNotFoundError):
                    patiently(os.unlink, os.path.join(path, name))
            patiently(os.rmdir, path)


def _nonce_of(path: str) -> str:
    name = os.path.basename(path)
    found = _FOLDER.fullmatch(name) or _COPYING.fullmatch(name)
    return "" if found is None else found["nonce"] or found["view"]


def _is(kind: Callable[[int], bool], path: str) -> bool:
    """Whether there is something of this kind, which is no link."""
    try:
        return kind(patiently(os.lstat, path).st_mode)
    except OSError:
        return False


def _has_no_content(path: str) -> bool:
    """Whether a directory is empty, but for a note that never came to the disk."""
    try:
        return all(name == NOTE_NAME for name in patiently(os.listdir, path))
    except OSError:
        return False
