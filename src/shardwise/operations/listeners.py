"""Who follows operations: the caller's hook, bars on a terminal, lines of the log."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock, get_ident
from typing import Protocol

from .bars import Bars
from .records import Progress, size

__all__ = ["Listener", "following", "listeners_for", "progress"]

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
    ``shardwise.progress``: first the bytes to process, then bytes, seconds and rate.
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
    if _own_rank() == 0:
        bars = [one for one in listening if isinstance(one, Bars)]
        if bars and not is_background and bars[0].can_draw():
            found.append(bars[0])
        elif has_lines:
            found.append(_Lines(bars[0].lines_after_s if bars else 0.0))
    return found


def _own_rank() -> int:
    """In the process group, else as a launcher says; asks without importing torch."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    told = os.environ.get("RANK", "0")
    return int(told) if told.isdecimal() else 0


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
        what = f"{found.operation} of {found.path}"
        if not self._has_begun:
            self._has_begun = True
            _log.info("%s: starting, %s", what, size(found.total_bytes))
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
