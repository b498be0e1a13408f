"""Payloads in a process group's store, in parts where they are too large for one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Parts", "Store"]

_PART_BYTES = 4 * 1024**2  # TCPStore refuses values above 8 MiB and drops the connection


class Store(Protocol):
    """The methods of torch.distributed.Store that shardwise uses. Its stub says str where it takes and gives bytes."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class Parts:
    """Puts large payloads into a store and takes them out; calls ``tick`` after each part."""

    def __init__(self, store: Store, tick: Callable[[], object]) -> None:
        self._store = store
        self._tick = tick

    def put(self, key: str, payload: bytes, inline_bytes: int) -> int:
        """Store a payload in parts if it has more than ``inline_bytes``; returns the number of parts."""
        if len(payload) <= inline_bytes:
            return 0
        view = memoryview(payload)
        starts = range(0, len(payload), _PART_BYTES)
        for i, start in enumerate(starts):
            self._store.set(f"{key}/{i}", bytes(view[start : start + _PART_BYTES]))
            self._tick()
        return len(starts)

    def get(self, key: str, count: int) -> bytes:
        """The payload of so many parts, which are there: their rank deletes them after all that read them have left the round."""
        parts = []
        for i in range(count):
            parts.append(self._store.get(f"{key}/{i}"))
            self._tick()
        return b"".join(parts)

    def delete(self, key: str, count: int) -> None:
        """Delete the parts of a payload."""
        for i in range(count):
            self._store.delete_key(f"{key}/{i}")
