"""The collector waits while plans are made, and goes on as before; the program's objects are left what they are."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from shardwise.gc_paused import gc_paused


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that were collected."""
    found: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def make(count: int) -> list[list[int]]:
    return [[k] for k in range(count)]


def test_none_in_the_block(collections: list[int]) -> None:
    with gc_paused():
        assert collections == [1], "what was dropped just before"
        collections.clear()
        assert not gc.isenabled()
        with gc_paused():
            kept = make(50_000)
        assert not gc.isenabled()
        kept += make(50_000)
        assert collections == []
    assert gc.isenabled()
    assert not any(found is kept for found in gc.get_objects(generation=2)), "no older than it is"
    assert len(kept) == 100_000
    make(50_000)
    assert collections, "it goes on afterwards"


def test_what_the_program_froze_stays_frozen() -> None:
    kept = make(1)
    gc.freeze()
    try:
        with gc_paused():
            make(1000)
        assert not any(found is kept for found in gc.get_objects()), "which leaves out what is frozen"
    finally:
        gc.unfreeze()
    assert any(found is kept for found in gc.get_objects())


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
