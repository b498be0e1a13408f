"""One operation: its announcement, a phase of the ledger, bytes for listeners, progress bars."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import fields
from threading import Condition, Lock, get_ident
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar

from ..objects import frozen

if TYPE_CHECKING:
    from rich.progress import Progress as Display
    from rich.progress import ProgressColumn, TaskID


# ----------------------------------------------------------------------------------------------------
# What a listener is told of an operation, and its words.

OperationName = Literal["load", "save", "resume", "restore", "verify", "diff", "convert", "copy", "export"]
State = Literal["running", "done", "failed"]

#: How a line of the log begins, before the path.
_DOING: dict[OperationName, str] = {
    "load": "loading", "save": "saving", "resume": "resuming from", "restore": "restoring", "verify": "verifying",
    "diff": "comparing", "convert": "converting to", "copy": "copying to", "export": "exporting to",
}  # fmt: skip

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@frozen(kw_only=True)
class Progress:
    """How far an operation has come on this rank."""

    operation: OperationName
    """Kind of operation. A resume is one operation, including its loads and the damaged steps that it skips."""
    path: str
    """The path or URL that is read, or that a save, conversion, copy or export writes. For a resume, that of the step."""
    state: Literal["running", "done", "failed"]
    """``done`` or ``failed`` comes exactly once, as the last call."""
    done_bytes: int
    """Bytes that this rank has read, written or compared so far. Never decreases."""
    total_bytes: int
    """Bytes that this rank will process according to the plan; an estimate for a resume or an export until it is done. Never less than
    ``done_bytes``: it grows if more is read or written than planned."""
    seconds: float
    """Time since ``total_bytes`` was known. It doesn't include the planning of a load."""
    number: int
    """Number of the operation in this process. Concurrent operations have different numbers."""
    is_background: bool
    """Whether the caller continues in the meantime, as with an async save or a copy to a mirror."""
    error: str = ""
    """Type and text of the error, if the operation failed."""
    report: Any = None
    """The report of a finished operation, as its call returns it (a :class:`SaveReport`, a :class:`ResumeReport`, …). ``None`` until then."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second since the operation began."""
        return self.done_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds until the end at the current rate; None before the first byte."""
        left, rate = max(0, self.total_bytes - self.done_bytes), self.bytes_per_s
        if left == 0:
            return 0.0
        return left / rate if rate > 0 else None

    def metrics(self) -> dict[str, float]:
        """Numbers for a metrics logger. Empty until the operation has ended.

        Names start with ``shardwise/`` and the operation: ``shardwise/save/seconds``, ``shardwise/save/bytes``, ``shardwise/save/failed``
        (0 or 1), and one for each number or boolean in the report, such as ``shardwise/save/stall_seconds`` or ``shardwise/resume/exact``.
        """
        if self.state == "running":
            return {}
        found: dict[str, Any] = {
            "seconds": self.seconds,
            "bytes": self.done_bytes,
            "failed": self.state == "failed",
        }
        if self.report is not None:
            found |= {one.name: getattr(self.report, one.name) for one in fields(self.report)}
        return {
            f"shardwise/{self.operation}/{name}": float(value)
            for name, value in found.items()
            if isinstance(value, (int, float))
        }


def size(nbytes: int) -> str:
    """Bytes for people: ``512 B``, ``1.50 MiB``, ``13.5 GiB``."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if power == 0:
        return f"{nbytes} B"
    value = nbytes / 1024**power
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {_UNITS[power]}"


# ----------------------------------------------------------------------------------------------------
# Bars on a terminal. rich is imported when the first one is drawn.

_BAR_CHARS = 20
#: Characters of amount, rate and remaining time, each with a space before.
_FIGURES_CHARS = 17 + 12 + 8 + 3
_LEAST_LABEL_CHARS = 12


class Bars:
    """A bar for each operation, as long as it runs. Draws nothing while there is none; the caller's streams stay as they are.

    Where none can be drawn, the log gets lines of operations that take longer than ``lines_after_s``.
    """

    def __init__(self, *, lines_after_s: float = 0.0) -> None:
        self.lines_after_s = lines_after_s
        self._lock = Lock()
        self._display: Display | None = None
        self._tasks: dict[int, TaskID] = {}
        self._is_closed = False

    def can_draw(self) -> bool:
        """Whether stderr is a terminal that can move its cursor."""
        try:
            return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        except (AttributeError, ValueError):  # none, or closed
            return False

    def tell(self, found: Progress) -> None:
        """Move the bar of an operation; take it away when it ends."""
        try:
            with self._lock:
                if not self._is_closed:
                    self._tell(found)
        except Exception:  # a terminal that is gone must not stop the operation
            with suppress(Exception):
                self.close()

    def close(self) -> None:
        """Take all bars away."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _tell(self, found: Progress) -> None:
        if found.state != "running":
            task = self._tasks.pop(found.number, None)
            if not self._tasks:
                self._stop()
            elif task is not None and self._display is not None:
                self._display.remove_task(task)
            return
        if self._display is None:
            self._display = _display()
            self._display.start()
        if found.number not in self._tasks:
            name = found.path.rstrip("/").rpartition("/")[2]
            shown = "".join(c if c.isprintable() else "?" for c in name)  # nothing that could move the cursor
            task = self._display.add_task(f"{found.operation} {shown}", total=found.total_bytes)
            self._tasks[found.number] = task
        self._display.update(
            self._tasks[found.number], completed=found.done_bytes, total=found.total_bytes, refresh=False
        )

    def _stop(self) -> None:
        display, self._display = self._display, None
        self._tasks.clear()
        if display is not None:
            display.stop()


def _display() -> Display:
    from rich.console import Console
    from rich.progress import Progress as Display

    class Shown(Console):
        def show_cursor(self, show: bool = True) -> bool:
            """Leave the cursor visible: a process that is killed could not show it again."""
            return False

    console = Shown(file=sys.stderr, markup=False, highlight=False, emoji=False)
    # Not redirected: stdout may go elsewhere, and a forked process could find rich's lock held.
    plain = {"redirect_stdout": False, "redirect_stderr": False}
    return Display(*_columns(console.width), console=console, transient=True, **plain)  # type: ignore[arg-type]


def _columns(width: int) -> list[ProgressColumn]:
    """What fits into a line: the remaining time and the amount come first, then the rate, a label, the bar."""
    from rich.progress import BarColumn, ProgressColumn, Task, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text

    class Label(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.description)

    class Amount(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(
                f"{size(int(task.completed))}/{size(int(task.total or 0))}", style="progress.download"
            )

    class Rate(ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            rate = task.speed or (task.completed / task.elapsed if task.elapsed else 0)
            return Text(f"{size(int(rate))}/s", style="progress.data.speed")

    def column(chars: int, justify: str = "right") -> Column:
        return Column(no_wrap=True, overflow="ellipsis", max_width=chars, justify=justify)  # type: ignore[arg-type]

    left = width - _FIGURES_CHARS
    found: list[ProgressColumn] = [
        Amount(column(21)),
        Rate(column(12)),
        TimeRemainingColumn(table_column=column(8)),
    ]
    if left < 0:
        return [found[0], found[2]] if width >= 30 else [found[2]]
    if left >= _LEAST_LABEL_CHARS:
        has_bar = left >= _LEAST_LABEL_CHARS + _BAR_CHARS
        label = Label(column(left - 1 - has_bar * (_BAR_CHARS + 1), "left"))
        found = [label, *([BarColumn(_BAR_CHARS)] if has_bar else []), *found]
    return found


# ----------------------------------------------------------------------------------------------------
# Who follows operations: the caller's hook, bars on a terminal, lines of the log.

#: Lines of operations; ``shardwise`` is its parent.
_log = logging.getLogger("shardwise.progress")
_Hook = Callable[[Progress], object]


class Listener(Protocol):
    """Follows one operation, or several."""

    def tell(self, found: Progress) -> None:
        """Take how far an operation is. Called in any thread, of one operation by one thread at a time. Raises no ``Exception``."""

    def close(self) -> None:
        """Take nothing more."""


@contextmanager
def progress(hook: _Hook | None = None) -> Iterator[None]:
    """Show the progress of loads, saves, resumes, verifications, diffs, conversions, copies and exports inside this block.

    Without ``hook``: on rank 0, if stderr is a terminal, draws a bar with bytes, rate and remaining time. The bar disappears when its operation
    ends or fails. Background operations have no bar.

    With ``hook``: calls ``hook(found)`` with a :class:`Progress` instead, on each rank that is inside such a block: when an operation begins,
    about ten times a second, and once when it has ended, with ``state`` ``"done"`` or ``"failed"``. The calls come from the thread that reads or
    writes. The calls for one operation come one after another; concurrent operations call from their own threads. I/O waits for
    the hook. An ``Exception`` in the hook doesn't stop the operation: it is logged once as a warning, and the hook isn't called again in
    this block.

    Each rank counts its own bytes and exchanges nothing with other ranks. The block applies to all threads of the process. On exit, it waits
    for running calls of the hook; none starts later. Blocks can be nested, for bars and a hook at the same time. Any rank can use it.

    Outside such blocks no bar is drawn. Where there is no bar, rank 0 logs two INFO lines per operation to the logger
    ``shardwise.progress``: first the number of bytes to process, then the bytes, seconds and rate.
    """
    if hook is not None and not callable(hook):
        raise TypeError(f"hook must be callable with a Progress, got {hook!r}")
    with following(Bars() if hook is None else _Called(hook)):
        yield


@contextmanager
def following(listener: Listener) -> Iterator[None]:
    """In this block, tell ``listener`` of the operations of this process."""
    global _listening
    with _changing:
        _listening = (*_listening, listener)
    try:
        yield
    finally:
        with _changing:
            _listening = tuple([one for one in _listening if one is not listener])
        listener.close()


#: Of the whole process: background threads begin operations, too. Replaced, never changed.
_listening: tuple[Listener, ...] = ()
_changing = Lock()


def listeners_for(*, is_background: bool) -> list[Listener]:
    """The listeners of an operation that begins now; empty if it need not count. At most one bar, or lines of the log."""
    listening, has_lines = _listening, _log.isEnabledFor(logging.INFO)
    if not listening and not has_lines:
        return []
    found: list[Listener] = [one for one in listening if not isinstance(one, Bars)]
    if rank_and_world_size()[0] == 0:
        bars = [one for one in listening if isinstance(one, Bars)]
        if bars and not is_background and bars[0].can_draw():
            found.append(bars[0])
        elif has_lines:
            found.append(_Lines(bars[0].lines_after_s if bars else 0.0))
    return found


#: Variables that launchers set: torchrun and Accelerate, SLURM, Open MPI.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


def rank_and_world_size() -> tuple[int, int]:
    """Of the default process group, else as the launcher says, else (0, 1); asks without importing torch."""
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for rank, world_size in _LAUNCHERS:
        try:
            return int(os.environ[rank]), int(os.environ.get(world_size, "1"))
        except (KeyError, ValueError):
            continue
    return 0, 1


class _Called:
    """A caller's hook."""

    def __init__(self, hook: _Hook) -> None:
        self._hook = hook
        self._is_closed = False
        self._calling: list[int] = []
        """Threads that are in the hook."""
        self._changed = Condition()

    def tell(self, found: Progress) -> None:
        own = get_ident()
        with self._changed:
            if self._is_closed:
                return
            self._calling.append(own)
        try:
            self._hook(found)
        except Exception:
            self._is_closed = True
            _log.warning(
                "the progress hook failed, and is not called again; the %s continues",
                found.operation,
                exc_info=True,
            )
        finally:
            with self._changed:
                self._calling.remove(own)
                self._changed.notify_all()

    def close(self) -> None:
        """Wait until other threads have left the hook, so that the caller may close what the hook uses."""
        own = get_ident()
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: all(thread == own for thread in self._calling))


class _Lines:
    """Two lines of the log for one operation, if it takes longer than ``after_s``."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._has_begun = False

    def tell(self, found: Progress) -> None:
        if found.seconds < self._after_s:
            return
        what = f"{_DOING[found.operation]} {found.path}"
        if not self._has_begun:
            self._has_begun = True
            _log.info("%s: %s", what, size(found.total_bytes))
        if found.state == "running":
            return
        seconds, rate = f"{found.seconds:.1f} s", f"{size(int(found.bytes_per_s))}/s"
        if found.state == "done":
            _log.info("%s: done, %s in %s, %s", what, size(found.done_bytes), seconds, rate)
        else:
            amount = f"{size(found.done_bytes)} of {size(found.total_bytes)}"
            _log.info("%s: failed after %s in %s, %s: %s", what, amount, seconds, rate, found.error)

    def close(self) -> None:
        """Nothing to do."""


# ----------------------------------------------------------------------------------------------------
# The recorder of this process: its ledger, if there is one, which is told of operations, their phases and their reports.
#
# Without one an announcement costs less than a microsecond. A forked child has none: its parent's file is not its own.


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


# ----------------------------------------------------------------------------------------------------
# One operation: a phase of the ledger, and bytes that are counted for whoever follows its progress.
#
# :func:`operation` announces it to both. What reads or writes counts for :func:`this_operation`. An operation within another one of its
# thread is a phase within that one's, and counts for it: a resume with its loads is one. Without listeners there is nothing to count:
# callers get their own functions back.

#: Listeners hear of an operation at most so often.
PERIOD_S = 0.1
_ERROR_CHARS = 300
_numbers = itertools.count()

Tick = Callable[[int], None]


class Operation:
    """An operation. Without listeners its methods do nothing."""

    def __init__(
        self,
        name: OperationName,
        path: str = "",
        listeners: Sequence[Listener] = (),
        *,
        is_background: bool = False,
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
        """Its path, if it has none yet: that of a resume is the step's, not that of the model in it."""
        if self._listeners:
            self._path = self._path or path

    def begin_again(self, path: str) -> None:
        """At another path, because the one before is damaged. What is done stays done; what was expected there is forgotten."""
        if self._listeners:
            with self._lock:
                self._path, self._expected, self._guessed = path, self._done, 0

    def expect(self, nbytes: Callable[[], int]) -> None:
        """So many more bytes are to do: of a plan, exactly. The operation begins for listeners with the first call."""
        if self._listeners:
            self._expected += nbytes()
            self._begin()

    def guess(self, nbytes: Callable[[], int]) -> None:
        """So many bytes are to do in all, about; until :meth:`expect` has said more, or the end is there."""
        if self._listeners:
            self._guessed = self._expected + nbytes()
            self._begin()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun, self._started = True, time.monotonic()
            self._tell()

    def add(self, nbytes: int) -> None:
        """So many bytes are done. Any thread may call it."""
        if nbytes and self._listeners:
            with self._lock:
                self._done += nbytes
            if self._has_begun and time.monotonic() >= self._due:
                self._tell()

    def counting(self, tick: Tick) -> Tick:
        """``tick``, which also counts its bytes here."""

        def both(nbytes: int) -> None:
            tick(nbytes)
            self.add(nbytes)

        return both if self._listeners else tick

    def returns(self, report: object) -> None:
        """Give listeners this report at the end. The last one counts: a resume returns its own after those of its loads."""
        if self._listeners:
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


_SILENT = Operation("load")
_within: ContextVar[Operation | None] = ContextVar("operation", default=None)
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
            heard = Operation(name, path, listeners, is_background=is_background)
            with _followed(heard):
                yield heard
        else:
            yield _SILENT


@contextmanager
def _followed(heard: Operation) -> Iterator[None]:
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


# ----------------------------------------------------------------------------------------------------
# Functions whose every call is an operation.

P = ParamSpec("P")
T = TypeVar("T")


def announced(name: OperationName, *arguments: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make each call of a function an :func:`operation`. The report that it returns goes to the recorder, too.

    ``arguments``: those of the function's arguments that the recorder is told. Listeners get the path from the function, by
    :func:`this_operation`, when it knows it.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            recorder = current()
            if recorder is None:
                with operation(name) as heard:
                    return _heard(heard, function(*args, **kwargs))
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # the function itself says what is wrong with its arguments
                given = {}
            with operation(name, **{n: given[n] for n in arguments if n in given}) as heard:
                result = _heard(heard, function(*args, **kwargs))
            for report in _reports_in(result):
                recorder.note(name, report.to_json())
            return result

        return call

    return decorate


def _heard(heard: Operation, result: T) -> T:
    for report in _reports_in(result):
        heard.returns(report)
    return result


def _reports_in(result: object) -> Iterable[Any]:
    for one in result if isinstance(result, tuple) else (result,):
        if hasattr(one, "to_json") and type(one).__name__.endswith("Report"):
            yield one
