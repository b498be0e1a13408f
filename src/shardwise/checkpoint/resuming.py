"""The half of a Checkpointer that resumes: the newest valid step, from disk or from memory."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import replace

from ..errors import ShardwiseError, is_damage, is_unreadable
from ..operations.announced import announced
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..storage import counting
from .collect import Lineage
from .directories import Directories
from .remembering import Remembering
from .resume_report import ResumeReport, logged
from .save import SaveReport

__all__ = ["Resuming"]

_log = logging.getLogger(__name__)


class Resuming(Remembering):
    """The resuming methods of :class:`.checkpointer.Checkpointer`."""

    _places: Directories

    @abstractmethod
    def wait(self) -> SaveReport | None:
        """The Checkpointer's."""

    @logged
    @announced("resume", "step")
    def resume(self, state: TrainState, step: int | None = None) -> ResumeReport | None:
        """Restore the newest valid step (or exactly ``step``). Returns None only if nothing was ever published here.

        Damaged steps are skipped with a warning and renamed to ``step-N.damaged-…``. Steps newer than the resumed one are renamed to
        ``step-N.superseded-…``, so that the next restart resumes from the steps of this run. A step also counts as damaged if its manifest is
        that of another step (an old manifest, or a renamed directory) or if one of its documents is malformed. Every rank must call it.

        Raises :class:`NoCheckpointError` if there are steps but none is valid, and :class:`PlanError` or :class:`StateError` if a
        valid step doesn't fit the live objects (nothing is renamed then).
        """
        with counting() as asked:
            report = self._resume(state, step, self._ranks())
        return None if report is None else replace(report, requests=asked.total)

    def _resume(self, state: TrainState, step: int | None, ranks: Ranks) -> ResumeReport | None:
        from .restore import restore_into  # and with it what loads, for which no first save waits

        self._check_open()
        self.wait()
        damaged: dict[int, dict[int, str]] = {}
        for one in self._places.candidates(step, ranks):
            if found := self._from_memory(state, step, one.step, ranks, restore_into):
                return found
            try:
                report = self._places.restore(restore_into, state, one, ranks, self._io)
            except ShardwiseError as error:
                if is_unreadable(error):
                    self._places.raise_if_taken(ranks)
                if not is_damage(error):
                    raise
                damaged.setdefault(one.place, {})[one.step] = str(error)
                if ranks.rank == 0:
                    _log.warning("skipping damaged %s: %s", one.path, error)
                continue
            self._lineage = None  # no save goes on from this step while newer ones are not set aside
            newer = self._places.go_on_from(one.step, damaged, ranks)
            if self._memory is not None:
                self._memory.begin_line(one.step, ranks)
            self._lineage, self._on_disk = Lineage(report.run_id, one.step), one.step
            bad = {s: why for place in sorted(damaged, reverse=True) for s, why in damaged[place].items()}
            return report.with_history(bad, tuple(s for s in newer if s not in bad))
        if found := self._from_memory(state, step, 0, ranks, restore_into):
            return found
        self._places.raise_if_lost(step, damaged, ranks)
        return None
