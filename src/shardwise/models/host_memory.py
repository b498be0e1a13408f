"""Host memory for the shards of a model, filled through huge pages where that costs less than through small ones.

A read into fresh memory is bound by page faults: the kernel finds, clears and maps 4 KiB at a time. In pages of 2 MiB the
same read took a third of the CPU time on the machine measured. ``malloc`` spoils that: it writes a header before each
tensor, and where one small page is in use the kernel puts no huge one. So the shards lie side by side in mappings
of their own, not touched before they are filled.

Huge pages can also cost more: the kernel may have to move memory to make one, and a virtual machine may have given its
large free blocks back to the host. The CPU time of the reads decides, for each part of the load.

Sources: Documentation/admin-guide/mm/transhuge.rst of Linux, ``madvise(2)``.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import torch

from ..internals.torch import empty_like, local_tensor

__all__ = ["HUGE_PAGE_BYTES", "LEAST_BYTES", "HostMemory", "Pages"]

Pages = Literal["auto", "huge", "small"]

HUGE_PAGE_BYTES = 2 * 1024**2
#: Smaller tensors come from torch's allocator: whole pages for each would waste more than they save.
LEAST_BYTES = 128 * 1024
#: Address space that one mapping takes. Memory is used only where it is written.
_MAPPING_BYTES = 256 * 1024**2
#: The kind of pages is chosen anew after so many bytes. The first choice comes after fewer: the small pages that are tried first
#: mostly cost twice as much.
_WINDOW_BYTES = 16 * 1024**2
_TRIAL_BYTES = 4 * 1024**2
#: Pages are changed if they cost so many times as much as the others did. CPU time also grows where another program shares a core's caches.
_DEARER = 1.25
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HostMemory:
    """Allocates CPU tensors that are filled soon, and chooses the pages that they are filled through. Rank-local.

    Each tensor owns its pages: when its storage dies, they go back to the system, as with torch's allocator. Its storage
    can't be resized. One thread allocates, several may fill. Beside the tensors' own bytes, rounded up to 4 KiB, at most one
    huge page in 128 is in use.
    """

    def __init__(self, pages: Pages = "auto", *, cpu_time: Callable[[], float] = time.thread_time) -> None:
        """``pages``: as ``IOOptions.pages``. ``cpu_time``: the CPU seconds that this thread has used."""
        self._mappings: list[mmap.mmap] = []
        self._next = self._end = 0  # free bytes of the last mapping
        self._refusal = _refusal()
        self._may_change = pages == "auto"
        self._pages: Literal["huge", "small"] = "huge" if pages == "huge" else "small"
        #: CPU seconds for each byte, as last measured; 0 before.
        self._cost = {"small": 0.0, "huge": 0.0}
        self._bytes = {"small": 0, "huge": 0}
        self._has_chosen = False
        self._cpu_time = cpu_time
        self._measured_bytes, self._measured_s = 0, 0.0
        self._lock = threading.Lock()  # around what is measured

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized CPU tensor, as ``torch.empty_strided``."""
        if self._refusal is not None or math.prod(size) * dtype.itemsize < LEAST_BYTES:  # as most tensors are
            return torch.empty_strided(size, stride, dtype=dtype)
        count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        nbytes = count * dtype.itemsize
        raw = torch.frombuffer(self._take(nbytes), dtype=dtype, count=count)
        return raw.as_strided(size, stride)

    def empty_like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor as ``torch.empty_like`` on the same device; of a DTensor, one with its placements."""
        if tensor.device.type != "cpu" or type(local_tensor(tensor)) is not torch.Tensor:
            return torch.empty_like(tensor, dtype=dtype)
        return empty_like(tensor, dtype, self.empty)

    def first_bytes(self, nbytes: int) -> int:
        """How much of a read of ``nbytes`` bytes to make first: up to where the first choice of pages is due."""
        if not self._mappings or self._has_chosen or not self._may_change:
            return nbytes
        # A piece smaller than LEAST_BYTES is not measured, so the trial would never end.
        return min(nbytes, max(_TRIAL_BYTES - self._measured_bytes, LEAST_BYTES))

    @contextmanager
    def filling(self, nbytes: int) -> Iterator[None]:
        """Around each read of ``nbytes`` bytes into the tensors."""
        if not self._mappings or nbytes < LEAST_BYTES:
            yield
            return
        pages, begin = self._pages, self._cpu_time()
        yield
        seconds = self._cpu_time() - begin
        with self._lock:
            if pages != self._pages:  # another thread has changed them meanwhile
                return
            self._measured_s += seconds
            self._measured_bytes += nbytes
            if self._measured_bytes >= (_WINDOW_BYTES if self._has_chosen else _TRIAL_BYTES):
                self._choose()

    def settle(self) -> None:
        """No more huge pages from here on; those that are there stay. Call it when the tensors are filled.

        Else khugepaged goes on: around each page in use it fills the 2 MiB that are not there, also where a tensor lay that is gone. A rank
        whose uneven shards FSDP2 had padded grew by 5 to 10 MiB within a minute.
        """
        for mapping in self._mappings:
            with suppress(OSError):
                mapping.madvise(mmap.MADV_NOHUGEPAGE)

    def describe(self) -> str:
        """The pages that were used, or the reason why huge ones were not."""
        if self._refusal is not None:
            return f"small: {self._refusal}"
        total = sum(self._bytes.values()) + self._measured_bytes
        huge = self._bytes["huge"] + (self._measured_bytes if self._pages == "huge" else 0)
        return f"huge for {huge / total:.0%} of {total} bytes" if total else "small: no fresh memory to fill"

    def _choose(self) -> None:
        """Use the others from here on if these cost clearly more; those never tried count as free."""
        self._cost[self._pages] = self._measured_s / self._measured_bytes
        self._bytes[self._pages] += self._measured_bytes
        self._measured_bytes, self._measured_s = 0, 0.0
        other: Literal["huge", "small"] = "small" if self._pages == "huge" else "huge"
        self._has_chosen = True
        if self._may_change and self._cost[other] * _DEARER < self._cost[self._pages]:
            self._pages = other
            for mapping in self._mappings:
                self._advise(mapping)

    def _advise(self, mapping: mmap.mmap) -> None:
        with suppress(OSError):  # advice: the read works without
            mapping.madvise(mmap.MADV_HUGEPAGE if self._pages == "huge" else mmap.MADV_NOHUGEPAGE)

    def _take(self, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        """Whole pages, untouched, which go back to the system with the last reference to them."""
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._end - self._next < whole:
            size = max(_MAPPING_BYTES, -(-whole // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._mappings.append(mapping)
            self._advise(mapping)
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            self._next, self._end = -address % HUGE_PAGE_BYTES, size
        mapping, start = self._mappings[-1], self._next
        self._next += whole
        taken = (ctypes.c_char * nbytes).from_buffer(mapping, start)
        # Not at exit: tensors may live longer than Python's finalizers wait.
        weakref.finalize(taken, mapping.madvise, mmap.MADV_DONTNEED, start, whole).atexit = False
        return taken


def _refusal() -> str | None:
    """Why this system has no huge pages to give on request, or None."""
    try:
        setting = _SETTING.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "this system has no transparent huge pages"
    return None if setting in ("madvise", "always") else f"the kernel's setting is {setting!r}"
