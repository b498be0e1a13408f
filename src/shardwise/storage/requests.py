"""Counts what this process asks stores for. Each store notes its own requests here; nothing else counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from threading import Lock
from typing import ParamSpec, TypeVar

from ..objects import frozen

__all__ = ["LISTED_AT_ONCE", "Requests", "counted_here", "counting", "note"]

P = ParamSpec("P")
T = TypeVar("T")

#: Names that one reply to a listing holds (S3).
LISTED_AT_ONCE = 1000

_lock = Lock()


@dataclass(slots=True, kw_only=True)
class Requests:
    """Requests to stores, by kind, and the bytes of objects in them."""

    lists: int = 0
    heads: int = 0
    gets: int = 0
    puts: int = 0
    """Objects written by one request."""
    uploads: int = 0
    """Objects written in parts: each costs one request that begins it, and one that completes it."""
    parts: int = 0
    deletes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def total(self) -> int:
        """All requests."""
        return self.lists + self.heads + self.gets + self.puts + 2 * self.uploads + self.parts + self.deletes

    def add(self, other: Requests) -> None:
        """Count ``other`` too."""
        for one in fields(other):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@frozen
class _Counter:
    found: Requests
    around: _Counter | None


_counter: ContextVar[_Counter | None] = ContextVar("requests", default=None)


@contextmanager
def counting() -> Iterator[Requests]:
    """Count the requests that this thread makes in the block, and those of :func:`counted_here`. May be nested.

    A request that the store's client makes again, because no reply came or a busy one, counts once.
    """
    found = Requests()
    token = _counter.set(_Counter(found, _counter.get()))
    try:
        yield found
    finally:
        _counter.reset(token)


def counted_here(call: Callable[P, T]) -> Callable[P, T]:
    """``call`` for another thread: its requests count where this thread's do."""
    counter = _counter.get()

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        token = _counter.set(counter)
        try:
            return call(*args, **kwargs)
        finally:
            _counter.reset(token)

    return run


def note(asked: Requests) -> None:
    """Count requests that a store makes now."""
    counter = _counter.get()
    with _lock:
        while counter is not None:
            counter.found.add(asked)
            counter = counter.around
