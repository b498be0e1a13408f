"""A second place for the steps of a run: a thread of rank 0 copies each published step there, and proves the copy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from ..errors import ShardwiseError, SourceError, is_damage
from ..format.manifest import MANIFEST_NAME
from ..limits import read_small
from ..operations.operation import in_background
from ..ranks.patience import patiently
from ..storage import join
from .copy import copy_checkpoint, discard_copy
from .line import Line

__all__ = ["Mirror", "is_same"]

_log = logging.getLogger(__name__)
_SLICE_S = 5.0


def is_same(path: str, copy: str) -> bool | None:
    """Whether two steps have the same manifest; if not, they are of two branches of a run. None if one can't be read.

    Raises :class:`SourceError` if a manifest can't be read, and is not damaged.
    """
    try:
        first, second = (read_small(join(one, MANIFEST_NAME), "manifest") for one in (path, copy))
    except SourceError as error:
        if is_damage(error) or isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise
    return first == second


class Mirror:
    """Copies what a line has and its mirror has not: the newest step first.

    Every rank makes one; rank 0 alone calls its methods. A mirror that is slower than the saves skips steps that retention deletes.
    ``retain(line, newest, on_progress)`` applies the run's retention. A failure is logged, and the copy tried again after the next save:
    training does not depend on the mirror.
    """

    def __init__(
        self, line: Line, source: Line, retain: Callable[[Line, int, Callable[[], object]], None]
    ) -> None:
        self.line = line
        self._source = source
        self._retain = retain
        self._lock = threading.Lock()
        self._again = False
        self._idle = threading.Event()
        self._idle.set()
        self._newest: int | None = None
        self._copying: int | None = None
        self._same: set[tuple[str, str]] = set()
        """Names of steps, in both places, whose manifests were compared."""

    @property
    def newest(self) -> int | None:
        """The newest step that this process has copied and proved."""
        return self._newest

    @property
    def copying(self) -> int | None:
        """The step that is being copied now: retention of the first place spares it."""
        return self._copying

    def follow(self) -> None:
        """Copy in the background what is missing."""
        with self._lock:
            self._again = True
            if not self._idle.is_set():
                return
            self._idle.clear()
        try:
            threading.Thread(target=self._run, name="shardwise-mirror").start()
        except RuntimeError as error:  # the system is out of threads, or the process ends
            self._idle.set()
            _log.warning("%s: the mirror does not follow: %s", self.line.root, error)

    def wait(self) -> None:
        """Block until the thread has copied what it can."""
        while not patiently(self._idle.wait, _SLICE_S):
            pass

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._again:
                    self._idle.set()
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
        here = self._source.seen_steps()
        self.line.held_steps()  # begins a line, if there is none
        there = self._without_another_branch(self.line.steps(), here)
        missing = [step for step in here if step not in there and step not in tried]
        if not missing:
            return False
        step = missing[0]
        tried.add(step)
        name = self.line.fresh_name(step)
        target = join(self.line.root, name)
        self._copying = step
        try:
            with in_background():
                copy_checkpoint(join(self._source.root, here[step]), target)
        except ShardwiseError as error:
            discard_copy(target)
            gone = step not in self._source.seen_steps()
            if gone or is_damage(error):
                why = "retention has deleted it" if gone else str(error)
                _log.warning("%s: step %d is not mirrored: %s", self.line.root, step, why)
                return True
            raise
        finally:
            self._copying = None
        self.line.add(step, name)
        newest = max((step, *there))
        self._newest = max(step, self._newest or 0)
        self._retain(self.line, newest, lambda: None)
        self.line.tidy(newest)
        return True

    def _without_another_branch(self, there: dict[int, str], here: Mapping[int, str]) -> dict[int, str]:
        """The mirror's steps, without those that the run has saved anew since: these are set aside."""
        pairs = [(step, (here[step], name)) for step, name in there.items() if step in here]
        new = [(step, pair) for step, pair in pairs if pair not in self._same]
        stale = [
            step
            for step, (own, name) in new
            if is_same(join(self._source.root, own), join(self.line.root, name)) is False
        ]
        if stale:
            self.line.take(max(there), dict.fromkeys(stale, "superseded"))
        self._same |= {pair for step, pair in new if step not in stale}
        return {step: name for step, name in there.items() if step not in stale}
