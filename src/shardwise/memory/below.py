"""Opens files below a directory without following a link on the way."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

__all__ = ["open_below"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_below(root: str, name: str, flags: int = os.O_RDONLY) -> int:
    """Open the regular file ``name``, which :func:`.limits.inside` has checked, below ``root``. Returns its descriptor.

    With ``O_CREAT`` folders that are not there are made, for this user alone. Never waits for a pipe. Raises ``OSError``, also for a link
    in place of the file or of a folder on the way.
    """
    *folders, last = name.split("/")
    folder = os.open(root, _FOLDER)
    try:
        for one in folders:
            if flags & os.O_CREAT:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(one, 0o700, dir_fd=folder)
            inner = os.open(one, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        found = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "is not a regular file", name)
    return found
