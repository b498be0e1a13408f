"""Pauses Python's cyclic garbage collector while many records are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic collector during the block (or the decorated function), if it was on.

    Planning makes about a million records and no cycles. The collector then looks several times through everything
    that the process holds, and finds nothing: it doubles the time. Reference counting goes on. Blocks may be nested, and
    run in several threads: the last that ends leaves the collector on.
    """
    was_on = gc.isenabled()
    if was_on:
        gc.collect(
            1
        )  # young garbage, a model that was dropped just before: it would keep its memory meanwhile
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
