"""``save`` and ``Checkpointer``: training state in and out of a directory of steps (format: docs/format.md)."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Literal

from ..errors import CheckpointError, ShardwiseError, is_corruption, is_unreadable
from ..format.header import checked_step
from ..objects import gc_paused
from ..operations.operation import announced, this_operation
from ..planning.plan import IOOptions
from ..publish.lock import open_for_all
from ..publish.places import Target, delete_sealed, target_of
from ..publish.sites import PartTarget, Sites, meet, settle_parts
from ..ranks.ranks import Ranks, patiently
from ..ranks.stop import PreemptionPolicy, Stops
from ..state.optimizer import TrainState
from ..storage import absolute
from ..storage.records import counting, is_url, join
from .held import MemorySteps
from .resume_report import ResumeReport, logged
from .run import (
    SAVED,
    Candidate,
    Due,
    FailurePolicy,
    Failures,
    RefusalError,
    Retention,
    RunSteps,
    SaveTimes,
    Situation,
    Stored,
    way_for_all,
)
from .save import AsyncSave, SaveReport, reserve_for, write_checkpoint
from .sites import opened
from .take import InMemoryCheckpoints, Lineage, StagingBuffer, collect
from .verify import quick_check

_log = logging.getLogger(__name__)
_NUMBERS = itertools.count()


def save(
    state: TrainState, path: str | os.PathLike[str], *, step: int = 0, io: IOOptions | None = None
) -> SaveReport:
    """Write ``state`` as one checkpoint directory at ``path``, completely or not at all.

    ``path`` can be a URL of an object store that supports conditional writes. Each rank writes its own shards; replicated tensors are written
    once. Every rank of the default process group must call it. Memory in addition to the live tensors: at most 32 MiB for tensors on CPU, plus
    the tensors in documents (at most 64 MiB for the custom state of each model or optimizer). Raises :class:`StateError` before anything is
    written, :class:`CheckpointError` if ``path`` exists, :class:`LockedError` if another save is writing to the URL (or was killed while
    writing), and :class:`RankError` on every rank.
    """
    return save_at(target_of(absolute(path)), state, step, io)


def save_at(
    target: Target,
    state: TrainState,
    step: int,
    io: IOOptions | None = None,
    *,
    base: dict[tuple[str, str], int] | None = None,
) -> SaveReport:
    """As :func:`save`, at a place that may be one of several. ``base``: :attr:`.Lineage.base` of the run's saves."""
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    run_id = ranks.on_first("run id", _new_run_id)
    return write_checkpoint(state, target, step, Lineage(run_id, None, {} if base is None else base), ranks)


def _new_run_id() -> str:
    return secrets.token_hex(8)


class Checkpointer:
    """Save the checkpoints of one run to a directory, delete old ones, and resume from the newest valid one.

    Args:
        root: directory of the checkpoints, created if needed. Only one run at a time may use it (it holds an advisory lock). It can
            also be the URL of an object store that supports conditional writes. There, the run that saved or resumed last owns the
            URL, and the previous owner gets a :class:`LockedError` at its next save.
        save_every: how often :meth:`should_save` returns True: a number of steps, or a ``datetime.timedelta`` since the last save.
        keep_last: number of newest valid steps to keep; None keeps all of them. A step counts as valid here if its manifest is intact and
            belongs to this run, and every file has the recorded size. Tensor data isn't read, so only a resume or ``verify`` detects
            corrupted bytes. A step with a missing file doesn't count, and is deleted once enough newer steps are valid. Links, and
            directories without a manifest from this run, are ignored and never deleted.
        keep_every: never delete steps that are divisible by this number.
        mirror: a second directory or URL. A thread on rank 0 copies each published step there, newest first, and checks the copy against
            the manifest. ``keep_last`` and ``keep_every`` apply there, too. A resume uses the mirror for a step that is missing or damaged in
            ``root``. A failed copy is logged and retried after the next save. For rank 0's memory during a copy, see
            :func:`copy_checkpoint`.
        mode: ``"sync"``: ``save`` returns when the step is published. ``"async"``: ``save`` returns when the state is copied (on a
            device: when the copies are enqueued, ahead of any later work on the current stream), and a background thread hashes,
            writes and publishes it.
        max_staging_bytes: host memory per rank for the copy that ``"async"`` makes. None: as much as the rank's state needs. With less,
            ``save`` copies the state in several rounds and returns after the last one. The memory is pinned if the state is on a device.
        failures: how to handle a save that fails because of a storage problem; see :class:`FailurePolicy`. None: ``save`` raises. With
            ``mode="async"``, the failure appears in the report of the next save, which goes to the policy's fallback. :meth:`wait` and
            :meth:`close` always raise.
        preemption: the signals that ask the run to stop, and how much time it then has; see :class:`PreemptionPolicy` and
            :meth:`should_stop`. None: no signals; :meth:`request_stop` works either way.
        memory: also keep steps in the hosts' memory; see :meth:`remember`. A resume uses the newest step, in memory or on disk.
        local: each host only stores its own ranks' files, in a ``root`` on its local disk (the path may differ between ranks). Every host
            stores the manifest, which lists hosts and ranks. A resume needs every host that saved the step, or all parts
            merged into one directory. Additional hosts and a different number of ranks are fine. See docs/howto/several-hosts.md.
        io: staging memory for a resume, and time limits.

    Every rank of the default process group must make every call. A call raises :class:`LockedError` on every rank if another run has
    locked the directory or taken it over. The lock is checked at each save, and again just before the step is published. Call
    :meth:`close` before ``destroy_process_group``, because a pending async save still needs the group. After a :class:`RankError` with missing
    ranks, restart all processes: the slow ranks are out of sync.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every: int | timedelta | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        mirror: str | os.PathLike[str] | None = None,
        mode: Literal["sync", "async"] = "sync",
        max_staging_bytes: int | None = None,
        failures: FailurePolicy | None = None,
        preemption: PreemptionPolicy | None = None,
        memory: InMemoryCheckpoints | None = None,
        local: bool = False,
        io: IOOptions | None = None,
    ) -> None:
        for name, value in (
            ("keep_last", keep_last),
            ("keep_every", keep_every),
            ("max_staging_bytes", max_staging_bytes),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}")
        if mode not in ("sync", "async"):
            raise ValueError(f"mode must be 'sync' or 'async', got {mode!r}")
        self._failures, self._times = Failures.under(failures), SaveTimes()
        fallback = self._failures.fallback
        if local and (is_url(os.fspath(root)) or any(x is not None for x in (mirror, fallback, memory))):
            raise ValueError(
                "local=True needs a directory as root, and can't be combined with a mirror, a fallback or memory"
            )
        if memory is not None and is_url(os.fspath(root)):
            raise ValueError(f"memory= needs a directory for the run's steps, not a URL: {root}")
        self.root = absolute(root)
        self._steps = RunSteps(
            self.root,
            None if mirror is None else absolute(mirror),
            Retention(keep_last, keep_every),
            fallback,
            sweeps=not local,  # what another host knows decides about parts of steps
        )
        self._sites = Sites()
        self._io, self._due = io or IOOptions(), Due(save_every)
        self._buffer = StagingBuffer() if mode == "async" else None
        self._max_staging_bytes = max_staging_bytes
        self._pending: AsyncSave | None = None
        self._closed = False
        self._lineage: Lineage | None = None
        self._place = 0  # of the next async save
        self._memory: MemorySteps | None = None
        self._on_disk: int | None = None
        with (
            ExitStack() as undo
        ):  # also if another rank failed or is missing: the caller gets no object to close
            undo.callback(self._steps.close)
            self._channel = self._open(self._ranks(), local=local)
            self._stops = Stops(preemption, self._ranks())
            undo.callback(self._stops.close)
            if memory is not None:
                self._memory = MemorySteps(memory, self.root, self._ranks())
            undo.pop_all()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except ShardwiseError as error:
            if kind is None:
                raise
            _log.warning("the async save failed, too: %s", error)  # the body's own error comes first

    def _open(self, ranks: Ranks, *, local: bool) -> str:
        """Lock the directory, or each host's, and look whether all ranks can work there. Collective. Returns the channel of the background
        thread's agreements: each Checkpointer has one of its own, because two may write at a time.
        """

        def take() -> str:
            self._steps.open()
            return f"async-{next(_NUMBERS)}-"

        if not local:
            return open_for_all(self.root, take, ranks)
        self._sites, channels = meet(self.root, "lock checkpoint directories", take, ranks)
        settle_parts(self.root, self._sites, ranks)
        return channels[0]

    def close(self) -> None:
        """Wait for the pending async save and the mirror, then release the directory. Later saves and resumes raise.

        Every rank must call it, before ``destroy_process_group``. Only rank 0 waits for the mirror; if the process ends without this call,
        the mirror may lack the last step. Raises the pending save's error on every rank (:class:`CheckpointError` if the process
        group is gone), and releases the directory even then. After Ctrl-C a save may still be running: the directory stays locked until
        you call ``close`` again.
        """
        try:
            self.wait()
        finally:
            if self._pending is None:  # else Ctrl-C: the save still runs, so no other run may write here yet
                self._closed = True
                if self._buffer is not None:
                    self._buffer.release()
                try:
                    self._close_memory()
                finally:
                    self._stops.close()
                    with self._ranks().patience():
                        self._steps.close()

    @property
    def staging_bytes(self) -> int:
        """Host memory in the staging buffer, which this rank keeps from save to save until :meth:`close`; 0 for ``"sync"``.

        For pinned memory, the amount that torch actually allocated.
        """
        return self._buffer.nbytes if self._buffer is not None else 0

    @property
    def mirrored(self) -> int | None:
        """The newest step that rank 0 has copied to the mirror and verified there; None on other ranks, and before the first copy."""
        return self._steps.mirror.newest if self._steps.mirror is not None else None

    @property
    def stored(self) -> Stored | None:
        """The contents of the URL after the last save deleted old steps, as rank 0 listed them. None on other ranks, for a directory, and
        without ``keep_last``. Also logged.
        """
        return self._steps.stored

    @property
    def is_saving(self) -> bool:
        """Whether an async save is running on this rank."""
        return self._pending is not None and self._pending.is_running

    def prepare(self, state: TrainState) -> int:
        """Allocate the staging buffer for ``state`` now, so that the first save doesn't have to. Returns its size in bytes.

        Every rank must call it. If the optimizer has no state yet, the buffer grows at the first save that has some. Does nothing
        for ``"sync"``.
        """
        if self._buffer is not None:
            self.wait()
            ranks = self._ranks()
            collected = collect(state, 0, Lineage("", None), ranks)
            reserve_for(collected, self._buffer, ranks, self._max_staging_bytes)
        return self.staging_bytes

    def wait(self) -> SaveReport | None:
        """Block until a pending async save is published. Returns its report, or None if no save is pending.

        If the save failed, raises its error on every rank, once. Earlier steps are unaffected.
        """
        pending = self._pending
        if pending is None:
            return None
        try:
            report = pending.wait()
        except Exception:
            self._place = self._steps.fallback or 0
            raise
        finally:
            if not pending.is_running:  # else Ctrl-C: it still writes, from the same buffer
                self._pending = None
        assert self._lineage is not None
        self._lineage, self._on_disk = self._lineage.at(pending.step), pending.step
        self._times.add(report.seconds)
        self._failures.succeed()
        return report

    def should_save(self, step: int) -> bool:
        """Whether it's time to save ``step``, according to ``save_every``. All ranks get the same answer.

        Call it once after each step, with the step's number, on every rank. It returns False for a step that is already saved. With a number of
        steps, each rank computes the answer on its own. With a time, rank 0's clock decides, and the other ranks ask it about ten times between
        two saves. Raises :class:`ValueError` without ``save_every``, and :class:`RankError`, like :meth:`save`.
        """
        self._check_open()
        newest = None if self._lineage is None else self._lineage.parent_step
        return self._due.at(checked_step(step), newest, self._ranks())

    def save(self, state: TrainState, step: int) -> SaveReport:
        """Publish ``state`` as ``step``, then delete old steps. Every rank must call it. Raises the errors of :func:`save`.

        With ``"async"``, it first waits for the previous save, and returns once the state is copied. If the background thread fails, the next
        call raises the error, or with a :class:`FailurePolicy` reports it (``failure``, ``failed_step``).

        If a save fails, earlier steps are unaffected, and ``step`` isn't published unless the failure came after the rename (then it is
        complete). Raises :class:`CheckpointError` for a step that isn't newer than all published ones, and for the first save into a directory
        with steps from a run that this one didn't resume.
        """
        called = time.perf_counter()
        step, ranks = checked_step(step), self._ranks()
        failed = self._settle()
        first, self._place = self._place, 0
        fallback = self._steps.fallback
        places = [first] if first or fallback is None else [first, fallback]
        ways = {
            self._steps.lines[place].root: partial(self._save_at, place, state, step, ranks, called)
            for place in places
        }
        report = self._failures.attempt(step, ways, is_first_rank=ranks.rank == 0)
        self._due.restart()
        return report if failed is None else report.after_failure(*failed)

    def _settle(self) -> tuple[int, str] | None:
        """Wait for a pending async save. Its failure passes if failures may: returns its step, and why it failed."""
        pending = self._pending
        try:
            self.wait()
        except Exception as error:
            assert pending is not None
            self._failures.note(error, pending.step, is_first_rank=self._ranks().rank == 0)
            return pending.step, str(error)
        return None

    def _save_at(self, place: int, state: TrainState, step: int, ranks: Ranks, called: float) -> SaveReport:
        try:
            name = self._name_for(step, place, ranks)
        except CheckpointError as error:
            raise RefusalError(error) from error
        target = self._steps.lines[place].target(name)
        if self._sites.places:
            target = PartTarget(target.final, self._sites)
        if self._lineage is None:
            self._lineage = self._begin_run(ranks)
        if self._buffer is not None:
            return self._save_async(state, target, step, place, self._buffer, called)
        report = write_checkpoint(state, target, step, self._lineage, ranks)
        self._lineage, self._on_disk = self._lineage.at(step), step
        self._after_save(step, place, ranks)
        self._times.add(report.seconds)
        return report

    def _begin_run(self, ranks: Ranks) -> Lineage:
        return Lineage(ranks.on_first("run id", _new_run_id), None)

    @announced("save", "step")
    @gc_paused()
    def _save_async(
        self, state: TrainState, target: Target, step: int, place: int, buffer: StagingBuffer, called: float
    ) -> SaveReport:
        ranks, lineage = self._ranks(), self._lineage
        assert lineage is not None
        collected = collect(state, step, lineage, ranks)
        staged = reserve_for(collected, buffer, ranks, self._max_staging_bytes)
        ranks_of_thread = Ranks.current(timeout_s=self._io.timeout_s, channel=self._channel)
        with ranks.agree("copy documents"):  # if one rank has no memory for them, no rank saves
            pending = AsyncSave(
                collected,
                target,
                staged,
                ranks_of_thread,
                lambda: self._after_save(step, place, ranks_of_thread),
                called,
            )
        self._pending = pending
        return pending.copy()

    # -- resuming ------------------------------------------------------------------------------------------

    @logged
    @announced("resume", "step")
    def resume(self, state: TrainState, step: int | None = None) -> ResumeReport | None:
        """Restore the newest valid step (or exactly ``step``). Returns None only if nothing was ever published here.

        Damaged steps are skipped with a warning and renamed to ``step-N.damaged-…``. Steps newer than the resumed one are renamed to
        ``step-N.superseded-…``, so that the next restart resumes from this run's steps. A step also counts as damaged if its manifest
        belongs to a different step (an old manifest, or a renamed directory), or if one of its documents is malformed. Every rank must call it.

        Raises :class:`NoCheckpointError` if there are steps but none is valid, and :class:`PlanError` or :class:`StateError` if a
        valid step doesn't fit the live objects (nothing is renamed then).
        """
        with counting() as asked:
            report = self._resume(state, step, self._ranks())
        return None if report is None else replace(report, requests=asked.total)

    def _resume(self, state: TrainState, step: int | None, ranks: Ranks) -> ResumeReport | None:
        self._check_open()
        self.wait()
        damaged: dict[int, dict[int, str]] = {}
        for one in self._candidates(step, ranks):
            try:
                report = self._restore(state, one, ranks)
            except ShardwiseError as error:
                if one.held is not None and self._memory is not None:
                    if not is_corruption(error) and not _is_of_memory(error):
                        raise
                    self._memory.failed.append(one.held)
                else:
                    damage = is_corruption(error)
                    if damage or is_unreadable(error):
                        self._sites.on_each("check the steps again", self._steps.raise_if_taken, ranks)
                    if not damage:
                        raise
                    damaged.setdefault(one.place, {})[one.step] = str(error)
                if ranks.rank == 0:
                    what = f"damaged {one.path}" if one.held is None else f"step {one.step} in memory"
                    _log.warning("skipping %s: %s", what, error)
                continue
            newer = self._go_on_from(one.step, damaged, ranks)
            self._lineage = Lineage(report.run_id, one.step)
            if one.held is not None and self._memory is not None:
                self._memory.took(one.held)
            else:
                self._on_disk = one.step
            bad = {s: why for place in sorted(damaged, reverse=True) for s, why in damaged[place].items()}
            return report.with_history(bad, tuple(s for s in newer if s not in bad))
        self._sites.on_each("find a checkpoint", lambda: self._steps.raise_if_lost(step, damaged), ranks)
        return None

    def _candidates(self, step: int | None, ranks: Ranks) -> list[Candidate]:
        """The steps to try, newest first; one in memory before the same one on disk. Of hosts with directories of their own, each may lack
        some."""
        asked = None if self._sites.places else step
        lists = self._sites.on_each("scan checkpoint directory", lambda: self._steps.candidates(asked), ranks)
        every = {(s, place): name for found in lists for s, place, name in found}
        if asked != step and all(s != step for s, _ in every):
            raise CheckpointError(
                f"{self.root}: no step {step} on any host; there are {sorted({s for s, _ in every})}"
            )
        lines = self._steps.lines
        found = [Candidate(s, place, join(lines[place].root, n)) for (s, place), n in every.items()]
        if (memory := self._memory) is not None:
            held = [one for one in memory.candidates(ranks) if one not in memory.failed]
            found += [Candidate(one.step, -1, memory.path_of(one), one) for one in held]
        return sorted((c for c in found if step in (None, c.step)), key=lambda c: (-c.step, c.place))

    def _restore(self, state: TrainState, one: Candidate, ranks: Ranks) -> ResumeReport:
        """Check a step, and restore it. Raises damage as :func:`.is_corruption` says."""
        from .restore import restore_into  # and with it what loads, for which no first save waits

        if one.held is not None and self._memory is not None:
            with self._memory.opened(one.held, ranks) as (view, brought):
                report = restore_into(state, view, ranks, self._io)
            return replace(report, path=f"memory: {one.path}", from_memory=True, fetched=dict(brought))
        if not self._sites.places:
            with ranks.agree(f"check step {one.step}"):
                if ranks.rank == 0:
                    patiently(quick_check, one.path, one.step, ranks.tick)
            this_operation().begin_again(one.path)
            return restore_into(state, one.path, ranks, self._io)
        with opened(one.path, one.step, self._sites, ranks, self._io) as there:
            this_operation().begin_again(one.path)
            return replace(restore_into(state, there.path, ranks, there.io), path=one.path)

    def _go_on_from(self, step: int, damaged: Mapping[int, Mapping[int, str]], ranks: Ranks) -> list[int]:
        """Rename the steps newer than a resumed one. Returns them, newest first. Collective."""
        self._lineage = None  # no save may continue from this step while newer ones are in the way
        newer = self._sites.on_each(
            "rename newer steps", partial(self._steps.go_on_from, step, damaged), ranks
        )
        if self._memory is not None:
            self._memory.begin_line(step, ranks)
        return sorted(set().union(*newer), reverse=True)

    # -- steps in memory -----------------------------------------------------------------------------------

    def remember(self, state: TrainState, step: int) -> int:
        """Keep ``state`` in the hosts' memory if ``step`` is divisible by ``InMemoryCheckpoints.every``. Returns how many bytes this rank copied.

        Call it after each step; it does nothing without ``memory=``. It returns once the state is copied; during the copy, a thread compares
        it with the state of the other ranks. In the background, the thread then hashes the copy and exchanges slices with other hosts. Returns 0 if the step isn't due,
        if the previous step is still being copied on some rank, or if ranks are missing. Failures (tmpfs is full, a host was lost)
        are logged, and training continues. Every rank must call it. Raises :class:`StateError` for state that can't be
        stored, and :class:`CheckpointError` for a directory with another run's steps.
        """
        memory, step = self._memory, checked_step(step)
        if memory is None or not memory.is_due(step):
            return 0
        self._check_open()
        ranks = self._ranks()
        if self._lineage is None:
            self._name_for(step, 0, ranks)
            self._lineage = self._begin_run(ranks)
        return memory.save(state, step, self._lineage, ranks)

    def wait_for_memory(self) -> int | None:
        """Block until the step that :meth:`remember` copied is complete on all hosts. Returns the newest step in memory."""
        return None if self._memory is None else self._memory.wait()

    def _close_memory(self) -> None:
        """Give the memory back, unless it holds a step that disk does not, or the run was told to stop."""
        memory = self._memory
        if memory is not None:
            is_newer = memory.wait() is not None and (
                self._on_disk is None or (memory.newest or 0) > self._on_disk
            )
            memory.close(keep=is_newer or self._stops.has_stopped, ranks=self._ranks())

    # -- stopping ------------------------------------------------------------------------------------------

    def should_stop(self, step: int) -> bool:
        """Whether the run was asked to stop, by a signal on any rank or by :meth:`request_stop`. True in the same call on every rank.

        Call it after each step, and as often as you like in between: during a warm-up, or for each batch of an evaluation (with the training
        step's number). Every rank must make the same calls with the same steps, from the main thread. A call isn't a collective, and
        only waits for rank 0. It takes about a microsecond, and every 20 ms or so it also checks the process group's store
        (docs/howto/preemption.md has numbers). If calls are 0.5 s or more apart, all ranks stop at the call in which rank 0 learns of the
        signal, or at the next one. With more frequent calls, they stop at most 12 calls later.

        When it returns True, call :meth:`stop` and exit with :attr:`exit_code`. Raises :class:`RankError` on all ranks if their calls differ, or if
        rank 0 doesn't make the call within ``IOOptions.timeout_s``.
        """
        if not self._stops.has_stopped:
            self._check_open()
        return self._stops.should_stop(checked_step(step), self._ranks())

    def request_stop(self) -> None:
        """Ask all ranks to stop, as a signal would: at a time limit, or when the loss is NaN, for example. One rank's call is enough."""
        self._stops.request()

    @property
    def exit_code(self) -> int:
        """Pass this to ``sys.exit``: ``exit_status`` (75) if the run was stopped, so that the scheduler or launcher restarts it, otherwise 0."""
        return self._stops.exit_code

    def stop(self, state: TrainState, step: int) -> int | None:
        """Save ``state`` as ``step`` in the fastest way that is safe, then :meth:`close`. Returns the newest published step.

        A step that is already saved, or about to be published by an async save, isn't saved again. A pending save is always awaited, because
        no new save could be faster. If the time left until ``deadline_s`` is shorter than previous saves took, the run ends with the
        previous step. A second signal, 2 s or more after the first, means that no time is left. If the scheduler kills the process during the save,
        the previous step is unaffected. Every rank must call it. Raises the errors of :meth:`save` and :meth:`close`.
        """
        step, ranks = checked_step(step), self._ranks()
        for _ in range(2):  # what fails is tried once more, an async save in the fallback
            saves, why = ranks.combine(
                "plan the last save", lambda: self._situation(step).to_list(), way_for_all
            )
            if not saves:
                if ranks.rank == 0 and why != SAVED:
                    _log.warning("step %d was not saved: %s", step, why)
                break
            self.save(state, step)
            self._settle()
        self.close()
        newest = None if self._lineage is None else self._lineage.parent_step
        if ranks.rank == 0:
            _log.warning("stopped after step %d; the newest saved step is %s", step, newest)
        return newest

    def _situation(self, step: int) -> Situation:
        pending, newest = self._pending, None if self._lineage is None else self._lineage.parent_step
        return Situation(
            step,
            newest,
            None if pending is None else pending.step,
            0.0 if pending is None else pending.seconds,
            self._times.longest_s,
            self._stops.left_s(),
        )

    # -- for all of these ----------------------------------------------------------------------------------

    def _after_save(self, step: int, place: int, ranks: Ranks) -> None:
        """Apply retention, and let the mirror follow. Collective. Steps in parts count if every host has its own part whole; so all hosts
        delete the same steps."""
        steps, sites = self._steps, self._sites
        agreed: set[int] | None = None
        if sites.places:
            own = sites.places[sites.own].id
            lists = sites.on_each(
                "look at the steps", lambda: steps.newest_whole(step, own, ranks.tick), ranks
            )
            agreed = set.intersection(*map(set, lists))
        with ranks.agree("retention"):
            if sites.leads(ranks.rank):
                steps.after_save(step, ranks.tick, place, agreed)
                if sites.places:
                    delete_sealed(self.root)  # those of older steps are of no use now

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self.root}: this Checkpointer is closed; create a new one")

    def _name_for(self, step: int, place: int, ranks: Ranks) -> str:
        """The name of the next step's directory. Collective."""

        def name() -> str:
            self._check_open()
            return self._steps.name_of_next(step, has_begun=self._lineage is not None, place=place)

        return self._sites.on_each("check checkpoint directory", name, ranks)[0]

    def _ranks(self) -> Ranks:
        return Ranks.current(timeout_s=self._io.timeout_s)


def _is_of_memory(error: ShardwiseError) -> bool:
    """Whether memory does not hold a step, on whichever rank: then disk may."""
    if isinstance(error, CheckpointError):
        return True
    causes = getattr(error, "causes", {})
    return bool(causes) and all(
        c.startswith(("CheckpointError", "LowSpaceError", "IntegrityError")) for c in causes.values()
    )
