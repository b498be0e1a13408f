"""Whether the kernel keeps the pages of files that were read, and giving them back where it shall not.

What is read with ``preadv`` stays in the page cache until memory runs short. Where a device shares its memory with
the host, that is a second copy of the model in the memory that the model needs.
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

from ..plan.records import IOOptions

__all__ = ["Chosen", "Pages", "page_cache_for", "shares_memory"]

#: What ``"auto"`` comes to.
Chosen = Literal["keep", "release"]

#: What was read last stays for a while: tensors end within pages, and another rank may read the same ones, a little later.
WINDOW_BYTES = 64 * 1024**2
#: So much is given back at a time, because each time the kernel may look at the lists of all cores.
_STEP_BYTES = 16 * 1024**2
#: Ranges that lie so near to each other are taken as one: the kernel reads ahead what lies between.
_GAP_BYTES = 128 * 1024
#: The kernel keeps pages in groups, and gives back only those that a range holds whole: each range begins before the
#: group in which the range before it ended.
_GROUP_BYTES = 4 * 1024**2


def page_cache_for(io: IOOptions, devices: Iterable[torch.device]) -> Chosen:
    """What ``io.page_cache`` means for tensors on these devices: ``"auto"`` releases if one shares the host's memory."""
    if io.page_cache != "auto":
        return io.page_cache
    return "release" if any(shares_memory(device) for device in set(devices)) else "keep"


def shares_memory(device: torch.device) -> bool:
    """Whether a device other than the CPU uses the host's memory: MPS, and GPUs that say that they are integrated."""
    if device.type in ("cpu", "meta"):
        return False
    if device.type == "mps":
        return True
    try:
        properties = torch.get_device_module(device).get_device_properties(device)
    except (RuntimeError, AssertionError, AttributeError):  # no driver, or a backend that tells nothing
        return False
    return bool(getattr(properties, "is_integrated", False))


class Pages:
    """The pages of what one reader reads, given back behind it. Rank-local; not thread-safe.

    At most about 80 MiB that were read are still cached, and nothing of a file once :meth:`close` was called for it by
    the last process that reads it. Pages that another process has mapped stay (the kernel's rule). Linux
    (``posix_fadvise``); on macOS the file is read past the cache (``F_NOCACHE``).
    """

    def __init__(self) -> None:
        self._read: deque[list[int]] = deque()  # [fd, start, stop], oldest first
        self._nbytes = 0

    def open(self, fd: int) -> None:
        """Before a file is read."""
        if not hasattr(os, "posix_fadvise") and hasattr(fcntl, "F_NOCACHE"):
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)

    def read(self, fd: int, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` of a file were read, and are not needed again."""
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
        """Before a file is closed: what is left of it goes, with its header and what the kernel has read ahead."""
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
    """Give pages back. ``length`` 0: to the end of the file."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)
