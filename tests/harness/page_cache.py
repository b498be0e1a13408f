"""The page cache of files: measured, dropped, held. Linux."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cached_bytes", "drop", "drops_pages", "held"]

_libc = ctypes.CDLL(None, use_errno=True)


def cached_bytes(*files: Path) -> int:
    """How much of these files is in the page cache (mincore)."""
    total = 0
    for file in files:
        if not file.stat().st_size:
            continue
        with file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        pages = -(-len(mapped) // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(mapped)
        try:
            found = _libc.mincore(
                ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(mapped)), resident
            )
            if found:
                raise OSError(ctypes.get_errno(), "mincore failed")
        finally:
            del anchor
            mapped.close()
        total += sum(page & 1 for page in resident) * mmap.PAGESIZE
    return total


def drop(*files: Path) -> None:
    """Sync files and let the kernel forget their pages.

    The kernel leaves pages that another thread uses at this instant, so it is asked again, for up to five seconds.
    """
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        for pause_s in (0.0, 0.02, 0.08, 0.4, 1.5, 3.0):
            time.sleep(pause_s)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if not cached_bytes(file):
                break
        os.close(fd)


@contextmanager
def held(file: Path, nbytes: int) -> Iterator[None]:
    """Keep the first ``nbytes`` of a file, and no others, in the page cache (mlock): the kernel may drop pages that no process
    locks. Most systems let a process without privileges lock 8 MiB."""
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, nbytes, 0)
    os.close(fd)
    with file.open("r+b") as stream:
        mapped = mmap.mmap(stream.fileno(), nbytes)
    mapped.madvise(mmap.MADV_RANDOM)
    anchor = ctypes.c_char.from_buffer(mapped)
    try:
        if _libc.mlock(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(nbytes)):
            raise OSError(ctypes.get_errno(), f"mlock of {nbytes} bytes failed")
        yield
    finally:
        del anchor
        mapped.close()


def drops_pages(directory: Path) -> bool:
    """Whether files here can leave the page cache: those of a tmpfs have no other place."""
    probe = directory / "probe"
    probe.write_bytes(bytes(1024**2))
    drop(probe)
    left = cached_bytes(probe)
    probe.unlink()
    return left == 0
