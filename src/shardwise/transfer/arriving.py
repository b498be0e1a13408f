"""Files whose bytes come from elsewhere when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["Arrive", "arrival", "arriving"]

#: Called with a path, an offset and memory for the bytes there, before a reader reads them. True: it has filled the memory. False: the
#: file has the bytes.
Arrive = Callable[[str, int, memoryview], bool]

_arrive: ContextVar[Arrive | None] = ContextVar("arrive", default=None)


@contextmanager
def arriving(arrive: Arrive) -> Iterator[None]:
    """Readers of local files that this thread makes in the block ask ``arrive`` before each read; it raises what the read then raises."""
    token = _arrive.set(arrive)
    try:
        yield
    finally:
        _arrive.reset(token)


def arrival() -> Arrive | None:
    """What a new reader must ask before each read."""
    return _arrive.get()
