"""A short probe of a directory: writes at most 64 MiB below a fresh name, reads them, and deletes them."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import secrets
import shutil
import statistics
import time
from collections.abc import Callable

from ..store.lock import lock_file
from .facts import Place, Speeds
from .mounts import mount_of

__all__ = ["PREFIX", "delete_probes", "look_at_place"]

#: Names of what the probe makes begin so. It deletes them, also when it is interrupted; SIGKILL leaves one such folder.
PREFIX = ".shardwise-doctor-"
_BYTES, _PIECE_BYTES, _READ_BYTES = 64 * 1024**2, 4 * 1024**2, 8 * 1024**2
#: Each of the three measurements ends after so long.
_EACH_S = 1.5
#: Folders of probes that run.
_running: set[str] = set()


def look_at_place(path: str) -> Place:
    """Facts of the directory ``path``, which exists. Rank-local; takes a few seconds, unless the storage hangs."""
    space = os.statvfs(path)
    free_bytes = space.f_bavail * space.f_frsize if space.f_blocks else None
    failures: dict[str, str] = {}
    speeds, ahead_s = None, 0.0
    folder = os.path.join(path, f"{PREFIX}{secrets.token_hex(8)}")
    _running.add(folder)  # before it is there: an interrupt may come at any moment
    try:
        os.mkdir(folder, 0o700)
    except OSError as error:
        _running.discard(folder)
        failures["write"] = error.strerror or str(error)
    else:
        try:
            speeds, ahead_s = _measure(
                folder, _BYTES if free_bytes is None else min(_BYTES, free_bytes // 4), failures
            )
            _try(failures, "rename", lambda: _rename(folder))
            _try(failures, "lock", lambda: _lock(folder, failures))
            _try(failures, "direct", lambda: _write_direct(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _running.discard(folder)
    return Place(
        path=path,
        mount=mount_of(path),
        free_bytes=free_bytes,
        free_inodes=space.f_favail if space.f_files else None,
        failures=failures,
        speeds=speeds,
        clock_ahead_s=ahead_s,
    )


def delete_probes() -> None:
    """Delete the folders of probes that other threads run, before the process ends and those threads with it."""
    for folder in [*_running] * 20:  # the probe may make a file meanwhile
        shutil.rmtree(folder, ignore_errors=True)


def _try(failures: dict[str, str], what: str, work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        failures[what] = error.strerror or str(error)


def _measure(folder: str, nbytes: int, failures: dict[str, str]) -> tuple[Speeds | None, float]:
    """Write, sync and read one file; what was measured, and how far its time is ahead of this machine's clock."""
    step, ahead_s = "write", 0.0
    fd = -1
    try:
        fd = os.open(os.path.join(folder, "bytes"), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        began, now_s = time.monotonic(), time.time()
        done = _fill(fd, nbytes)
        ahead_s = os.fstat(fd).st_mtime - time.time()
        if -1.0 <= ahead_s <= 0.0 or now_s <= os.fstat(fd).st_mtime <= time.time():
            ahead_s = 0.0  # within the write: no difference that this can see
        step = "fsync"
        os.fsync(fd)
        write_s = time.monotonic() - began
        fsync_s = statistics.median(_time_of_sync(folder, k) for k in range(3))
        step = "read"
        _forget(fd)
        read = _read(fd, range(0, done, _PIECE_BYTES), _PIECE_BYTES)
        _forget(fd)
        draw = random.Random(0)
        places = [draw.randrange(0, max(1, done - _READ_BYTES)) // 4096 * 4096 for _ in range(8)]
        return Speeds(
            write_bytes_s=done / max(write_s, 1e-6),
            read_bytes_s=read,
            random_bytes_s=_read(fd, places, _READ_BYTES),
            fsync_s=fsync_s,
        ), ahead_s
    except OSError as error:
        failures[step] = error.strerror or str(error)
        return None, ahead_s
    finally:
        if fd >= 0:
            os.close(fd)


def _fill(fd: int, nbytes: int) -> int:
    piece = os.urandom(min(_PIECE_BYTES, max(nbytes, 4096)))
    done, end = 0, time.monotonic() + _EACH_S
    while not done or (done < nbytes and time.monotonic() < end):
        done += os.pwrite(fd, piece, done)
    return done


def _time_of_sync(folder: str, number: int) -> float:
    fd = os.open(os.path.join(folder, f"small-{number}"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, bytes(4096))
        began = time.monotonic()
        os.fsync(fd)
        return time.monotonic() - began
    finally:
        os.close(fd)


def _forget(fd: int) -> None:
    """Ask the system to drop the file's pages, so that a read reaches the storage."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _read(fd: int, places: range | list[int], nbytes: int) -> float:
    """Bytes a second."""
    began, done = time.monotonic(), 0
    for start in places:
        done += len(os.pread(fd, nbytes, start))
        if time.monotonic() - began > _EACH_S:
            break
    return done / max(time.monotonic() - began, 1e-6)


def _rename(folder: str) -> None:
    """As a published checkpoint does: a file over another, and a whole directory."""
    old, new = os.path.join(folder, "small-0"), os.path.join(folder, "small-1")
    for path in (old, new):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    os.replace(old, new)
    os.mkdir(os.path.join(folder, "half"))
    os.rename(os.path.join(folder, "half"), os.path.join(folder, "whole"))


def _lock(folder: str, failures: dict[str, str]) -> None:
    """Lock a file twice, through two descriptors: the second must be refused."""
    path = os.path.join(folder, "lock")
    first = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    second = os.open(path, os.O_RDWR)
    try:
        lock_file(first)
        if not hasattr(fcntl, "F_OFD_SETLK"):
            return  # locks of the process: they do not exclude their own process
        try:
            lock_file(second)
        except OSError:
            return
        failures["exclude"] = "two holders had one lock"
    finally:
        os.close(first)
        os.close(second)


def _write_direct(folder: str) -> None:
    """Write one page past the page cache."""
    if not hasattr(os, "O_DIRECT"):
        return
    fd = os.open(os.path.join(folder, "direct"), os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        with mmap.mmap(-1, 4096) as page:
            os.write(fd, page)
    finally:
        os.close(fd)
