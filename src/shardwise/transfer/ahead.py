"""Asks the kernel for the bytes that a load reads next, so that storage works while the load copies.

The kernel reads ahead by itself only within a file and within limits of its own: it does not know a plan. A load does:
while it copies one range, the next ranges are on their way into the page cache.

Source: ``posix_fadvise(2)``; ``force_page_cache_ra`` in mm/readahead.c of Linux.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from ..planning.buckets import Span

__all__ = ["AHEAD_BYTES", "GAP_BYTES", "STEP_BYTES", "LookAhead", "steps"]

#: Bytes that are asked for and not yet read, at most: of the page cache, not of this process.
AHEAD_BYTES = 32 * 1024**2
#: Bytes asked for at a time. The kernel ignores what one call asks for beyond the larger of its own readahead (128 KiB by
#: default) and the device's largest request.
STEP_BYTES = 128 * 1024
#: A gap that is read as well: a request of its own for the next range costs as much.
GAP_BYTES = 16 * 1024


class LookAhead:
    """Stays at most ``AHEAD_BYTES`` ahead of a reader that reads ``spans`` in this order. Rank-local.

    ``ask(path, start, stop)`` is called for a piece of a file that will be read soon.
    """

    def __init__(self, spans: Iterable[Span], ask: Callable[[str, int, int], None]) -> None:
        self._steps = steps(spans)
        self._ask = ask
        self._asked: deque[Span] = deque()
        self._nbytes = 0

    def reading(self, path: str, at: int) -> None:
        """Call before the byte ``at`` of a file is read. What lies before it in the order of the spans was read."""
        while self._asked and not _holds(self._asked[0], path, at):
            self._forget()
        if not self._asked:  # the first call, or what is read was not asked for
            found = next((step for step in self._steps if _holds(step, path, at)), None)
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


def steps(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans in the same order, in pieces of at most ``STEP_BYTES``. Spans with short gaps between them become one."""
    path, start, stop = "", 0, 0
    for file, first, last in spans:
        if file == path and start <= first <= stop + GAP_BYTES:
            stop = max(stop, last)
        else:
            if stop > start:
                yield path, start, stop
            path, start, stop = file, first, last
        while stop - start >= STEP_BYTES:
            yield path, start, start + STEP_BYTES
            start += STEP_BYTES
    if stop > start:
        yield path, start, stop


def _holds(step: Span, path: str, at: int) -> bool:
    return step[0] == path and step[1] <= at < step[2]
