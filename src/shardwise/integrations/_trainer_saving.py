"""The saving half of the Trainer integration: ``checkpoint-N`` as one shardwise checkpoint, and exports."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME

from ..checkpoint.collect import Lineage
from ..checkpoint.failures import Failures
from ..checkpoint.hosts import Hosts
from ..checkpoint.save import SaveReport, write_checkpoint
from ..export.hub import export_hf
from ..format.steps import TRAINER_FILE
from ..internals.peft import peft_model
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks
from ..state.loader_parts import own_states
from ..state.train_state import TrainState
from ..storage import absolute, is_url, join
from ..store.line import Line
from ..store.marks import remove_ours
from ..store.publish import make_temporary
from ._trainer_data import DataPlace
from ._trainer_files import (
    ADAPTER,
    FULL,
    adapter_files,
    add_beside,
    drop_empty_weights,
    gathered,
    into_model,
    overrides,
    read_all,
    save_processing,
    without_fsdp,
)
from ._trainer_folder import Run, keep_only, move_into, path_in, rotate, set_newer_aside
from ._trainer_line import trainer_line_of
from ._trl import generation_state

__all__ = ["EpochEnds", "Saving"]


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

        The folder may hold other files, such as ``checkpoint-N``; weights of an earlier export are replaced. Every rank
        must call it. Raises as :func:`shardwise.export_hf`.
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
