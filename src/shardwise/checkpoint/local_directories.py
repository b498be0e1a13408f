"""A run whose hosts keep their parts of each step in directories of their own: ``Checkpointer(local=True)``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..errors import CheckpointError, ShardwiseError
from ..operations.operation import this_operation
from ..planning import IOOptions
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..store.part_target import PartTarget, delete_sealed
from ..store.target import Target
from .check import check_parts
from .directories import Restore
from .local_parts import opened
from .local_places import LocalPlaces, id_of_place
from .parts import settle_parts
from .resume_report import ResumeReport
from .run_steps import Candidate, RunSteps

__all__ = ["LocalDirectories"]

_log = logging.getLogger(__name__)


class LocalDirectories:
    """See :class:`.Directories`. The first rank of each place does its work."""

    def __init__(self, steps: RunSteps) -> None:
        self._steps = steps
        self._root = steps.root_of(0)
        self._at: LocalPlaces

    def open(self, take: Callable[[], str], ranks: Ranks) -> str:
        self._at = LocalPlaces(self._root, ranks)
        found = self._at.on_each(
            "lock checkpoint directories", lambda: [take(), id_of_place(self._root)], ranks
        )
        self._at.with_ids([one for _, one in found])
        settle_parts(self._root, self._at, ranks)
        return found[0][0]

    def name_of_next(self, name: Callable[[], str], ranks: Ranks) -> str:
        return self._at.on_each("check checkpoint directories", name, ranks)[0]

    def target(self, name: str, place: int) -> Target:
        return PartTarget(self._steps.path_of(place, name), self._at.places, self._at.own)

    def after_save(self, step: int, place: int, ranks: Ranks) -> None:
        """A step counts if every place holds its own part whole; so all places delete the same steps."""
        lists = self._at.on_each(
            "look at the steps", lambda: self._steps.newest_whole(step, self._is_own_part_whole(ranks)), ranks
        )
        agreed = sorted(set.intersection(*map(set, lists)), reverse=True)
        with ranks.agree("retention"):
            if self._at.leads(ranks.rank):
                self._steps.keep_newest(step, agreed)
                delete_sealed(self._root)  # those of older steps are of no use now

    def _is_own_part_whole(self, ranks: Ranks) -> Callable[[str, int], bool]:
        own = self._at.places[self._at.own].id

        def is_whole(path: str, step: int) -> bool:
            try:
                manifest, here = patiently(lambda: check_parts(path, step, ranks.tick, heads=False))
            except ShardwiseError as error:
                _log.warning("retention does not count %s: %s", path, error)
                return False
            return all(number in here for number, p in enumerate(manifest.places) if p.id == own)

        return is_whole

    def candidates(self, step: int | None, ranks: Ranks) -> list[Candidate]:
        lists = self._at.on_each("scan checkpoint directories", lambda: self._steps.candidates(None), ranks)
        names = {s: name for found in lists for s, _, name in found if step in (None, s)}
        if step is not None and not names:
            there = sorted({s for found in lists for s, _, _ in found})
            raise CheckpointError(f"{self._root}: no step {step} on any host; there are {there}")
        return [Candidate(s, 0, self._steps.path_of(0, names[s])) for s in sorted(names, reverse=True)]

    def restore(
        self, restore: Restore, state: TrainState, one: Candidate, ranks: Ranks, io: IOOptions
    ) -> ResumeReport:
        with opened(one.path, one.step, self._at, ranks, io) as parts:
            this_operation().begin_again(one.path)
            parts.bring(state)
            return replace(restore(state, parts.path, ranks, parts.io), path=one.path)

    def go_on_from(self, step: int, damaged: Mapping[int, Mapping[int, str]], ranks: Ranks) -> list[int]:
        lists = self._at.on_each("rename newer steps", lambda: self._steps.go_on_from(step, damaged), ranks)
        return sorted(set().union(*lists), reverse=True)

    def raise_if_taken(self, ranks: Ranks) -> None:
        self._at.on_each("check the steps again", self._steps.raise_if_taken, ranks)

    def raise_if_lost(self, step: int | None, damaged: Mapping[int, Mapping[int, str]], ranks: Ranks) -> None:
        self._at.on_each("find a checkpoint", lambda: self._steps.raise_if_lost(step, damaged), ranks)
