"""Who does the work on a run's directory: rank 0 for one that all ranks see, or one rank of each host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from ..operations.operation import this_operation
from ..planning import IOOptions
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..store.target import Target
from .check import quick_check
from .resume_report import ResumeReport
from .run_steps import Candidate, RunSteps
from .shared_fs import open_for_all

__all__ = ["Directories", "OneDirectory", "Restore"]

#: ``restore_into``, which is imported by a resume only.
Restore = Callable[[TrainState, str, Ranks, IOOptions], ResumeReport]


class Directories(Protocol):
    """Every rank makes one. Its methods are collective, but for :meth:`target`, and raise alike on all ranks."""

    def open(self, take: Callable[[], str], ranks: Ranks) -> str:
        """Lock the run's places by ``take``, and look whether all ranks can work there. Returns rank 0's result of ``take``."""

    def name_of_next(self, name: Callable[[], str], ranks: Ranks) -> str:
        """The name of the next step's directory, by :meth:`.RunSteps.name_of_next`."""

    def target(self, name: str, place: int) -> Target:
        """Where the save under this name publishes."""

    def after_save(self, step: int, place: int, ranks: Ranks) -> None:
        """Apply retention, and let the mirror follow."""

    def candidates(self, step: int | None, ranks: Ranks) -> list[Candidate]:
        """The steps to try, newest first."""

    def restore(
        self, restore: Restore, state: TrainState, one: Candidate, ranks: Ranks, io: IOOptions
    ) -> ResumeReport:
        """Check a step, and restore it. Raises damage as :func:`.is_damage` says."""

    def go_on_from(self, step: int, damaged: Mapping[int, Mapping[int, str]], ranks: Ranks) -> list[int]:
        """As :meth:`.RunSteps.go_on_from`."""

    def raise_if_taken(self, ranks: Ranks) -> None:
        """As :meth:`.RunSteps.raise_if_taken`."""

    def raise_if_lost(self, step: int | None, damaged: Mapping[int, Mapping[int, str]], ranks: Ranks) -> None:
        """As :meth:`.RunSteps.raise_if_lost`."""


class OneDirectory:
    """A directory or store that all ranks see. Rank 0 does the work."""

    def __init__(self, steps: RunSteps) -> None:
        self._steps = steps

    def open(self, take: Callable[[], str], ranks: Ranks) -> str:
        return open_for_all(self._steps.root_of(0), take, ranks)

    def name_of_next(self, name: Callable[[], str], ranks: Ranks) -> str:
        return ranks.on_first("check checkpoint directory", name)

    def target(self, name: str, place: int) -> Target:
        return self._steps.target(name, place)

    def after_save(self, step: int, place: int, ranks: Ranks) -> None:
        with ranks.agree("retention"):
            if ranks.rank == 0:
                self._steps.after_save(step, ranks.tick, place)

    def candidates(self, step: int | None, ranks: Ranks) -> list[Candidate]:
        found: list[list[Any]] = ranks.on_first(
            "scan checkpoint directory", lambda: self._steps.candidates(step)
        )
        return [Candidate(s, place, self._steps.path_of(place, name)) for s, place, name in found]

    def restore(
        self, restore: Restore, state: TrainState, one: Candidate, ranks: Ranks, io: IOOptions
    ) -> ResumeReport:
        with ranks.agree(f"check step {one.step}"):
            if ranks.rank == 0:
                patiently(quick_check, one.path, one.step, ranks.tick)
        this_operation().begin_again(one.path)
        return restore(state, one.path, ranks, io)

    def go_on_from(self, step: int, damaged: Mapping[int, Mapping[int, str]], ranks: Ranks) -> list[int]:
        return ranks.on_first("rename newer steps", partial(self._steps.go_on_from, step, damaged))

    def raise_if_taken(self, ranks: Ranks) -> None:
        ranks.on_first("check the steps again", self._steps.raise_if_taken)

    def raise_if_lost(self, step: int | None, damaged: Mapping[int, Mapping[int, str]], ranks: Ranks) -> None:
        ranks.on_first("find a checkpoint", lambda: self._steps.raise_if_lost(step, damaged))
