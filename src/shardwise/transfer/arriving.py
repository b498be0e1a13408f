"""Files whose bytes arrive when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["Arrive", "arrival", "arriving"]

#: Called with the path, start and stop of the bytes that a reader is about to read.
Arrive = Callable[[str, int, int], None]

_arrive: ContextVar[Arrive | None] = ContextVar("arrive", default=None)


@contextmanager
def arriving(arrive: Arrive) -> Iterator[None]:
    """Readers of local files that this thread makes in the block call ``arrive`` before each read; it raises what the read then raises."""
    token = _arrive.set(arrive)
    try:
        yield
    finally:
        _arrive.reset(token)


def arrival() -> Arrive | None:
    """What a new reader must call before each read."""
    return _arrive.get()
