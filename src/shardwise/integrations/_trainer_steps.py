"""Saving, resuming and stopping in the Trainer integration."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from ..checkpoint.resume_report import ResumeReport, log_resume
from ..checkpoint.run import Failures, LastSave
from ..checkpoint.save import SaveReport, write_checkpoint
from ..checkpoint.sites import Hosts, OneForAll, Opened
from ..checkpoint.take import Lineage
from ..errors import CheckpointError, NoCheckpointError, ShardwiseError, is_damage
from ..export.hub import export_hf
from ..format.header import TRAINER_FILE
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..internals.peft import peft_model
from ..internals.trainers import end_epoch, keeps_completions
from ..loading.load import load
from ..publish.line import Line
from ..publish.lock import remove_ours
from ..publish.places import make_temporary
from ..ranks.ranks import Ranks, patiently
from ..ranks.stop import PreemptionPolicy, Stops
from ..rng import capture_rng, restore_rng
from ..runs.history import lost_parts, ranks_of
from ..runs.run import restore_unlogged
from ..state.arguments import given_settings_of, replaced_settings
from ..state.optimizer import TrainState
from ..state.parts import own_states, put_own_states
from ..storage import absolute, is_directory, is_file
from ..storage.records import is_url, join
from ..tensors.live import describe
from ..tensors.placements import mesh_text
from ._accelerate import explained
from ._trainer_data import DataPlace, check_place
from ._trainer_files import (
    ADAPTER,
    FULL,
    Run,
    adapter_files,
    add_beside,
    contents,
    drop_empty_weights,
    gathered,
    held,
    into_model,
    is_ours,
    keep_only,
    move_into,
    newest,
    overrides,
    path_in,
    read_all,
    rotate,
    save_processing,
    set_newer_aside,
    trainer_line_of,
    without_fsdp,
)
from .trl import LOAD, generation_state, stores_completions

__all__ = [
    "EpochEnds",
    "Resuming",
    "Saving",
    "StopCallback",
    "StoppedInEvaluationError",
    "Stopping",
]


# ----------------------------------------------------------------------------------------------------
# The saving half of the Trainer integration: ``checkpoint-N`` as one shardwise checkpoint, and exports.


class EpochEnds(TrainerCallback):
    """Whether the end of the present epoch has come: its callbacks, and its evaluation."""

    has_come = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.has_come = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.has_come = True


class Saving(Trainer):
    """The saving methods of :class:`.trainer.ShardwiseTrainer`, which documents the contract."""

    model: Any
    _run: Run
    _data: DataPlace
    _checkpoint_root: str | None = None
    _epoch_ends: EpochEnds
    _failures: Failures
    _hosts: Hosts
    save_report: SaveReport | None = None
    """The report of the last save that was attempted. If it failed and training continued, ``failure`` says why."""
    _staging: str | None = None
    _writes_beside = False
    _processing_files: Mapping[str, bytes] = {}
    _failed_beside: Exception | None = None

    @property
    def _root(self) -> str:
        return os.path.abspath(self.args.output_dir or ".")

    @property
    def _checkpoints(self) -> str:
        """The directory or URL of the checkpoints."""
        return self._checkpoint_root or self._root

    def _get_output_dir(self, trial: Any) -> str:
        """Where Trainer looks for the checkpoints of a run, and writes them."""
        if self._staging is not None:
            return self._staging
        return self._below(self._checkpoints, trial)

    def _below(self, root: str, trial: Any) -> str:
        """The folder of a run below a place of checkpoints: a search over hyperparameters has one for each trial."""
        below = os.path.relpath(super()._get_output_dir(trial), self._root)
        return root if below == "." else join(root, below)

    def _places(self, trial: Any = None) -> list[str]:
        """The directory or URL of the checkpoints, then the fall-back if there is one."""
        return [absolute(self._below(root, trial)) for root in self._failures.roots(self._checkpoints)]

    def _lines(self, trial: Any = None) -> list[Line]:
        """Where the checkpoints of this call of ``train`` lie, in the order of :meth:`_places`."""
        lines = self._run.lines
        for root in self._places(trial):
            if root not in lines:
                lines[root] = trainer_line_of(root, sweeps=not self._hosts.is_local)
        return [lines[root] for root in self._places(trial)]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save where storage lets it; a failure passes if failures may."""
        ranks, run, step = Ranks.current(), self._run, self.state.global_step
        if step in run.published:  # an evaluation at the end of the epoch may have come after the save
            root = self._lines(trial)[0].root
            best = self._hosts.on_own(
                root, "look at checkpoints", lambda: self._best(trial, run.published[step])
            )
            self._name_best(best)
            return
        ways = {line.root: partial(self._save_at, line, model, trial) for line in self._lines(trial)}
        self.save_report = self._failures.attempt(step, ways, is_first_rank=ranks.rank == 0)

    def _save_at(self, line: Line, model: Any, trial: Any) -> SaveReport:
        """Let Trainer write its small files into a separate folder, then publish everything at once."""
        ranks, run, step = Ranks.current(), self._run, self.state.global_step
        lines, best_before = self._lines(trial), self.state.best_model_checkpoint
        hosts = self._hosts
        name, best = hosts.on_own(line.root, "look at checkpoints", lambda: self._look(line, trial))
        place = ranks.on_first("place in the data", self._place)
        try:
            files = self._files_beside(model, trial, best, ranks)
            scratch = None if hosts.is_local else self._root if is_url(line.root) else line.root
            files = adapter_files(self.model, scratch, ranks) | gathered(ranks, files)
            with ranks.agree("collect the Trainer's state"):
                state = self._train_state(optimizer=not self.args.save_only_model, files=files, place=place)
            # The place that does not take the save may be gone. Once a save is published, nothing newer can be there.
            looked_at = [line] if max(run.published, default=-1) > run.resumed_step else lines
            hosts.on_own(line.root, "rename newer checkpoints", lambda: set_newer_aside(looked_at, run))
            lineage = Lineage(ranks.on_first("run id", lambda: secrets.token_hex(8)), None)
            # A store has no links, and a host has not what other hosts' ranks write.
            at_top = not is_url(line.root) and not hosts.is_local
            target = hosts.target(line.target(name))
            report = write_checkpoint(state, target, step, lineage, ranks, at_top=at_top)
        except BaseException:
            self.state.best_model_checkpoint = best_before  # this one may have been named
            raise
        run.published[step] = report.path
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint

        def clear() -> None:
            line.tidy(step)
            rotate(line, limit, best)

        hosts.on_own(line.root, "rotate checkpoints", clear)
        return report

    def _files_beside(self, model: Any, trial: Any, best: str | None, ranks: Ranks) -> dict[str, bytes]:
        """The small files that Trainer and its subclasses write on this rank, by name. Collective."""
        with contextlib.ExitStack() as stack:
            with ranks.agree("make a folder for Trainer's files"):
                staging = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-"))
                folder = os.path.join(staging, f"checkpoint-{self.state.global_step}")
                patiently(os.mkdir, folder)
            with ranks.agree("write Trainer's files"):
                self._staging, self._failed_beside = staging, None
                try:
                    super()._save_checkpoint(model, trial)
                finally:
                    self._staging = None
                if self._failed_beside is not None:
                    raise self._failed_beside
                self._name_best(best)
                if self.args.should_save:
                    self.state.save_to_json(os.path.join(folder, TRAINER_FILE))
                return read_all(folder)
        raise AssertionError("an agreement raises or returns")

    def _look(self, line: Line, trial: Any) -> list[Any]:
        """A name for this step's checkpoint in a line, and the path of the best one, which may be this. For rank 0."""
        name = line.fresh_name(self.state.global_step)
        return [name, self._best(trial, join(line.root, name))]

    def _best(self, trial: Any, path: str) -> str | None:
        """The path of the best checkpoint, if it is there: one of this run's, or the one of this step, at ``path``. For rank 0."""
        best = self.state.best_global_step
        if not best:
            return None
        if best == self.state.global_step:
            return path
        return next((found for line in self._lines(trial) if (found := path_in(line, best))), None)

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. With ``save_total_limit=1`` the best checkpoint alone stays, also where Trainer sees none."""
        output = super()._finalize_training(trial, *args, **kwargs)  # type: ignore[no-untyped-call]
        best = self.state.best_model_checkpoint
        if best is not None and self.args.save_total_limit == 1:
            lines = self._lines(trial)
            self._hosts.on_own(lines[0].root, "keep the best checkpoint", lambda: keep_only(lines, best))
        return output

    def _train_state(
        self,
        *,
        optimizer: bool = True,
        data: bool = True,
        files: Mapping[str, bytes] | None = None,
        place: Mapping[str, Any] | None = None,
        source: str | None = None,
    ) -> TrainState:
        return TrainState(
            model=self.model,
            optimizer=self.optimizer if optimizer else None,
            scheduler=self.lr_scheduler if optimizer else None,
            scaler=getattr(self.accelerator, "scaler", None) if optimizer else None,
            files=files or {},
            extra={"trainer": {"global_batch_size": self._global_batch_size, **(place or {})}}
            | ({"data": self._data} if data else {})
            | (generation_state(self, source) if optimizer else {}),
        )

    def _place(self) -> dict[str, Any]:
        """The part of the place in the data that is the same on all ranks and at any world size."""
        epoch, batches, ended = self._data.reached()
        is_at_end = ended or batches >= self._run.batches_in_epoch or self.control.should_epoch_stop
        if is_at_end:
            epoch, batches = epoch + 1, 0
        loader = self._run.loader
        return {
            "epoch": epoch,
            "batches": batches,
            "accumulation": self.args.gradient_accumulation_steps,
            "batches_in_epoch": self._run.batches_in_epoch,
            "end_is_due": is_at_end and not self._epoch_ends.has_come,
            "seeds": {} if loader is None else own_states(loader)["seeds"],
        }

    @property
    def _global_batch_size(self) -> int:
        """Samples per step: per device × accumulation × data ranks."""
        if self.accelerator.split_batches:
            return int(self._train_batch_size * self.args.gradient_accumulation_steps)
        return int(self.get_total_train_batch_size(self.args))

    def _name_best(self, best: str | None) -> None:
        """Set the best checkpoint's final path in Trainer's state: Trainer looked for it in the temporary folder."""
        if best is not None:
            self.state.best_model_checkpoint = best

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Part of the checkpoint."""

    def _save_scaler(self, output_dir: str) -> None:
        """Part of the checkpoint."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Part of the checkpoint."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in hub format, or its adapters, with config, tokenizer and arguments, into ``output_dir``.

        The folder may contain other files, such as ``checkpoint-N``. Weights from an earlier export are replaced. Every rank
        must call it. Raises the errors of :func:`shardwise.export_hf`.
        """
        target = os.path.abspath(output_dir or self._root)
        if self._staging is not None:
            try:
                into_model(target, self._write_beside(target))
            except (
                Exception
            ) as error:  # Trainer's next call may be a barrier, in which the other ranks would wait
                self._failed_beside = error
            return
        ranks = Ranks.current()

        unfinished = ranks.on_first(
            "make room for the export", lambda: make_temporary(os.path.join(target, "export"), ())
        )
        folder = os.path.join(unfinished, "files")
        try:
            with_adapters = peft_model(self.model) is not None
            export_hf(self.model, folder)
            with tempfile.TemporaryDirectory(prefix="shardwise-") as staging:
                with ranks.agree("write Trainer's files"):
                    self._write_beside(staging)
                    files = read_all(staging)
                files = gathered(ranks, files)
            with ranks.agree("publish export"):
                if ranks.rank == 0:
                    add_beside(folder, files)
                    move_into(target, folder, ADAPTER if with_adapters else FULL)
        finally:
            if ranks.rank == 0:
                remove_ours(unfinished)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_beside(self, folder: str) -> Collection[str]:
        """Write the files of ``save_model`` and ``_save`` of the other classes, without weights. Returns the names of those that
        tokenizer or processor save."""
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        self._processing_files = save_processing(processing if self.args.should_save else None)
        self._writes_beside = True
        try:
            with without_fsdp(self):
                super().save_model(folder, _internal_call=True)
        finally:
            self._writes_beside = False
        drop_empty_weights(folder)
        return self._processing_files

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write tokenizer and arguments, and the files of the next class's ``_save``, called without tensors."""
        if not self._writes_beside:
            super()._save(output_dir, state_dict)
        elif overrides(type(self), Saving, "_save"):
            super()._save(output_dir, {})
        elif self.args.should_save:
            folder = output_dir or self._root
            patiently(os.makedirs, folder, exist_ok=True)
            add_beside(folder, self._processing_files)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))  # as Trainer does


# ----------------------------------------------------------------------------------------------------
# A Trainer run that signals stop: after a step, or inside an evaluation.

_log = logging.getLogger(__name__)


class StoppedInEvaluationError(Exception):
    """Ends an evaluation on every rank, at the same batch."""


class StopCallback(TrainerCallback):
    """Looks whether to stop after each step and each batch of an evaluation; only while ``train`` runs."""

    def __init__(self) -> None:
        self.stops: Stops | None = None
        self.is_listening = False

    @property
    def has_stopped(self) -> bool:
        return self.stops is not None and self.stops.has_stopped

    def _should_stop(self, state: Any) -> bool:
        if self.stops is None or not self.is_listening:
            return False  # an evaluation outside of ``train``
        return self.stops.should_stop(state.global_step, Ranks.current())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # An evaluation that is due begins and ends with its first batch: its loader draws a number, on which a resume depends.
        if self._should_stop(state):
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.has_stopped:
            control.should_evaluate = False

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._should_stop(state):
            raise StoppedInEvaluationError


class Stopping(Trainer):
    """The stopping methods of :class:`.trainer.ShardwiseTrainer`, which documents the contract."""

    _preemption: PreemptionPolicy | None
    _stopping: StopCallback
    _last_save: LastSave
    _run: Run
    resume_report: Any

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Listen for signals in the block. Collective."""
        self._stopping.stops, self._last_save = None, LastSave()
        if self._preemption is not None:
            self._stopping.stops = Stops(self._preemption, Ranks.current())
            self._stopping.is_listening = True
        try:
            yield
        finally:
            self._stopping.is_listening = False
            if self._stopping.stops is not None:
                self._stopping.stops.close()

    def request_stop(self) -> None:
        """Ask all ranks to stop, as a signal would: at a time limit, or when the loss is NaN. One rank's call is enough, for example in a callback.

        ``train`` checks for requests only with a :class:`shardwise.PreemptionPolicy`; without one, this raises :class:`CheckpointError`. Does
        nothing while ``train`` isn't running.
        """
        if self._preemption is None:
            raise CheckpointError(
                "request_stop: train() doesn't check for stop requests; pass the trainer preemption=shardwise.PreemptionPolicy()"
            )
        if self._stopping.stops is not None and self._stopping.is_listening:
            self._stopping.stops.request()

    @property
    def exit_code(self) -> int:
        """Pass this to ``sys.exit``: the policy's ``exit_status`` if ``train`` was stopped, otherwise 0."""
        return 0 if self._stopping.stops is None else self._stopping.stops.exit_code

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As Trainer's, unless it is the last save and there is no time for it."""
        stops, started = self._stopping.stops, time.monotonic()
        if stops is None or self.state.global_step in self._run.published:
            super()._save_checkpoint(model, trial)
            return
        if self.resume_report is not None:
            self._last_save.resumed()
        if stops.has_stopped and (why := self._last_save.refusal(stops.left_s(), Ranks.current())):
            _log.warning("checkpoint %d was not saved: %s", self.state.global_step, why)
            return
        super()._save_checkpoint(model, trial)
        if self.state.global_step in self._run.published:
            self._last_save.saved(time.monotonic() - started)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; but a run that was stopped goes on from its newest checkpoint, so neither is the best model loaded, nor does
        ``save_total_limit=1`` leave the best checkpoint alone."""
        best = self.state.best_model_checkpoint
        if self._stopping.has_stopped:
            self.state.best_model_checkpoint = None
        output = super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.state.best_model_checkpoint = best
        return output

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As Trainer's; an evaluation that a signal has stopped has no metrics."""
        try:
            metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        except StoppedInEvaluationError:
            self.control.should_training_stop = self.control.should_save = True
            return {}
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As Trainer's; without metrics nothing is compared, and the step is saved."""
        return True if self._stopping.has_stopped else bool(super()._determine_best_metric(metrics, trial))


# ----------------------------------------------------------------------------------------------------
# The resuming half of the Trainer integration: the newest undamaged checkpoint, at its place in the data.


class _DamagedError(Exception):
    """The checkpoint to resume from is damaged, as reading it has shown; an older one may be intact."""


class Resuming(Stopping, Saving):
    """The resuming methods of :class:`.trainer.ShardwiseTrainer`, which documents the contract."""

    resume_report: ResumeReport | None = None
    """The report of the last ``train`` that resumed. A checkpoint of the plain Trainer is read by Trainer's own code; the
    report says what it restores."""
    reads_again: bool = True
    """Whether a resume inside an epoch reads the epoch's earlier batches again if their items may draw random numbers (always assumed with
    ``dataloader_num_workers``, otherwise only if they were observed to). False: skip them by index, as Trainer does, which takes no time; the
    report then lists possible differences."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``, which locks ``output_dir``, ``checkpoint_root`` and the fallback while it runs.

        ``resume_from_checkpoint=True`` resumes from the newest undamaged checkpoint. Raises :class:`LockedError` if another run has the lock, and
        :class:`NoCheckpointError` if all checkpoints are damaged. If you name a checkpoint (a path or a URL) and it is damaged, raises
        :class:`IntegrityError`, or :class:`RankError` if only one rank notices.
        """
        run = self._run = Run(falls_back=resume_from_checkpoint is True)
        self.resume_report = None
        with contextlib.ExitStack() as stack:
            if self._checkpoints != self._root:
                stack.enter_context(held(trainer_line_of(self._root), OneForAll()))
            for line in self._lines():
                stack.enter_context(held(line, self._hosts))
            stack.callback(run.stand_ins.close)
            stack.enter_context(self._stoppable())
            self._data = DataPlace(self._differ, self.reads_again)
            return super().train(self._to_open(resume_from_checkpoint), *args, **kwargs)

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint for ``train(resume_from_checkpoint=True)``, damaged or not.

        Use it in a script that starts and resumes with the same command. Every rank must call it. Raises :class:`SourceError` if a store can't be
        reached.
        """
        lines = [trainer_line_of(root) for root in self._places()]
        return any(
            self._hosts.on_each(
                lines[0].root, "look for checkpoints", lambda: any(line.steps() for line in lines)
            )
        )

    def _to_open(self, given: Any) -> Any:
        """What Trainer takes to resume: the folder of the newest or named checkpoint, or its stand-in. Collective."""
        if given is True:
            given = newest(self._lines(), self._run.damaged, self._hosts) or True
            if given is True and self._checkpoint_root is not None:
                raise NoCheckpointError(
                    f"{self._checkpoints}: no checkpoint to resume from; start with resume_from_checkpoint=False, or check has_checkpoint() first"
                )
        # No checkpoint in output_dir: let Trainer raise its own error.
        if given is None or isinstance(given, bool):
            return given
        return self._run.stand_ins.folder_for(given, self._hosts)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Run again with the checkpoint before if one is damaged, as Trainer runs again with smaller batches."""
        while True:
            try:
                return super()._inner_training_loop(
                    batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
                )
            except _DamagedError:
                self._data, self._run.seeds = DataPlace(self._differ, self.reads_again), {}
                self._run.end_is_due = False
                resume_from_checkpoint = self._to_open(True)
            if not self.is_fsdp_enabled:  # a checkpoint of plain Trainer must be read before this
                self._load_from_checkpoint(resume_from_checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Skip shardwise checkpoints: they are restored at once, when all objects exist."""
        if not self._is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _is_ours(self, folder: str) -> bool:
        """Whether a folder is a shardwise checkpoint, or stands for one. Collective. Raises :class:`CheckpointError` if it is not there."""
        place = self._run.stand_ins.reading_place(folder, self._hosts)
        if not is_url(place) and not os.path.isdir(place):
            raise CheckpointError(
                f"{place}: no such directory; give the path of a checkpoint, or True for the newest"
            )
        return is_ours(place)

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is not None:
            self._run.resumed_step = self.state.global_step
            path = self._run.stand_ins.path_of(checkpoint_dir)
            if self._is_ours(checkpoint_dir):
                try:
                    with self._run.stand_ins.opened(checkpoint_dir, self._hosts) as opened:
                        self._restore(path, opened)
                except ShardwiseError as error:
                    if not (self._run.falls_back and is_damage(error)):
                        raise
                    self._run.damaged[path] = (self.state.global_step, str(error))
                    if Ranks.current().rank == 0:
                        _log.warning("skipping damaged %s: %s", path, error)
                    raise _DamagedError(path) from error
                self._run.published[self.state.global_step] = absolute(path)
            else:
                self._restore_plain(path, checkpoint_dir)
                return
        # Trainer finds none of its files there; subclasses may find theirs.
        super()._load_optimizer_and_scheduler(checkpoint_dir)

    def _restore_plain(self, path: str, checkpoint_dir: str) -> None:
        """Let Trainer restore a checkpoint of its own, and report what it restores."""
        ranks, names = Ranks.current(), os.listdir(checkpoint_dir)
        state = self._train_state(data=False)
        given = given_settings_of(state)
        super()._load_optimizer_and_scheduler(checkpoint_dir)
        lost = lost_parts(names)
        differences = [
            f"{path} was written by the plain Trainer, which doesn't record digests, versions or settings"
        ]
        if lost:
            differences.append(f"it has no {', '.join(lost)}")
        if (saved := ranks_of(names)) not in (0, ranks.world_size):
            differences.append(f"world size: {saved} when saved, {ranks.world_size} now")
        if self.args.ignore_data_skip:
            differences.append("ignore_data_skip: the epoch starts over")
        lives = {name: describe(model) for name, model in state.models.items()}
        is_adapted = peft_model(self.model) is not None  # Trainer stores no base below adapters
        with_optimizer = not {"optimizer", "scheduler"} & {*lost}  # Trainer takes both or neither
        report = ResumeReport(
            path=path,
            step=self.state.global_step,
            run_id="",
            saved_world_size=saved,
            world_size=ranks.world_size,
            saved_mesh="",
            mesh=mesh_text(g for live in lives.values() for g in live.geometries.values()),
            digest="",
            exact=False,
            differences=tuple(differences),
            tensors=len(
                [
                    t
                    for live in lives.values()
                    for t in live.stored
                    if t.tensor.requires_grad or not is_adapted
                ]
            ),
            optimizer_tensors=_tensors_in(state.optimizers.values()) if with_optimizer else 0,
            documents=("scheduler",) if with_optimizer else (),
            skipped=(),
            caveats=(),
            rng="not stored" if "RNG states" in lost else "those of the save, by Trainer",
            bytes_read=0,
            seconds=0.0,
            damaged=dict(self._run.damaged.values()),
            superseded=(),
            replaced=replaced_settings(given, given_settings_of(state)),
        )
        self.resume_report = report
        log_resume(report)

    def _restore(self, path: str, opened: Opened) -> None:
        """Restore everything at once, and add the differences that Trainer itself causes to the report."""
        ranks, run, place = Ranks.current(), self._run, opened.path
        holds = ranks.on_first("look at checkpoint", lambda: contents(place))
        with_optimizer = "optimizer" in holds["documents"]
        with_place = "extra.data" in holds["documents"] and holds["world_size"] == ranks.world_size
        if with_place:
            with ranks.agree("look at the data position"):
                check_place(place, read_manifest(place), f"rank/{ranks.rank:05d}")
        state = self._train_state(optimizer=with_optimizer, data=with_place, source=place)
        opened.bring(state)
        report = replace(restore_unlogged(state, place, io=opened.io), path=path, not_given=())
        run.rng = capture_rng()
        saved, now = holds["trainer"]["global_batch_size"], self._global_batch_size
        found = list(self._data.differences(run.loader, *run.place, "seeds" in holds["trainer"]))
        if keeps_completions(self) and not stores_completions(self):
            found.append(f"completions that {type(self).__name__} keeps for later steps are not stored")
        if not with_optimizer:
            found.append(
                "the checkpoint only contains the model (save_only_model): the optimizer and the learning rate start over"
            )
        if saved != now:
            found.append(
                f"global batch size (per device × accumulation × ranks): {saved} when saved, {now} now. Trainer finds its place "
                f"in the data by steps: about {abs(saved - now) * report.step} samples are "
                f"{'skipped' if now > saved else 'seen again'}; keep the product to avoid that"
            )
        if self.args.ignore_data_skip:
            found.append("ignore_data_skip: the epoch starts over")
        report = report.with_history(dict(run.damaged.values()), ())
        differences = report.differences + tuple(found)
        self.resume_report = replace(report, exact=report.exact and not found, differences=differences)
        log_resume(self.resume_report)

    def _differ(self, line: str) -> None:
        """Add a difference that shows after the report was made."""
        if self.resume_report is not None:
            found = (*self.resume_report.differences, line)
            self.resume_report = replace(self.resume_report, exact=False, differences=found)
        _log.warning("the resume is not exact: %s", line)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Take the epoch from the checkpoint: Trainer only counts steps, but epochs may end early or have no length."""
        place = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is not None and self._is_ours(resume_from_checkpoint):
            path = self._run.stand_ins.reading_place(resume_from_checkpoint, self._hosts)
            self._find_best(self._run.stand_ins.best_of(resume_from_checkpoint), trial)
            holds = Ranks.current().on_first("look for the data position", lambda: contents(path))["trainer"]
            now = self.args.gradient_accumulation_steps
            if (holds.get("accumulation"), holds["global_batch_size"]) == (now, self._global_batch_size):
                place = holds["epoch"], 0 if self.args.ignore_data_skip else holds["batches"]
                self._run.seeds = holds["seeds"]
                self._run.end_is_due = holds.get("end_is_due", False)
        self._run.place = place
        return place

    def _find_best(self, best: str | None, trial: Any) -> None:
        """Take the best checkpoint of a resumed state that lies in a store, or in parts, as Trainer does for a directory. Collective."""
        if best is None:
            return
        root = self._lines(trial)[0].root
        path = join(root, os.path.basename(best)) if self._hosts.is_local else best
        there = self._hosts.on_each(
            root,
            "look for the best",
            lambda: is_directory(path) if not is_url(path) else is_file(join(path, MANIFEST_NAME)),
        )
        if all(there):
            self.state.best_model_checkpoint = path
        else:
            _log.warning("the best checkpoint %s no longer exists; this run continues without it", best)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        self._run.loader = train_dataloader
        if self._run.seeds:
            put_own_states(train_dataloader, {"seeds": self._run.seeds, "generators": {}, "epochs": {}})
        with explained(LOAD):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[no-untyped-call]

    def _run_epoch(self, *_: Any, **given: Any) -> None:  # Trainer passes all arguments by name
        """Calls Trainer's method with a loader that counts batches and resumes at the saved position."""
        loader, epoch = given["train_dataloader"], given["epoch"]
        resumed = epoch == given["epochs_trained"] and given["resume_from_checkpoint"] is not None
        skips = resumed and not self.args.ignore_data_skip
        skipped = given["steps_trained_in_current_epoch"] if skips else 0
        self._run.batches_in_epoch = given["steps_in_epoch"]
        if resumed and self._run.end_is_due:
            self._end_the_epoch_before(given)
            if self.control.should_training_stop:
                return
        given["train_dataloader"] = self._data.open(loader, epoch, skipped, resumed, self._run.rng)
        super()._run_epoch(**given)  # type: ignore[no-untyped-call]

    def _end_the_epoch_before(self, given: Mapping[str, Any]) -> None:
        """Make up for the end of the epoch, which came after the save: callbacks, and the evaluation that is due there.

        Without it the evaluation is lost, and what its loader draws is missing in the epochs that follow.
        """
        self._run.end_is_due = False
        restore_rng(self._run.rng)
        end_epoch(self, given["epoch"] - 1, given)
        self._run.rng = capture_rng()

    def _load_rng_state(self, checkpoint_dir: str | None) -> None:
        """Restore again, because Trainer draws numbers when it skips batches. A resumed epoch has done so itself."""
        if self._run.rng is None:
            super()._load_rng_state(checkpoint_dir)
        elif not self._data.sets_rng:
            restore_rng(self._run.rng)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not is_ours(best):
            super()._load_best_model()
            return
        _log.info("loading the best model from %s (score %s)", best, self.state.best_metric)
        with self._hosts.opened(best) as opened:
            opened.bring(TrainState(model=self.model))
            load(self.model, opened.path, io=opened.io)


def _tensors_in(optimizers: Iterable[Optimizer]) -> int:
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    return sum(isinstance(value, torch.Tensor) for state in states for value in state.values())
