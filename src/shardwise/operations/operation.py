"""One operation: a phase of the ledger, and bytes that are counted for whoever follows its progress.

:func:`operation` announces it to both. What reads or writes counts for :func:`this_operation`. An operation within another one of its
thread is a phase within that one's, and counts for it: a resume with its loads is one. Without listeners there is nothing to count:
callers get their own functions back.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Lock

from .listeners import Listener, listeners_for
from .recorder import phase
from .records import OperationName, Progress, State

__all__ = ["PERIOD_S", "Operation", "in_background", "operation", "this_operation"]

#: Listeners hear of an operation at most so often.
PERIOD_S = 0.1
_ERROR_CHARS = 300
_numbers = itertools.count(1)

Tick = Callable[[int], None]


class Operation:
    """An operation. This one has no listener: its methods do nothing."""

    def lies_at(self, path: str) -> None:
        """Its path, if it has none yet: that of a resume is the step's, not that of the model in it."""

    def begin_again(self, path: str) -> None:
        """At another path, because the one before is damaged. What is done stays done; what was expected there is forgotten."""

    def expect(self, nbytes: Callable[[], int]) -> None:
        """So many more bytes are to do: of a plan, exactly. The operation begins for listeners with the first call."""

    def guess(self, nbytes: Callable[[], int]) -> None:
        """So many bytes are to do in all, about; until :meth:`expect` has said more, or the end is there."""

    def add(self, nbytes: int) -> None:
        """So many bytes are done. Any thread may call it."""

    def counting(self, tick: Tick) -> Tick:
        """``tick``, which also counts its bytes here."""
        return tick

    def returns(self, report: object) -> None:
        """Give listeners this report at the end. The last one counts: a resume returns its own after those of its loads."""


class _Heard(Operation):
    """An operation with listeners."""

    def __init__(
        self, name: OperationName, path: str, listeners: Sequence[Listener], *, is_background: bool
    ) -> None:
        self._name, self._path, self._is_background = name, path, is_background
        self._listeners, self._number = listeners, next(_numbers)
        self._started = self._due = 0.0
        self._done = self._expected = self._guessed = 0
        self._has_begun = self._has_ended = False
        self._lock = Lock()
        self._telling = Lock()
        self._report: object = None

    def lies_at(self, path: str) -> None:
        self._path = self._path or path

    def begin_again(self, path: str) -> None:
        with self._lock:
            self._path, self._expected, self._guessed = path, self._done, 0

    def expect(self, nbytes: Callable[[], int]) -> None:
        self._expected += nbytes()
        self._begin()

    def guess(self, nbytes: Callable[[], int]) -> None:
        self._guessed = self._expected + nbytes()
        self._begin()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun, self._started = True, time.monotonic()
            self._tell()

    def add(self, nbytes: int) -> None:
        if nbytes:
            with self._lock:
                self._done += nbytes
            if self._has_begun and time.monotonic() >= self._due:
                self._tell()

    def counting(self, tick: Tick) -> Tick:
        def both(nbytes: int) -> None:
            tick(nbytes)
            self.add(nbytes)

        return both

    def returns(self, report: object) -> None:
        self._report = report

    def _tell(self) -> None:
        """Unless another thread does: it must not wait for the listeners."""
        if self._telling.acquire(blocking=False):
            try:
                if not self._has_ended:
                    self._tell_all("running")
            finally:
                self._telling.release()

    def end(self, state: State, error: BaseException | None = None) -> None:
        """Tell the last."""
        if self._has_begun:
            with self._telling:
                self._has_ended = True
                self._tell_all(state, "" if error is None else _in_words(error))

    def _tell_all(self, state: State, error: str = "") -> None:
        self._due = time.monotonic() + PERIOD_S
        with self._lock:
            done = self._done
        total = self._expected if state == "done" else max(self._expected, self._guessed)
        found = Progress(
            operation=self._name,
            path=self._path,
            state=state,
            done_bytes=done,
            total_bytes=max(total, done),
            seconds=time.monotonic() - self._started,
            number=self._number,
            is_background=self._is_background,
            error=error,
            report=self._report if state == "done" else None,
        )
        within = _within.set(None)  # what a hook itself reads is no part of this
        try:
            for listener in self._listeners:
                listener.tell(found)
        finally:
            _within.reset(within)


def _in_words(error: BaseException) -> str:
    text = ""
    with suppress(Exception):  # of a caller's class
        text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_ERROR_CHARS]


_SILENT = Operation()
_within: ContextVar[_Heard | None] = ContextVar("operation", default=None)
_in_background: ContextVar[bool] = ContextVar("operation_in_background", default=False)


@contextmanager
def operation(name: OperationName, path: str = "", /, **facts: object) -> Iterator[Operation]:
    """An operation, until the block is left; within another one of this thread, part of that one. Rank-local; costs microseconds.

    Listeners hear of it from its first bytes to do; the recorder at once, with ``facts``, a few short values.
    """
    is_background, outer = _in_background.get(), _within.get()
    with phase(f"background {name}" if is_background else name, **facts):
        if outer is not None:
            yield outer
        elif listeners := listeners_for(is_background=is_background):
            heard = _Heard(name, path, listeners, is_background=is_background)
            with _followed(heard):
                yield heard
        else:
            yield _SILENT


@contextmanager
def _followed(heard: _Heard) -> Iterator[None]:
    token = _within.set(heard)
    try:
        yield
    except BaseException as error:
        _within.reset(token)
        heard.end("failed", error)
        raise
    _within.reset(token)
    heard.end("done")


def this_operation(path: str = "") -> Operation:
    """The operation that this thread is in, to count for it. ``path``: where it reads or writes, unless it has been told."""
    found = _within.get() or _SILENT
    found.lies_at(path)
    return found


@contextmanager
def in_background() -> Iterator[None]:
    """The caller goes on while this thread's operations in the block run."""
    token = _in_background.set(True)
    try:
        yield
    finally:
        _in_background.reset(token)
