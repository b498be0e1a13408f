"""Saves that fail while training goes on: where else they are tried, which failures may pass, and how many in a row.

:class:`.Checkpointer`, Accelerate and the Trainer save through :meth:`Failures.attempt`.
"""

from __future__ import annotations

import builtins
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .. import errors
from ..errors import CheckpointError, LockedError, RankError, SourceError
from ..storage import place_at
from .save import SaveReport

__all__ = ["FailurePolicy", "Failures", "RefusalError", "may_pass"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """How a run handles saves that fail because of storage. Pass it as ``failures=`` to ``Checkpointer``, ``ShardwiseAccelerator`` or
    ``ShardwiseTrainer``.

    Without a policy, the first failed save raises. With one, a failed save is logged no matter which rank it failed on, and training
    continues: the report gives the reason (``failure``), and the next save is attempted as usual. Errors in the program itself always raise.
    Raises :class:`ValueError` if ``max_failures`` is below 1.
    """

    max_failures: int = 3
    """Raise at this many failed saves in a row. 1: raise at the first."""
    fallback: str | os.PathLike[str] | None = None
    """A second directory or URL for steps that can't be saved in the first one. A resume looks there, too. Pass it again at every start, and use
    a different one for each run."""

    def __post_init__(self) -> None:
        if self.max_failures < 1:
            raise ValueError(f"max_failures must be at least 1, got {self.max_failures}")


@dataclass(slots=True)
class Failures:
    """The saves of a run that failed in a row. Every rank counts the same, because a save fails on all ranks or on none."""

    most: int = 1
    fallback: str | None = None
    """The policy's, absolute."""
    in_a_row: int = 0
    total: int = 0

    @classmethod
    def under(cls, policy: FailurePolicy | None) -> Failures:
        """None yet, of a run with this policy."""
        if policy is None:
            return cls()
        fallback = policy.fallback
        return cls(policy.max_failures, None if fallback is None else place_at(fallback))

    def roots(self, own: str) -> list[str]:
        """The run's own place, then the fall-back if there is one."""
        return [own] if self.fallback is None else [own, self.fallback]

    def attempt(
        self, step: int, ways: Mapping[str, Callable[[], SaveReport]], *, is_first_rank: bool
    ) -> SaveReport:
        """Save by the first of ``ways`` that storage does not make fail: by path, the run's own place before the fall-back.

        If all fail, the report says why, or the last error is raised; see :meth:`note`. Raises the error in a
        :class:`RefusalError` at once. Collective, if the ways are.
        """
        last = [*ways][-1]
        for path, save in ways.items():
            try:
                report = save()
            except RefusalError as refusal:
                raise refusal.error from None
            except Exception as error:
                if path != last and may_pass(error):
                    if is_first_rank:
                        _log.warning("step %d goes to the fallback: %s", step, _words(error))
                    continue
                self.note(error, step, is_first_rank=is_first_rank)
                return SaveReport.of_failure(path, step, str(error))
            if report.is_published:
                self.succeed()
            return report
        raise AssertionError("there is no way")

    def note(self, error: Exception, step: int, *, is_first_rank: bool) -> None:
        """Count a failed save and warn. Raises ``error`` itself if it must not pass, and at the limit."""
        if not may_pass(error):
            raise error
        self.in_a_row += 1
        self.total += 1
        if self.in_a_row >= self.most:
            if self.most > 1:
                error.add_note(f"{self.in_a_row} saves in a row have failed; max_failures={self.most}")
            raise error
        if is_first_rank:
            _log.warning(
                "step %d is not saved (failure %d in a row; at %d the run ends): %s",
                step,
                self.in_a_row,
                self.most,
                _words(error),
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


def _words(error: Exception) -> str:
    """The error with the ranks that it comes from: what rank 0 finds for all of them names none."""
    return str(error) if isinstance(error, RankError) else f"rank 0: {error}"


class RefusalError(Exception):
    """A call that no storage would take: it is the program's error, and no failure of a save."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(error)
        self.error = error
