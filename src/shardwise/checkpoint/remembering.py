"""The half of a Checkpointer that keeps steps in memory and takes them back from there."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..errors import CheckpointError, ShardwiseError, is_damage
from ..format.steps import checked_step
from ..memory.options import InMemoryCheckpoints
from ..planning import IOOptions
from ..preemption.stops import Stops
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..transfer.arriving import arriving
from .collect import Lineage
from .memory_steps import HeldStep, MemorySteps
from .resume_report import ResumeReport
from .run_steps import RunSteps

__all__ = ["Remembering"]

_log = logging.getLogger(__name__)


class Remembering(ABC):
    """The memory methods of :class:`.checkpointer.Checkpointer`."""

    _memory: MemorySteps | None
    _lineage: Lineage | None
    _steps: RunSteps
    _io: IOOptions
    _on_disk: int | None
    _stops: Stops

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _ranks(self) -> Ranks: ...

    @abstractmethod
    def _begin_run(self, ranks: Ranks) -> Lineage: ...

    @abstractmethod
    def _name_of_next(self, step: int, place: int) -> str: ...

    def _begin_memory(self, tier: InMemoryCheckpoints) -> MemorySteps:
        return MemorySteps(tier, self._steps.root_of(0), self._ranks())

    def _close_memory(self) -> None:
        """Give the memory back, unless it holds a step that disk does not, or the run was told to stop."""
        memory = self._memory
        if memory is not None:
            is_newer = memory.wait() is not None and (
                self._on_disk is None or (memory.newest or 0) > self._on_disk
            )
            memory.close(keep=is_newer or self._stops.has_stopped, ranks=self._ranks())

    def remember(self, state: TrainState, step: int) -> int:
        """Keep ``state`` in the hosts' memory, if ``step`` is divisible by ``InMemoryCheckpoints.every``. Returns the bytes that this rank copied.

        Call it after each step; it does nothing without ``memory=``. It returns once the state is copied; during the copy, a thread compares
        it with the state of the other ranks. In the background, the thread then hashes the copy and exchanges slices with other hosts. Returns 0 if the step isn't due,
        if the previous step is still being copied on some rank, or if ranks are missing. Failures (no room on tmpfs, a host that is gone)
        are logged, and training continues. Every rank must call it. Raises :class:`StateError` for a state that can't be
        stored, and :class:`CheckpointError` for a directory with steps of another run.
        """
        memory, step = self._memory, checked_step(step)
        if memory is None or not memory.is_due(step):
            return 0
        self._check_open()
        ranks = self._ranks()
        if self._lineage is None:
            ranks.on_first("check checkpoint directory", lambda: self._name_of_next(step, 0))
            self._lineage = self._begin_run(ranks)
        return memory.save(state, step, self._lineage, ranks)

    def wait_for_memory(self) -> int | None:
        """Block until the step that :meth:`remember` copied is complete on all hosts. Returns the newest step in memory."""
        return None if self._memory is None else self._memory.wait()

    def _resume_from_memory(
        self, state: TrainState, held: HeldStep, ranks: Ranks, restore: Callable[..., ResumeReport]
    ) -> ResumeReport | str:
        """A report, or why the step can't be had from memory. Collective."""
        assert self._memory is not None
        view = None
        try:
            view = self._memory.view(held, ranks)
            with ranks.agree("bring documents from memory"):
                view.bring_documents()
            with arriving(view.read_into):
                report = restore(state, view.path, ranks, self._io)
        except ShardwiseError as error:
            if not is_damage(error) and not _is_of_memory(error):
                raise
            return str(error)
        finally:
            if view is not None:
                view.remove()
        path = f"memory: {self._memory.path_of(held)}"
        return replace(report, path=path, from_memory=True, fetched=dict(view.taken))

    def _from_memory(
        self,
        state: TrainState,
        asked: int | None,
        newest: int,
        ranks: Ranks,
        restore: Callable[..., ResumeReport],
    ) -> ResumeReport | None:
        """The newest step in memory that is not older than ``newest``, the next one on disk. Collective."""
        if self._memory is None:
            return None
        for held in self._memory.candidates(ranks):
            if held.step < newest or asked not in (None, held.step) or held in self._memory.failed:
                continue
            found = self._resume_from_memory(state, held, ranks, restore)
            if isinstance(found, ResumeReport):
                self._lineage = None
                newer = ranks.on_first("rename newer steps", partial(self._steps.go_on_from, held.step, {}))
                self._memory.begin_line(held.step, ranks)
                self._memory.took(held)
                self._lineage = Lineage(found.run_id, held.step)
                return found.with_history({}, tuple(newer))
            self._memory.failed.append(held)
            if ranks.rank == 0:
                _log.warning("skipping step %d in memory: %s", held.step, found)
        return None


def _is_of_memory(error: ShardwiseError) -> bool:
    """Whether memory does not hold a step, on whichever rank: then disk may."""
    if isinstance(error, CheckpointError):
        return True
    causes = getattr(error, "causes", {})
    return bool(causes) and all(
        c.startswith(("CheckpointError", "LowSpaceError", "IntegrityError")) for c in causes.values()
    )
