"""Asks the kernel for the bytes that a load reads next, if that is faster than the kernel's own readahead.

The kernel reads ahead within a file, up to the device's setting (128 KiB by default), and does not know the plan. A load knows
its plan: while it copies one range, the kernel fetches the next ones. But the kernel puts bytes that it is asked for into small
pages. Its own readahead may use large ones, which cost less. So the load times both.

Source: ``posix_fadvise(2)``; ``force_page_cache_ra`` and ``page_cache_ra_order`` in mm/readahead.c of Linux.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from ..planning.buckets import Span

__all__ = ["AHEAD_BYTES", "GAP_BYTES", "STEP_BYTES", "LookAhead", "Quicker", "holds", "steps"]

#: At most so many bytes are asked for and not yet read. They lie in the page cache, not in this process.
AHEAD_BYTES = 32 * 1024**2
#: Bytes asked for at a time. The kernel ignores what one call asks for beyond the larger of its own readahead (128 KiB by
#: default) and the device's largest request.
STEP_BYTES = 128 * 1024
#: A shorter gap is asked for as well: a second request would cost as much.
GAP_BYTES = 16 * 1024
#: After a change of the way, the first bytes are not timed, because the other way has fetched them. The next are timed, and then
#: the choice is made anew.
_SETTLE_BYTES, _WINDOW_BYTES = AHEAD_BYTES, 16 * 1024**2

Kind = Literal["plain", "ahead"]


class Quicker:
    """Chooses the way to read bytes from storage that takes less time for each byte. Rank-local.

    Both ways are tried in turn; then the quicker goes on, until it takes longer than the other last took.
    """

    def __init__(self) -> None:
        self.kind: Kind = "ahead"
        #: Seconds for each byte, as last measured; 0 before.
        self._cost: dict[Kind, float] = {"ahead": 0.0, "plain": 0.0}
        self._settled = self._window = 0
        self._seconds = 0.0

    def took(self, nbytes: int, seconds: float) -> None:
        """Note a read in the chosen way."""
        if self._settled < _SETTLE_BYTES:
            self._settled += nbytes
            return
        self._window += nbytes
        self._seconds += seconds
        if self._window >= _WINDOW_BYTES:
            self._cost[self.kind] = self._seconds / self._window
            self._window, self._seconds = 0, 0.0
            if self._cost[self._other] < self._cost[self.kind]:
                self.kind, self._settled = self._other, 0

    def describe(self) -> str:
        """How much longer the other way took, if both were timed."""
        if not all(self._cost.values()):
            return ""
        return f"; {self._other} took {self._cost[self._other] / self._cost[self.kind]:.2f} times as long"

    @property
    def _other(self) -> Kind:
        return "plain" if self.kind == "ahead" else "ahead"


class LookAhead:
    """Asks for ``spans`` in this order, at most ``AHEAD_BYTES`` ahead of their reader. Rank-local.

    ``ask(path, start, stop)`` is called for a piece of a file that will be read soon.
    """

    def __init__(self, spans: Iterable[Span], ask: Callable[[str, int, int], None]) -> None:
        self._steps = steps(spans)
        self._ask = ask
        self._asked: deque[Span] = deque()
        self._nbytes = 0

    def reading(self, path: str, at: int) -> None:
        """The reader calls this before it reads byte ``at`` of a file; it has read all earlier spans."""
        while self._asked and not holds(self._asked[0], path, at):
            self._forget()
        if not self._asked:  # the first call, or what is read was not asked for
            found = next((step for step in self._steps if holds(step, path, at)), None)
            if found is None:
                return
            self._take(found)
        while self._nbytes < AHEAD_BYTES:
            step = next(self._steps, None)
            if step is None:
                return
            self._take(step)

    def _take(self, step: Span) -> None:
        self._ask(*step)
        self._asked.append(step)
        self._nbytes += step[2] - step[1]

    def _forget(self) -> None:
        _, start, stop = self._asked.popleft()
        self._nbytes -= stop - start


def steps(
    spans: Iterable[Span],
    step_bytes: int = STEP_BYTES,
    gap_bytes: int = GAP_BYTES,
    last_bytes: int | None = None,
) -> Iterator[Span]:
    """Spans in the same order, in pieces of ``step_bytes``. Spans with gaps of at most ``gap_bytes`` become one.

    The last piece of a span has fewer than ``last_bytes``: by default fewer than the others.
    """
    last_bytes = last_bytes or step_bytes
    path, start, stop = "", 0, 0
    for file, first, last in spans:
        if file == path and start <= first <= stop + gap_bytes:
            stop = max(stop, last)
        else:
            if stop > start:
                yield path, start, stop
            path, start, stop = file, first, last
        while stop - start >= last_bytes:
            yield path, start, start + step_bytes
            start += step_bytes
    if stop > start:
        yield path, start, stop


def holds(step: Span, path: str, at: int) -> bool:
    """Whether a span has a byte of a file."""
    return step[0] == path and step[1] <= at < step[2]
