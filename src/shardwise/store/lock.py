"""One run per checkpoint directory: an advisory lock that the kernel drops with the process that holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket

from ..errors import CheckpointError, LockedError
from .write import make_directories

__all__ = ["DirectoryLock"]


_HELD: set[str] = set()


class DirectoryLock:
    """``fcntl.lockf`` on ``<root>/.lock``, or a file of another ``name``, taken by rank 0 for as long as a Checkpointer is open.

    A POSIX record lock belongs to the process: a killed run's lock is gone with it, and forked data-loader
    workers do not inherit it. Raises :class:`LockedError` naming who holds it.
    """

    def __init__(self, root: str, *, name: str = ".lock") -> None:
        path = os.path.join(root, name)
        self._root = os.path.realpath(root)
        if self._root in _HELD:  # a record lock does not exclude its own process, and closing would drop it
            raise LockedError(
                f"{root}: this process holds it already, by another Checkpointer; close that one"
            )
        try:
            make_directories(root)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if os.path.exists(root) and not os.path.isdir(root):
                raise CheckpointError(
                    f"{root}: is a file; give the directory that holds a run's steps"
                ) from error
            raise CheckpointError(f"{path}: can't be created: {error.strerror}") from error
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                os.close(self._fd)
                raise CheckpointError(f"{path}: can't be locked: {error.strerror}") from error
            holder = os.read(self._fd, 1000).decode(errors="replace").strip()
            os.close(self._fd)
            raise LockedError(
                f"{root}: another run writes checkpoints here ({holder or 'unknown'}); stop it, or give this "
                f"run another directory"
            ) from error
        _HELD.add(self._root)
        # On a full disk, too: what is held is the lock, not the note of who holds it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)

    def release(self) -> None:
        """Give the lock back. The file stays: deleting it would let two runs lock two files."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            _HELD.discard(self._root)
            with contextlib.suppress(OSError):  # closed all the same, and the lock with it
                os.close(fd)
