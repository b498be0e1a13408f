"""Decides whether read files stay in the kernel's page cache, and releases their pages if not.

Bytes read with ``preadv`` stay in the page cache until memory runs short. If a device shares memory with the host,
they are a second copy of the model in the memory that the model needs.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable
from typing import Literal

import torch

from ..planning.records import IOOptions

__all__ = ["Chosen", "Pages", "page_cache_for", "shares_memory"]

#: A resolved ``io.page_cache``, without ``"auto"``.
Chosen = Literal["keep", "release"]

#: The last bytes read stay for a while: tensors end within pages, and another rank may read the same pages soon after.
WINDOW_BYTES = 64 * 1024**2
#: Bytes released at a time: each release may make the kernel look at the lists of all cores.
_STEP_BYTES = 16 * 1024**2
#: Ranges this near to each other count as one: the kernel reads ahead the bytes between them.
_GAP_BYTES = 128 * 1024
#: The kernel keeps pages in groups, and releases only groups that lie wholly in a range. So each range begins before
#: the group in which the last range ended.
_GROUP_BYTES = 4 * 1024**2


def page_cache_for(io: IOOptions, devices: Iterable[torch.device]) -> Chosen:
    """Resolve ``io.page_cache`` for tensors on these devices: ``"auto"`` releases if one shares the host's memory."""
    if io.page_cache != "auto":
        return io.page_cache
    return "release" if any(shares_memory(device) for device in set(devices)) else "keep"


def shares_memory(device: torch.device) -> bool:
    """Whether a device other than the CPU uses the host's memory: MPS, and GPUs that report to be integrated."""
    if device.type in ("cpu", "meta"):
        return False
    if device.type == "mps":
        return True
    try:
        properties = torch.get_device_module(device).get_device_properties(device)
    except (RuntimeError, AssertionError, AttributeError):  # no driver, or a backend that does not report it
        return False
    # CUDA and ROCm say it by the first name, XPU by the second.
    return any(getattr(properties, name, False) for name in ("is_integrated", "is_integrated_gpu"))


class Pages:
    """Releases the pages that one reader has read. Rank-local; not thread-safe.

    At most about 80 MiB of read pages stay cached, and none of a file after the last process that reads it has called
    :meth:`close`. Pages that another process has mapped stay (the kernel's rule). Linux (``posix_fadvise``); on macOS
    the file is read past the cache (``F_NOCACHE``).
    """

    def __init__(self) -> None:
        self._read: deque[list[int]] = deque()  # [fd, start, stop], oldest first
        self._nbytes = 0

    def open(self, fd: int) -> None:
        """Call before a file is read."""
        if not hasattr(os, "posix_fadvise") and hasattr(fcntl, "F_NOCACHE"):
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)

    def read(self, fd: int, start: int, stop: int) -> None:
        """Note that bytes ``start`` to ``stop`` of a file were read and are not needed again."""
        last = self._read[-1] if self._read else None
        if last is not None and last[0] == fd and last[1] <= start <= last[2] + _GAP_BYTES:
            self._nbytes += max(0, stop - last[2])
            last[2] = max(last[2], stop)
        else:
            self._read.append([fd, start, stop])
            self._nbytes += stop - start
        if self._nbytes >= WINDOW_BYTES + _STEP_BYTES:
            self._give_back(self._nbytes - WINDOW_BYTES)

    def close(self, fd: int) -> None:
        """Call before a file is closed: releases the rest of it, with its header and the pages read ahead."""
        for run in [run for run in self._read if run[0] == fd]:
            self._read.remove(run)
            self._nbytes -= run[2] - run[1]
        _advise(fd, 0, 0)

    def _give_back(self, nbytes: int) -> None:
        while nbytes > 0:
            fd, start, stop = run = self._read[0]
            count = min(nbytes, stop - start)
            first = max(0, start // mmap.PAGESIZE * mmap.PAGESIZE - _GROUP_BYTES)
            _advise(fd, first, start + count - first)
            if count == stop - start:
                self._read.popleft()
            else:
                run[1] += count
            self._nbytes -= count
            nbytes -= count


def _advise(fd: int, start: int, length: int) -> None:
    """Release pages. ``length`` 0: to the end of the file."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)
