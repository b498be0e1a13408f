"""Low disk space is seen before payload is written: the plan knows the bytes."""

from __future__ import annotations

import errno
import math
import os
import socket
from collections.abc import Callable

from ..dtypes import itemsize
from ..errors import LowSpaceError
from ..ranks.patience import patiently
from ..storage import is_url
from .collect import Collected

__all__ = ["payload_bytes", "refuse_low_space"]


def payload_bytes(collected: Collected) -> int:
    """Bytes of all tensors that a save writes, over all ranks. Linear in tensors, whatever the number of ranks."""
    stored = (v.stored for part in collected.snapshot.parts for v in part.live if not v.refers)
    return sum(itemsize(t.dtype) * math.prod(t.shape) for t in stored)


def refuse_low_space(place: str, most: int, what: str, exactly: Callable[[], int] | None = None) -> None:
    """Raise :class:`LowSpaceError` if the file system of ``place``, as this host sees it, has less free than the save takes.

    ``most``: an upper bound of the bytes; ``exactly`` gives their number, and is called only where the bound does not fit. A URL is not
    checked. Root also counts the blocks that the file system keeps for root. This check does not see a user's quota.
    """
    if is_url(place):
        return
    try:
        while place and not patiently(os.path.exists, place):
            place = os.path.dirname(place)
        found = patiently(os.statvfs, place or ".")
    except OSError:  # what writes there says it better
        return
    free = (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize
    if free >= most or not found.f_blocks:
        return
    needed = most if exactly is None else exactly()
    if free < needed:
        raise LowSpaceError(
            f"{place}: {os.strerror(errno.ENOSPC)}: {what} takes {_words(needed)}, and the file system has {_words(free)} free "
            f"on host {socket.gethostname()}. Nothing was written. Delete files, keep fewer steps (keep_last), or give a fallback",
            needed_bytes=needed,
            free_bytes=free,
        )


def _words(nbytes: int) -> str:
    return f"{nbytes:,} bytes ({nbytes / 1e9:.2f} GB)"
