"""Saves that fail while training goes on: which failures may pass, and how many in a row."""

from __future__ import annotations

import builtins
import logging
from dataclasses import dataclass
from typing import Literal

from .. import errors
from ..errors import CheckpointError, LockedError, RankError, SourceError

__all__ = ["Failures", "OnSaveError", "RefusalError", "may_pass"]

_log = logging.getLogger(__name__)
OnSaveError = Literal["raise", "warn"]


@dataclass(slots=True)
class Failures:
    """The saves of a run that failed in a row. The same on every rank, because the ranks fail alike."""

    on_error: OnSaveError
    most: int
    in_a_row: int = 0
    total: int = 0

    def note(self, error: Exception, step: int, *, is_first_rank: bool) -> None:
        """Count a failed save and warn. Raises ``error`` itself if it must not pass, and at the limit."""
        if self.on_error == "raise" or not may_pass(error):
            raise error
        self.in_a_row += 1
        self.total += 1
        if self.in_a_row >= self.most:
            error.add_note(f"{self.in_a_row} saves in a row have failed; max_failures={self.most}")
            raise error
        if is_first_rank:
            _log.warning(
                "step %d is not saved (failure %d in a row; at %d the run ends): %s",
                step,
                self.in_a_row,
                self.most,
                error,
            )

    def succeed(self) -> None:
        """Begin to count anew."""
        self.in_a_row = 0


def may_pass(error: BaseException) -> bool:
    """Whether the next save may well succeed: storage failed, on whichever rank, and no rank is missing.

    Not so: another run holds the directory, a state that can't be stored, an error in a program.
    """
    if isinstance(error, RankError):
        return not error.missing and bool(error.causes) and all(map(_is_of_storage, error.causes.values()))
    return isinstance(error, (OSError, SourceError, CheckpointError)) and not isinstance(error, LockedError)


def _is_of_storage(cause: str) -> bool:
    """By the type's name, with which each cause begins."""
    name = cause.partition(":")[0]
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    return (
        isinstance(kind, type)
        and issubclass(kind, (OSError, SourceError, CheckpointError))
        and kind is not LockedError
    )


class RefusalError(Exception):
    """A call that no storage would take: it is the program's error, and no failure of a save."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(error)
        self.error = error
