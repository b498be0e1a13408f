"""Pauses Python's cyclic garbage collector while many records are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic collector during the block (or the decorated function), if it was on.

    Loads, saves and restores make many records and no cycles. The collector would look several times through everything that the
    process holds, a quarter of a second each time once transformers is imported, and find nothing. Reference counting continues.
    Blocks may be nested, and run in several threads: the last that ends leaves the collector on.
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
