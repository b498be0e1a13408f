"""Async save: copies the state; then training goes on while a background thread hashes, writes and publishes.

The thread agrees with the other ranks' threads through the store, on its own channel, and starts no collective. It
runs at a lower priority than the training if the system has priorities per thread.
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
from ..operations.operation import in_background, operation
from ..operations.recorder import note
from ..ranks.ranks import Ranks
from ..storage import counting
from ..store.target import Target
from .collect import Collected
from .pieces import StagedContents, StagedPieces, live_piece, pieces_of
from .save import SaveReport, publish_collected
from .stage import StagingBuffer, detached_documents, room_for

__all__ = ["AsyncSave", "reserve_for"]

_log = logging.getLogger(__name__)
_LOWER_PRIORITY = 13


def reserve_for(collected: Collected, buffer: StagingBuffer, ranks: Ranks, most_bytes: int | None) -> None:
    """Size the buffer for the whole state, or for as much of it as the budget allows. Collective.

    Raises :class:`StateError` on every rank if a rank's largest piece is larger than the budget.
    """
    with ranks.agree("reserve staging"):
        pieces = list(pieces_of(collected))
        staging = StagedPieces(pieces)
        needed = staging.nbytes
        if most_bytes is not None and needed > most_bytes:
            largest, name = max((room_for(live_piece(p)), p.live.stored.name) for p in pieces if p.is_copied)
            if largest > most_bytes:
                raise StateError(
                    f"{name} takes {largest} bytes on rank {ranks.rank}, the staging budget is {most_bytes}; give "
                    f"max_staging_bytes={largest} or more"
                )
        buffer.reserve(needed, most_bytes, pinned=staging.is_pinned)


class AsyncSave:
    """One save in a background thread. :meth:`copy` starts it, :meth:`wait` ends it."""

    def __init__(
        self,
        collected: Collected,
        target: Target,
        buffer: StagingBuffer,
        ranks: Ranks,
        after: Callable[[], None],
        called: float,
    ) -> None:
        self.step = collected.step
        pieces = list(pieces_of(collected))
        self._nbytes = sum(piece.nbytes for piece in pieces if piece.is_copied)
        self._staging = StagedPieces(pieces)
        try:
            self._collected = detached_documents(collected)
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"can't allocate host memory for copies of the documents ({error})"
            ) from error
        self._target = target
        self._buffer = buffer
        self._ranks = ranks
        self._after = after
        self._called = called
        self._stall_seconds = 0.0
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._started = time.perf_counter()
        # Not a daemon: an ending process waits until the save is finished, or given up because other ranks made no
        # progress for ``timeout_s``.
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run_beside, name=f"shardwise-save-{self.step}")

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread.ident is not None and not self._ended.is_set()

    def copy(self) -> SaveReport:
        """Copy the state and start the thread; returns when training may change the state.

        Copies from a device are enqueued then, and its current stream goes on after them.

        A failure ends the save on every rank alike: :meth:`wait` raises it.
        """
        self._in_waves = self._staging.nbytes > self._buffer.nbytes
        if self._in_waves:
            self._start()  # now, because the thread must free room; otherwise after copying, not to slow it down
        try:
            for _ in self._buffer.copying(self._staging.tensors(self._buffer)):
                if not self._buffer.wait_for_room():
                    break
        except BaseException as error:
            self._buffer.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._stall_seconds = time.perf_counter() - self._called
            if not self._in_waves:
                self._start()
        return self._report_of(self._nbytes, 0, is_published=False)

    def _report_of(self, bytes_written: int, requests: int, *, is_published: bool) -> SaveReport:
        return SaveReport.of(
            self._collected,
            path=self._target.final,
            bytes_written=bytes_written,
            started=self._started,
            stall_seconds=self._stall_seconds,
            staging_bytes=self._buffer.nbytes,
            is_published=is_published,
            requests=requests,
        )

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # the system is out of threads: save in this thread
            if self._in_waves:  # the buffer has no room for the rest
                self._buffer.fail(error)
            self._run()

    @property
    def seconds(self) -> float:
        """Since the save began."""
        return time.perf_counter() - self._started

    def wait(self) -> SaveReport:
        """Block until the step is published. Raises the save's error, alike on every rank."""
        self._ended.wait()  # not join(): if Ctrl-C interrupts it, Python 3.11 counts the thread as ended
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def _run_beside(self) -> None:
        with in_background():
            self._run()

    def _run(self) -> None:
        try:
            if threading.current_thread() is self._thread:
                _lower_priority()
            contents = StagedContents(self._staging, self._buffer)
            with operation("save", step=self.step) as heard, counting() as asked:
                written = publish_collected(self._collected, self._target, self._ranks, contents)
                self._report = self._report_of(written, asked.total, is_published=True)
                heard.returns(self._report)
            note("save", self._report.to_json())
            self._after()
        except BaseException as error:
            self._error = error
            self._buffer.fail(error)
            # The next call raises it, but there may be no next call.
            _log.error("the async save of step %d failed: %s", self.step, error)
        finally:
            self._ended.set()


def _lower_priority() -> None:
    """Lower the priority of this thread. Only on Linux, which has priorities per thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWER_PRIORITY)
