"""Pauses Python's cyclic garbage collector while many records are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic collector during the block (or the decorated function), if it was on.

    Planning makes about a million records and no cycles. The collector would scan the whole process several times
    (a second each beside a model of 20,000 parameters) and find nothing. Reference counting goes on. Blocks may nest
    and run in several threads: the last one to end turns the collector on again.
    """
    was_on = gc.isenabled()
    if was_on:
        gc.collect(1)  # young garbage, a model that was dropped just before: it would become old, and stay
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # else they are the program's own, and not ours to thaw
                # Moves all objects to the oldest generation. Otherwise the next allocation would scan the new ones.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
