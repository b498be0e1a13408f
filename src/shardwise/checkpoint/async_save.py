"""Saving behind the training: the state is copied, the training goes on, a thread hashes, writes and publishes.

The thread agrees with the other ranks' threads through the store, on a channel of its own; it starts no
collective. It runs at a lower priority than the training, where the system lets threads have one of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from ..errors import CheckpointError, StateError
from ..ranks.ranks import Ranks
from .collect import Collected
from .save import SaveReport, live_piece, pieces_of, publish_collected
from .stage import StagingBuffer, detached_documents, room_for

__all__ = ["SaveBehind", "reserve_for"]

_log = logging.getLogger(__name__)
_LOWER_PRIORITY = 13


def reserve_for(collected: Collected, buffer: StagingBuffer, ranks: Ranks, most_bytes: int | None) -> None:
    """Size the buffer for a state: all of it, or as much as the budget lets be. Collective.

    Raises :class:`StateError` on every rank if a rank's largest piece is larger than the budget.
    """
    with ranks.agree("reserve staging"):
        sizes = [(room_for(live_piece(p)), p.live.stored.name) for p in pieces_of(collected, ranks.rank)]
        needed = sum(nbytes for nbytes, _ in sizes)
        if most_bytes is not None and needed > most_bytes:
            largest, name = max(sizes)
            if largest > most_bytes:
                raise StateError(
                    f"{name} takes {largest} bytes on rank {ranks.rank}, the staging budget is {most_bytes}; give "
                    f"max_staging_bytes={largest} or more"
                )
            needed = most_bytes
        buffer.reserve(needed)


class SaveBehind:
    """One save that goes on in a thread. Started by :meth:`copy`, ended by :meth:`wait`."""

    def __init__(
        self,
        collected: Collected,
        final: str,
        buffer: StagingBuffer,
        ranks: Ranks,
        after: Callable[[], None],
    ) -> None:
        self.step = collected.step
        self._pieces = [live_piece(p) for p in pieces_of(collected, ranks.rank)]
        try:
            self._collected = detached_documents(collected)
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"can't allocate host memory for copies of the documents ({error})"
            ) from error
        self._final = final
        self._buffer = buffer
        self._ranks = ranks
        self._after = after
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._started = time.perf_counter()
        # Not a daemon: a process that ends waits for it, so that an unfinished save is finished, or given up
        # when the others are gone for ``timeout_s``.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shardwise-save-{self.step}")

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._thread.ident is not None and not self._ended.is_set()

    def copy(self) -> SaveReport:
        """Copy the state and start the thread; returns when training may change it.

        A failure ends the save on every rank alike: :meth:`wait` raises it.
        """
        in_waves = sum(map(room_for, self._pieces)) > self._buffer.nbytes
        if in_waves:
            self._start()  # it makes the room; else it would only take time from the copying
        nbytes = 0
        try:
            for piece in self._pieces:
                self._buffer.put(piece)
                nbytes += piece.numel() * piece.element_size()
        except BaseException as error:
            self._buffer.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._pieces = []
            if not in_waves:
                self._start()
        return SaveReport(
            path=self._final,
            step=self.step,
            bytes_written=nbytes,
            seconds=time.perf_counter() - self._started,
            not_stored=self._collected.snapshot.not_stored,
            gradients=self._collected.snapshot.gradients,
            staging_bytes=self._buffer.nbytes,
            is_published=False,
        )

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # the system is out of threads: the save is made here and now
            if self._pieces:  # there is no room for them
                self._buffer.fail(error)
            self._run()

    def wait(self) -> SaveReport:
        """Block until it is published. Raises what went wrong, on every rank alike."""
        self._ended.wait()  # not join(): when Ctrl-C interrupts that, Python 3.11 takes the thread for ended
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def _run(self) -> None:
        try:
            if threading.current_thread() is self._thread:
                _lower_priority()
            written = publish_collected(
                self._collected, self._final, self._ranks, lambda _: self._buffer.take()
            )
            self._report = SaveReport(
                path=self._final,
                step=self.step,
                bytes_written=written,
                seconds=time.perf_counter() - self._started,
                not_stored=self._collected.snapshot.not_stored,
                gradients=self._collected.snapshot.gradients,
                staging_bytes=self._buffer.nbytes,
            )
            self._after()
        except BaseException as error:
            self._error = error
            self._buffer.fail(error)
            # The next call raises it; but there may be none.
            _log.error("saving step %d behind the training failed: %s", self.step, error)
        finally:
            self._ended.set()


def _lower_priority() -> None:
    """Of this thread only. Linux has priorities per thread; elsewhere it would be the process's."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWER_PRIORITY)
