"""The recorder of this process: its ledger, if there is one, which is told of operations, their phases and their reports.

Without one an announcement costs less than a microsecond. A forked child has none: its parent's file is not its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

__all__ = ["Recorder", "current", "note", "phase", "replace_current"]


class Recorder(Protocol):
    """A ledger."""

    pid: int
    """The process that it belongs to."""

    def phase(self, name: str, **facts: object) -> AbstractContextManager[object]:
        """A phase around a block."""

    def note(self, name: str, report: Mapping[str, Any]) -> None:
        """Take an outcome."""


_current: Recorder | None = None
_NOTHING = nullcontext()


def current() -> Recorder | None:
    """The recorder of this process that came last and is not gone."""
    return _current if _current is not None and _current.pid == os.getpid() else None


def replace_current(recorder: Recorder | None) -> Recorder | None:
    """Make ``recorder`` the current one. Returns the one before it, which :func:`current` may not give: a parent's."""
    global _current
    before, _current = _current, recorder
    return before


def phase(name: str, **facts: object) -> AbstractContextManager[object]:
    """A phase of an operation, or one of its own, around a block; nothing without a recorder."""
    recorder = current()
    return _NOTHING if recorder is None else recorder.phase(name, **facts)


def note(name: str, report: Mapping[str, Any]) -> None:
    """Hand an outcome to the recorder, if there is one."""
    recorder = current()
    if recorder is not None:
        recorder.note(name, report)
