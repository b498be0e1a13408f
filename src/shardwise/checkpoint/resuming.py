"""The half of a Checkpointer that resumes: the newest valid step, from disk or from memory."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import replace
from functools import partial

from ..errors import ShardwiseError, is_damage, is_unreadable
from ..operations.announced import announced
from ..operations.operation import this_operation
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..storage import counting
from .check import quick_check
from .collect import Lineage
from .remembering import Remembering
from .resume_report import ResumeReport
from .run_steps import Candidate
from .save import SaveReport

__all__ = ["Resuming"]

_log = logging.getLogger(__name__)


class Resuming(Remembering):
    """The resuming methods of :class:`.checkpointer.Checkpointer`."""

    @abstractmethod
    def wait(self) -> SaveReport | None:
        """The Checkpointer's."""

    @announced("resume", "step")
    def resume(self, state: TrainState, step: int | None = None) -> ResumeReport | None:
        """Restore the newest valid step (or exactly ``step``); None only if nothing was ever published here.

        Damaged steps are skipped with a warning and set aside as ``step-N.damaged-…``. Steps newer than the resumed
        one are set aside as ``step-N.superseded-…``: if the run stops again, it resumes from its own steps. Steps with
        another step's manifest (an old manifest, or a renamed directory) or with a malformed document count as
        damaged. Collective.

        Raises :class:`NoCheckpointError` if steps exist and none is valid; :class:`PlanError` or
        :class:`StateError` if a valid step does not fit the live objects (nothing is set aside then).
        """
        with counting() as asked:
            report = self._resume(state, step, self._ranks())
        return None if report is None else replace(report, requests=asked.total)

    def _resume(self, state: TrainState, step: int | None, ranks: Ranks) -> ResumeReport | None:
        from .restore import restore_into  # and with it what loads, for which no first save waits

        self._check_open()
        self.wait()
        damaged: dict[int, dict[int, str]] = {}
        for one in self._candidates(ranks, step):
            if found := self._from_memory(state, step, one.step, ranks, restore_into):
                return found
            try:
                with ranks.agree(f"check step {one.step}"):
                    if ranks.rank == 0:
                        patiently(quick_check, one.path, one.step, ranks.tick)
                this_operation().begin_again(one.path)
                report = restore_into(state, one.path, ranks, self._io)
            except ShardwiseError as error:
                if is_unreadable(error):
                    ranks.on_first("look at the steps again", self._steps.raise_if_taken)
                if not is_damage(error):
                    raise
                damaged.setdefault(one.place, {})[one.step] = str(error)
                if ranks.rank == 0:
                    _log.warning("skipping damaged %s: %s", one.path, error)
                continue
            self._lineage = None  # no save goes on from this step while newer ones are not set aside
            newer = ranks.on_first(
                "set newer steps aside", partial(self._steps.go_on_from, one.step, damaged)
            )
            if self._memory is not None:
                self._memory.begin_line(one.step, ranks)
            self._lineage, self._on_disk = Lineage(report.run_id, one.step), one.step
            bad = {s: why for place in sorted(damaged, reverse=True) for s, why in damaged[place].items()}
            return report.with_history(bad, tuple(s for s in newer if s not in bad))
        if found := self._from_memory(state, step, 0, ranks, restore_into):
            return found
        ranks.on_first("find a checkpoint", lambda: self._steps.raise_if_lost(step, damaged))
        return None

    def _candidates(self, ranks: Ranks, step: int | None) -> list[Candidate]:
        """The steps to try, newest first, as rank 0 sees them."""
        found = ranks.on_first("scan checkpoint directory", lambda: self._steps.candidates(step))
        return [Candidate(s, place, self._steps.path_of(place, name)) for s, place, name in found]
