"""How load, save, resume and export announce their phases to the ledger of this process, if there is one.

Without a ledger an announcement costs less than a microsecond. A forked child has none: its parent's file is not its own.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from .ledger import Ledger

__all__ = ["announced", "current", "note", "phase", "replace_current"]

P = ParamSpec("P")
T = TypeVar("T")

_current: Ledger | None = None
_NOTHING = nullcontext()


def current() -> Ledger | None:
    """The ledger of this process that was opened last and is not closed."""
    return _current if _current is not None and _current.pid == os.getpid() else None


def replace_current(ledger: Ledger | None) -> Ledger | None:
    """Make ``ledger`` the current one. Returns the one before it, which :func:`current` may not give: a parent's."""
    global _current
    before, _current = _current, ledger
    return before


def phase(name: str, **facts: object) -> AbstractContextManager[object]:
    """A phase of this process's ledger, around a block; nothing without a ledger."""
    ledger = current()
    return _NOTHING if ledger is None else ledger.phase(name, **facts)


def note(name: str, report: Mapping[str, Any]) -> None:
    """Write an outcome into this process's ledger, if there is one."""
    ledger = current()
    if ledger is not None:
        ledger.note(name, report)


def announced(name: str, *arguments: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make each call of a function a phase. The report that it returns goes into the ledger, too.

    ``arguments``: those of the function's arguments that the phase's record holds.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            ledger = current()
            if ledger is None:
                return function(*args, **kwargs)
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # the function itself says what is wrong with its arguments
                given = {}
            with ledger.phase(name, **{n: given[n] for n in arguments if n in given}):
                result = function(*args, **kwargs)
            for report in _reports_in(result):
                ledger.note(name, report)
            return result

        return call

    return decorate


def _reports_in(result: object) -> Iterable[Mapping[str, Any]]:
    for one in result if isinstance(result, tuple) else (result,):
        to_json = getattr(one, "to_json", None)
        if to_json is not None and type(one).__name__.endswith("Report"):
            yield to_json()
