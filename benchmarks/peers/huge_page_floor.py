"""The huge-page floor: the plain floor's reads, in requests of 8 MiB, into memory that the kernel may back by huge pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch

from benchmarks.loading.cases import Case, local_ranges
from benchmarks.peers import plain_floor
from benchmarks.peers.plain_floor import open_files, read_spans

NAME = "huge-page floor"
WHOLE = False

HUGE_PAGE = 2 * 2**20
REQUEST = 8 * 2**20


def supports(case: Case) -> str | None:
    return plain_floor.supports(case)


def prepare(case: Case) -> Callable[[], dict[str, torch.Tensor]]:
    ranges = local_ranges(case)
    total = sum(span.nbytes for spans in ranges.values() for span in spans)

    def load() -> dict[str, torch.Tensor]:
        files = open_files(ranges.values())
        memory, start, found = huge_pages(total), 0, {}
        for name, spans in ranges.items():
            stop = start + sum(span.nbytes for span in spans)
            read_spans(files, spans, memory[start:stop], REQUEST)
            found[name] = torch.frombuffer(memory[start:stop], dtype=torch.uint8) if stop > start else _EMPTY
            start = stop
        return found

    return load


_EMPTY = torch.empty(0, dtype=torch.uint8)


def huge_pages(nbytes: int) -> memoryview:
    """Fresh private memory that begins at a multiple of 2 MiB, with huge pages advised."""
    mapped = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % HUGE_PAGE
    return memoryview(mapped)[skip : skip + nbytes]
