"""A rank whose writes the kernel refuses."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import torch.distributed as dist

__all__ = ["small_files"]


@contextlib.contextmanager
def small_files(victim: int, *, when: bool = True) -> Iterator[None]:
    """On one rank no file grows beyond 1,000 bytes (RLIMIT_FSIZE): the kernel refuses its writes with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if when and dist.get_rank() == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
