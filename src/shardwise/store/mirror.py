"""A second place for the steps of a run: a thread of rank 0 copies each published step there, and proves the copy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..errors import ShardwiseError
from ..ranks.patience import patiently
from ..storage import join
from .copy import copy
from .line import Line

__all__ = ["Mirror"]

_log = logging.getLogger(__name__)


class Mirror:
    """Copies what a line has and its mirror has not: the newest step first.

    Every rank makes one; rank 0 alone calls its methods. A step that is older than the newest copied one and that retention would
    delete is never copied: a mirror that is slower than the saves skips steps. ``retain(line, newest, on_progress)`` applies the run's
    retention. A failure is logged, and the copy tried again after the next save: training does not depend on the mirror.
    """

    def __init__(
        self, line: Line, source: Line, retain: Callable[[Line, int, Callable[[], object]], None]
    ) -> None:
        self.line = line
        self._source = source
        self._retain = retain
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._again = False
        self._newest: int | None = None

    @property
    def newest(self) -> int | None:
        """The newest step that this process has copied and proved."""
        return self._newest

    def follow(self) -> None:
        """Copy in the background what is missing."""
        with self._lock:
            self._again = True
            if self._thread is not None and self._thread.is_alive():
                return
            # Not a daemon: an ending process waits until the newest step is copied.
            self._thread = threading.Thread(target=self._run, name="shardwise-mirror")
            self._thread.start()

    def wait(self) -> None:
        """Block until the thread has copied what it can."""
        thread = self._thread
        if thread is not None:
            patiently(thread.join)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            try:
                tried: set[int] = set()
                while self._copy_one(tried):
                    pass
            except ShardwiseError as error:
                _log.warning("%s: the mirror does not follow: %s", self.line.root, error)
            except Exception:
                _log.exception("%s: the mirror does not follow", self.line.root)

    def _copy_one(self, tried: set[int]) -> bool:
        """Copy the newest step that is missing and was not ``tried``; whether there was one."""
        there, here = self.line.held_steps(), self._source.steps()
        missing = [step for step in here if step not in there and step not in tried]
        if not missing:
            return False
        step = missing[0]
        tried.add(step)
        name = self.line.fresh_name(step)
        path = join(self._source.root, here[step])
        try:
            copy(path, join(self.line.root, name))
        except ShardwiseError:
            if step not in self._source.steps():  # retention has deleted it meanwhile
                return True
            raise
        self.line.add(step, name)
        self._newest = max(step, self._newest or 0)
        self._retain(self.line, max(step, *there), lambda: None)
        self.line.tidy(step)
        return True
