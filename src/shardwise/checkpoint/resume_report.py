"""The outcome of a restore. Without what restores: a process that only saves doesn't import that."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import ParamSpec, TypeVar

from ..objects import frozen
from ..operations.operation import size
from ..operations.printed import Printed
from ..ranks.ranks import Ranks

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)
#: Replaced settings that the logged line names.
_MAX_IN_LINE = 3


def logged(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function that returns a :class:`ResumeReport` log it by :func:`log_resume`.

    Outside of the operation: its bar is gone by then.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        report = function(*args, **kwargs)
        if isinstance(report, ResumeReport):
            log_resume(report)
        return report

    return call


def log_resume(report: ResumeReport) -> None:
    """Log a resume on rank 0 in one line: a warning if it is not exact, or if settings of the program were replaced."""
    if Ranks.current().rank == 0:
        level = logging.INFO if report.exact and not report.replaced else logging.WARNING
        _log.log(level, "%s", report.line())


@frozen
class ResumeReport(Printed):
    """The result of a restore: the step, the restored state, and the state that was skipped and why."""

    path: str
    step: int
    run_id: str
    saved_world_size: int
    """0 if the checkpoint does not record it."""
    world_size: int
    saved_mesh: str
    """Names and sizes of the mesh axes when it was saved: ``dp_shard 2 × tp 2``."""
    mesh: str
    """Names and sizes of the mesh axes in this run."""
    digest: str
    """Digest of the names and digests of all restored tensors. The same state has the same digest on any mesh. Empty for a checkpoint from another program, which records no digests."""
    exact: bool
    """Whether the next steps will be bit-identical to those of a run that never stopped, as far as they depend on the state you passed: see ``not_given``."""
    differences: tuple[str, ...]
    """Reasons why the resume isn't exact: a different world size; different versions, threads, devices or dtypes; custom state of a model or an
    optimizer that wasn't stored, or that its ``load_state_dict`` didn't accept."""
    tensors: int
    """Number of restored model tensors. If the checkpoint has digests (``digest``), they were compared unless the dtype differs (see
    ``differences``)."""
    optimizer_tensors: int
    """Number of restored optimizer tensors. All their digests, if there are any, were compared."""
    documents: tuple[str, ...]
    """Names of all other restored state."""
    skipped: tuple[str, ...]
    """State in the checkpoint that this run didn't use, with the reason."""
    caveats: tuple[str, ...]
    """Reasons why the data loader may not produce exactly the same batches."""
    rng: str
    """How the RNG states were set."""
    bytes_read: int
    seconds: float
    damaged: Mapping[int, str]
    """Newer steps that were skipped because they are damaged, with the damage."""
    superseded: tuple[int, ...]
    """Newer steps that were renamed because the run continues from this one."""
    functions: tuple[str, ...] = ()
    """Functions in schedulers. A checkpoint can't store them, so your program's own are used. ``exact`` assumes that they are the same as in
    the saved run, like all other code."""
    not_given: tuple[str, ...] = ()
    """Which of ``optimizer`` and ``dataloader`` the ``TrainState`` lacks. ``exact`` doesn't cover them: without a data loader, the program
    itself must continue at the right sample."""
    replaced: tuple[str, ...] = ()
    """Settings of this program's optimizers and schedulers, such as ``lr``, that were replaced by the checkpoint's values. ``exact`` refers to the checkpoint's values; docs/howto/own-loop.md explains how to use the program's instead."""
    gradients: int = 0
    """Number of restored gradients, included in ``optimizer_tensors``. Only nonzero for a save during gradient accumulation."""
    requests: int = 0
    """Requests that this rank made to object stores: for the manifest, documents, headers, models and optimizers."""
    from_memory: bool = False
    """Whether the step came from the hosts' memory (:class:`shardwise.InMemoryCheckpoints`) instead of from disk."""
    fetched: Mapping[str, int] = field(default_factory=dict)
    """For a step in memory, the bytes that this rank fetched from other hosts, by host. Empty if its own host had everything."""

    def with_history(self, damaged: Mapping[int, str], superseded: tuple[int, ...]) -> ResumeReport:
        """A copy of the report that also lists the damaged and superseded steps."""
        return replace(self, damaged=dict(damaged), superseded=superseded)

    def rows(self) -> Mapping[str, str]:
        """The rows of the printed table: the source, whether the resume is exact and why not, and what was restored."""
        tensors = f"{self.tensors:,} model tensors, {self.optimizer_tensors:,} optimizer tensors"
        exact = "yes"
        if not self.exact:
            exact = f"no: {'; '.join((*self.differences, *self.skipped, *self.caveats))}"
        elif self.not_given:
            exact = f"yes, for the state you passed (no {', no '.join(self.not_given)})"
        ranks = self.saved_world_size
        saved_on = f"{ranks} rank{'s' * (ranks != 1)}" if ranks else "an unknown number of ranks"
        rows = {
            "resumed from": f"step {self.step}, saved on {saved_on}, now on {self.world_size}"
            + " (from memory)" * self.from_memory,
            "path": self.path,
            "exact": exact,
            "digests compared": tensors if self.digest else "none: the checkpoint has no digests",
            "restored unchecked": "" if self.digest else tensors,
            "also restored": ", ".join(self.documents),
            "RNG state": self.rng,
            "settings replaced": "; ".join(self.replaced),
            "newer steps renamed": ", ".join(map(str, self.superseded)),
            "damaged steps skipped": "; ".join(f"{step}: {found}" for step, found in self.damaged.items()),
            "read by this rank": f"{size(self.bytes_read)} in {self.seconds:.2f} s"
            if self.bytes_read
            else "",
        }
        return {name: value for name, value in rows.items() if value}

    def line(self) -> str:
        """The report in one line, as it is logged."""
        rows = self.rows()
        more = len(self.replaced) - _MAX_IN_LINE
        replaced = [*self.replaced[:_MAX_IN_LINE], *([f"and {more} more"] if more > 0 else [])]
        return "; ".join([f"restored {rows['resumed from']}", f"exact: {rows['exact']}", *replaced])
