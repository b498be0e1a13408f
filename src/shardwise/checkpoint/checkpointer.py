"""``save`` and ``Checkpointer``: training state in and out of a checkpoint directory (format: docs/format.md)."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections.abc import Callable
from typing import Any, Literal

from ..errors import CheckpointError, NoCheckpointError, ShardwiseError, SourceError, is_damage
from ..format.steps import checked_step
from ..planning import IOOptions
from ..ranks.ranks import Ranks
from ..state.train_state import TrainState
from ..storage import absolute, is_url, join
from ..store.line import line_of
from ..store.publish import dcp_directories
from ..store.target import Target, target_of
from .async_save import AsyncSave, reserve_for
from .check import check_files, quick_check
from .collect import Lineage, collect
from .restore import ResumeReport, restore_into
from .save import SaveReport, write_checkpoint
from .stage import StagingBuffer

__all__ = ["Checkpointer", "save"]

_log = logging.getLogger(__name__)
_NUMBERS = itertools.count()


def save(
    state: TrainState, path: str | os.PathLike[str], *, step: int = 0, io: IOOptions | None = None
) -> SaveReport:
    """Write ``state`` as one checkpoint directory at ``path``: all of it or nothing. ``path`` may be a URL of an object store with
    conditional writes.

    Every rank writes its own shards; replicas are written once. Every rank of the default process group must call it.
    Memory besides the live tensors on CPU: ≤ 32 MiB, plus the tensors in documents (at most 64 MiB for the own state of
    each model or optimizer). Raises :class:`StateError` before anything is written, :class:`CheckpointError` if
    ``path`` exists, :class:`LockedError` if another save writes to the URL (or was killed there), :class:`RankError` on every rank.
    """
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    run_id = ranks.on_first("run id", _new_run_id)
    return write_checkpoint(state, target_of(absolute(path)), step, Lineage(run_id, None), ranks)


def _new_run_id() -> str:
    return secrets.token_hex(8)


class Checkpointer:
    """Checkpoints of one run in one directory: saving, retention, resuming from the newest valid step.

    Args:
        root: directory of the steps; made if needed. One run at a time holds it (advisory lock). Or a URL of an object store with
            conditional writes: there the run that saved or resumed last holds it, and the run before gets
            :class:`LockedError` at its next save.
        keep_last: number of newest valid steps to keep; None keeps all. A step is valid here if its manifest is intact
            and every file has its size. Payload is not read: only a resume or ``verify`` finds corrupted bytes. A
            damaged step does not count, and is deleted when enough newer ones are valid.
        keep_every: keep steps divisible by this for good.
        mode: ``"sync"``: ``save`` returns when the step is published. ``"async"``: when the state is copied (on a
            device: when its copies are enqueued before all later work of the current stream); a background thread
            hashes, writes and publishes.
        max_staging_bytes: for ``"async"``, host memory for the copy, per rank. None: the size of the rank's state.
            With less, ``save`` waits in waves until the last part of the state is copied. Pinned for a state on a device.
        when_busy: for ``"async"``, while the last save still runs, ``save`` either waits for it (``"wait"``) or
            raises :class:`CheckpointError` on every rank (``"refuse"``).
        io: staging of a resume, and time limits.

    Every rank of the default process group must make each call. Raises :class:`LockedError` on every rank if another
    run holds the directory or has taken it since: the lock is checked at each save, and again right before the step
    appears. Call :meth:`close` before ``destroy_process_group``: a pending async save still needs the group. After a
    :class:`RankError` with missing ranks, restart all processes: slow ranks are out of step.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        mode: Literal["sync", "async"] = "sync",
        max_staging_bytes: int | None = None,
        when_busy: Literal["wait", "refuse"] = "wait",
        io: IOOptions | None = None,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}")
        if max_staging_bytes is not None and max_staging_bytes < 1:
            raise ValueError(f"max_staging_bytes must be at least 1 or None, got {max_staging_bytes}")
        for option, given, allowed in (
            ("mode", mode, ("sync", "async")),
            ("when_busy", when_busy, ("wait", "refuse")),
        ):
            if given not in allowed:
                raise ValueError(f"{option} must be one of {allowed}, got {given!r}")
        self.root = absolute(root)
        self._line = line_of(self.root)
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._io = io or IOOptions()
        self._buffer = StagingBuffer() if mode == "async" else None
        self._max_staging_bytes = max_staging_bytes
        self._refuses_when_busy = when_busy == "refuse"
        self._pending: AsyncSave | None = None
        self._closed = False
        self._lineage: Lineage | None = None
        try:
            self._channel = self._ranks().on_first("lock checkpoint directory", self._open)
        except BaseException:  # also if another rank failed or is missing: the caller gets no object to close
            self._line.close()
            raise

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except ShardwiseError as error:
            if kind is None:
                raise
            _log.warning("the async save failed, too: %s", error)  # the body's own error comes first

    def _open(self) -> str:
        """Lock the directory. Returns the channel of the background thread's agreements. For rank 0.

        Each Checkpointer has a channel of its own, because two may write at a time.
        """
        self._line.open()
        return f"async-{next(_NUMBERS)}-"

    def close(self) -> None:
        """Wait for a pending async save and release the directory; later saves and resumes are refused.

        Every rank must call it, before ``destroy_process_group``. Raises the pending save's error alike on every rank
        (:class:`CheckpointError` if the process group is gone); the directory is released then, too. After Ctrl-C a save may
        still run: the directory is held until a second call.
        """
        try:
            self.wait()
        finally:
            if self._pending is None:  # else Ctrl-C: the save still runs, so no other run may write here yet
                self._closed = True
                with self._ranks().patience():
                    self._line.close()

    @property
    def staging_bytes(self) -> int:
        """Host memory of the staging buffer, kept between saves on this rank; 0 for ``"sync"``.

        Of pinned memory what torch really took for it.
        """
        return self._buffer.nbytes if self._buffer is not None else 0

    @property
    def is_saving(self) -> bool:
        """Whether an async save is running on this rank."""
        return self._pending is not None and self._pending.is_running

    def prepare(self, state: TrainState) -> int:
        """Allocate and touch the staging buffer for the present ``state``, to spare the first save. Returns its bytes.

        Collective. Optimizer state that does not exist yet enlarges the buffer at the first save that has it. Does
        nothing for ``"sync"``.
        """
        if self._buffer is not None:
            self.wait()
            ranks = self._ranks()
            collected = collect(state, 0, Lineage("", None), ranks)
            reserve_for(collected, self._buffer, ranks, self._max_staging_bytes)
        return self.staging_bytes

    def wait(self) -> SaveReport | None:
        """Block until a pending async save is published. Returns its report, or None if there is none.

        Raises its error once, alike on every rank; earlier steps are untouched.
        """
        pending = self._pending
        if pending is None:
            return None
        try:
            report = pending.wait()
        finally:
            if not pending.is_running:  # else Ctrl-C: it still writes, from the same buffer
                self._pending = None
        assert self._lineage is not None
        self._lineage = Lineage(self._lineage.run_id, pending.step)
        return report

    def save(self, state: TrainState, step: int) -> SaveReport:
        """Publish ``state`` as ``step``, then apply retention. Collective; see :func:`save` for what it raises.

        ``"async"``: returns when the state is copied; the next call raises a failure of the background thread.

        On failure earlier steps are untouched, and ``step`` is not published unless the failure came after the rename
        (then it is whole). Refused: a step that is not newer than all published ones, and a first save into a
        directory with steps of a run that this one did not resume.
        """
        step, ranks = checked_step(step), self._ranks()
        if self._refuses_when_busy:
            self._refuse_if_busy(ranks)
        self.wait()
        name = ranks.on_first("check checkpoint directory", lambda: self._name_of_next(step))
        target = self._line.target(name)
        if self._lineage is None:
            run_id = ranks.on_first("run id", _new_run_id)
            self._lineage = Lineage(run_id, None)
        if self._buffer is not None:
            return self._save_async(state, target, step, self._lineage, self._buffer)
        report = write_checkpoint(state, target, step, self._lineage, ranks)
        self._lineage = Lineage(self._lineage.run_id, step)
        self._retain(step, ranks)
        return report

    def _save_async(
        self, state: TrainState, target: Target, step: int, lineage: Lineage, buffer: StagingBuffer
    ) -> SaveReport:
        ranks = self._ranks()
        collected = collect(state, step, lineage, ranks)
        reserve_for(collected, buffer, ranks, self._max_staging_bytes)
        ranks_of_thread = Ranks.current(timeout_s=self._io.timeout_s, channel=self._channel)
        with ranks.agree("copy documents"):  # if one rank has no memory for them, no rank saves
            pending = AsyncSave(
                collected, target, buffer, ranks_of_thread, lambda: self._retain(step, ranks_of_thread)
            )
        self._pending = pending
        return pending.copy()

    def _refuse_if_busy(self, ranks: Ranks) -> None:
        if ranks.combine("ask for an async save", lambda: self.is_saving, any):
            raise CheckpointError(
                f"{self.root}: the save before still runs; call wait(), save less often, or give when_busy='wait'"
            )

    def _retain(self, step: int, ranks: Ranks) -> None:
        with ranks.agree("retention"):
            if ranks.rank == 0:
                self._line.tidy(step)
                self._prune(step, ranks.tick)

    def resume(self, state: TrainState, step: int | None = None) -> ResumeReport | None:
        """Restore the newest valid step (or exactly ``step``); None only if nothing was ever published here.

        Damaged steps are skipped with a warning and set aside as ``step-N.damaged-…``. Steps newer than the resumed
        one are set aside as ``step-N.superseded-…``: if the run stops again, it resumes from its own steps. Steps with
        another step's manifest (an old manifest, or a renamed directory) or with a malformed document count as
        damaged. Collective.

        Raises :class:`NoCheckpointError` if steps exist and none is valid; :class:`PlanError` or
        :class:`StateError` if a valid step does not fit the live objects (nothing is set aside then).
        """
        ranks = self._ranks()
        self._check_open()
        self.wait()
        damaged: dict[int, str] = {}
        for candidate, path in self._candidates(ranks, step):
            try:
                with ranks.agree(f"check step {candidate}"):
                    if ranks.rank == 0:
                        quick_check(path, candidate, ranks.tick)
                report = restore_into(state, path, ranks, self._io)
            except ShardwiseError as error:
                if not is_damage(error):
                    raise
                damaged[candidate] = str(error)
                if ranks.rank == 0:
                    _log.warning("skipping damaged %s: %s", path, error)
                continue
            self._lineage = None  # no save goes on from this step while newer ones are not set aside
            superseded = self._set_aside(ranks, candidate, damaged)
            self._lineage = Lineage(report.run_id, candidate)
            return report.with_history(damaged, superseded)
        self._raise_if_lost(ranks, step, damaged)
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self.root}: this Checkpointer is closed; make a new one")

    def _name_of_next(self, step: int) -> str:
        """The name of the directory for the next save. Refuses to mix runs: all published steps must be this run's own. For rank 0."""
        self._check_open()
        steps = self._line.held_steps()
        if steps and self._lineage is None:
            raise CheckpointError(
                f"{self.root}: holds steps {sorted(steps)[-3:]} that this run did not resume from; call resume() first, "
                f"or give this run another directory"
            )
        name = self._line.fresh_name(step)
        if steps and step <= max(steps):
            raise CheckpointError(
                f"{self.root}: step {step} is not newer than the published step {max(steps)}"
            )
        return name

    def _ranks(self) -> Ranks:
        return Ranks.current(timeout_s=self._io.timeout_s)

    def _candidates(self, ranks: Ranks, step: int | None) -> list[tuple[int, str]]:
        """The steps to try, newest first, as rank 0 sees them."""

        def scan() -> list[list[Any]]:
            steps = self._line.steps()
            if step is not None and step not in steps:
                raise CheckpointError(f"{self.root}: no step {step}; there are {sorted(steps)}")
            return [[s, name] for s, name in steps.items() if step in (None, s)]

        found = ranks.on_first("scan checkpoint directory", scan)
        return [(s, join(self.root, name)) for s, name in found]

    def _set_aside(self, ranks: Ranks, resumed: int, damaged: dict[int, str]) -> tuple[int, ...]:
        def move() -> list[int]:
            newer = [s for s in self._line.steps() if s > resumed]
            self._line.take(resumed, dict.fromkeys(damaged, "damaged"))
            return newer

        return tuple(s for s in ranks.on_first("set newer steps aside", move) if s not in damaged)

    def _raise_if_lost(self, ranks: Ranks, step: int | None, damaged: dict[int, str]) -> None:
        def check() -> None:
            if damaged:
                self._line.steps()  # raises if another run has changed the line, whose retention may have deleted these steps
            if strange := self._line.strangers(damaged):
                raise NoCheckpointError(strange)
            if damaged or self._line.was_ever_published():
                found = "; ".join(f"step {s}: {why}" for s, why in damaged.items()) or "all were set aside"
                which = "none is valid" if step is None else f"step {step} is not valid"
                raise NoCheckpointError(
                    f"{self.root}: steps were published, but {which} ({found}). Move the directory away "
                    f"to start anew, or rename a step that was set aside"
                )
            if others := [] if is_url(self.root) else dcp_directories(self.root):
                path = os.path.join(self.root, others[-1])
                _log.warning(
                    "%s: no step of shardwise to resume from; it holds DCP directories: %s. "
                    "To begin with the state of one, call sw.restore(state, %r) where resume() returned None",
                    self.root,
                    ", ".join(others[-3:]),
                    path,
                )

        ranks.on_first("find a checkpoint", check)

    def _prune(self, newest: int, on_progress: Callable[[], object]) -> None:
        """Delete steps older than the ``keep_last`` newest valid ones. For rank 0.

        Never makes the save fail: the step is published, and an extra old step does no harm.
        """
        if self._keep_last is None:
            return
        try:
            steps = {s: name for s, name in self._line.steps().items() if s <= newest}
        except (CheckpointError, SourceError) as error:
            _log.warning("no step is deleted: %s", error)
            return
        valid, excess = 0, []
        for step, name in steps.items() if len(steps) > self._keep_last else ():
            if valid < self._keep_last:
                valid += _is_whole(join(self.root, name), step, on_progress)
            elif self._keep_every is None or step % self._keep_every:
                excess.append(step)
        self._line.remove(excess)


def _is_whole(path: str, step: int, on_progress: Callable[[], object]) -> bool:
    """Whether retention may count a step. A step that can't be read does not count: then fewer are deleted."""
    try:
        check_files(path, step, on_progress)
    except ShardwiseError as error:
        _log.warning("retention does not count %s: %s", path, error)
        return False
    return True
