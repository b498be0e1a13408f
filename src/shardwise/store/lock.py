"""One run per checkpoint directory: an advisory lock that the kernel drops when its process ends."""

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

from ..errors import CheckpointError, LockedError, SourceError
from ..ranks.patience import patiently
from .write import make_directories

__all__ = ["DirectoryLock", "check_held", "holder_of", "lock_file"]

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
                f"{root}: another run writes checkpoints here ({holder or 'unknown'}); stop it, or give this "
                f"run another directory"
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
