"""Bars on a terminal. rich is imported when the first one is drawn."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

from .records import Progress, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Display
    from rich.progress import ProgressColumn, TaskID

__all__ = ["Bars"]

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
            label = f"{found.operation} {_name_of(found.path)}"
            self._tasks[found.number] = self._display.add_task(label, total=found.total_bytes)
        self._display.update(
            self._tasks[found.number], completed=found.done_bytes, total=found.total_bytes, refresh=False
        )

    def _stop(self) -> None:
        display, self._display = self._display, None
        self._tasks.clear()
        if display is not None:
            display.stop()


def _name_of(path: str) -> str:
    """The last name of a path, without characters that could move the cursor."""
    name = path.rstrip("/").rpartition("/")[2]
    return "".join(c if c.isprintable() else "?" for c in name)


def _console() -> Console:
    from rich.console import Console

    class Shown(Console):
        def show_cursor(self, show: bool = True) -> bool:
            """Leave the cursor visible: a process that is killed could not show it again."""
            return False

    return Shown(file=sys.stderr, markup=False, highlight=False, emoji=False)


def _display() -> Display:
    from rich.progress import Progress as Display

    console = _console()
    # Not redirected: stdout may go elsewhere, and a forked process could find rich's lock held.
    return Display(
        *_columns(console.width),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


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
