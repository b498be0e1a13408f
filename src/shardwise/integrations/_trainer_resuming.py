"""The resuming half of the Trainer integration: the newest undamaged checkpoint, at its place in the data."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import TrainingArguments

from ..checkpoint.hosts import OneForAll, Opened
from ..checkpoint.resume_report import ResumeReport, log_resume
from ..errors import CheckpointError, NoCheckpointError, ShardwiseError, is_damage
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..internals.peft import peft_model
from ..internals.trainer import end_epoch
from ..internals.trl import keeps_completions
from ..layout.live import describe
from ..layout.placements import mesh_text
from ..loading.load import load
from ..ranks.ranks import Ranks
from ..rng import capture_rng, restore_rng
from ..runs.history import lost_parts, ranks_of
from ..runs.restore import restore_unlogged
from ..state.loader_parts import put_own_states
from ..state.settings import given_settings_of, replaced_settings
from ..state.train_state import TrainState
from ..storage import absolute, is_directory, is_file, is_url, join
from ._prepare import explained
from ._trainer_data import DataPlace
from ._trainer_folder import Run, contents, held, is_ours, newest
from ._trainer_line import trainer_line_of
from ._trainer_place import check_place
from ._trainer_saving import Saving
from ._trainer_stop import Stopping
from ._trl import LOAD, stores_completions

__all__ = ["Resuming"]

_log = logging.getLogger(__name__)


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
            f"{path} is a checkpoint of the plain Trainer, which records no digests, versions or settings"
        ]
        if lost:
            differences.append(f"it has no {', '.join(lost)}")
        if (saved := ranks_of(names)) not in (0, ranks.world_size):
            differences.append(f"world size: {saved} when saved, {ranks.world_size} now")
        if self.args.ignore_data_skip:
            differences.append("ignore_data_skip: the epoch's data starts again")
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
            rng="not stored" if "random states" in lost else "those of the save, by Trainer",
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
                "the checkpoint holds the model only (save_only_model): optimizer and learning rate start again"
            )
        if saved != now:
            found.append(
                f"global batch size (per device × accumulation × ranks): {saved} when saved, {now} now. Trainer finds its place "
                f"in the data by steps: about {abs(saved - now) * report.step} samples are "
                f"{'skipped' if now > saved else 'seen again'}; keep the product to avoid that"
            )
        if self.args.ignore_data_skip:
            found.append("ignore_data_skip: the epoch's data starts again")
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
