"""HF Trainer, and through it TRL's trainers: models loaded sharded, checkpoints published whole or not at all, exports.

The changes in a script, here with TRL::

    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained  # 1

    class MyTrainer(ShardwiseTrainer, SFTTrainer): ...                            # 2

    model, report = load_pretrained(args, "path/to/model")    # 3: for AutoModelForCausalLM.from_pretrained
    trainer = MyTrainer(model, args, train_dataset=dataset)   # 4: for SFTTrainer
    trainer.train(resume_from_checkpoint=True)                # as ever, and so are save_model and the arguments

With the Trainer itself, :class:`ShardwiseTrainer` takes its place. Methods are overridden; no class, module or function
of another package is changed. What is changed in objects of the run: docs/concepts/patching.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from ..checkpoint.resume_report import ResumeReport
from ..errors import CheckpointError, NoCheckpointError, ShardError, ShardwiseError, is_damage
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..internals.trl import keeps_completions
from ..loading.load import load as _load
from ..loading.report import LoadReport
from ..preemption.stops import EXIT_STATUS, StopOptions
from ..ranks.ranks import Ranks
from ..rng import capture_rng, restore_rng
from ..runs.restore import restore
from ..state.loader_parts import put_own_states
from ..storage import is_file, is_url, join
from . import accelerate as swa
from ._accelerate_folders import place_at
from ._accelerate_settings import check_supported
from ._accelerate_sharding import warn_if_whole
from ._prepare import Groups, adopt, explained, groups_of, put_back
from ._trainer_data import DataPlace
from ._trainer_folder import Run, contents, held, is_ours, newest
from ._trainer_line import trainer_line_of
from ._trainer_place import check_place
from ._trainer_saving import Saving
from ._trainer_stop import StopCallback, Stopping
from ._trl import LOAD, References, gather_head, stores_completions

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["ShardwiseTrainer", "load_pretrained"]

_log = logging.getLogger(__name__)


def load_pretrained(
    args: TrainingArguments, path: str | os.PathLike[str], **options: Any
) -> tuple[Any, LoadReport]:
    """:func:`shardwise.load_pretrained`, sharded as the Trainer with these arguments would shard it.

    Follows ``args`` (``fsdp_config``, ``parallelism_config``, ``bf16``, …) and ``accelerate launch``. See
    :func:`shardwise.integrations.accelerate.load_pretrained` for the supported settings, the ``options`` (``dtype``,
    ``adapter=LoraConfig(…)``, ``seed``, …) and memory. Returns the sharded model, for the trainer, and the report.

    Every rank must call it, before it makes the trainer. Raises :class:`ShardError` for DeepSpeed and other unsupported
    settings, else as :func:`shardwise.load_pretrained`.
    """
    return swa.load_pretrained(_accelerator_of(args), path, **options)


def _accelerator_of(args: TrainingArguments) -> Accelerator:
    """An accelerator like the one that the Trainer will make. Both share their state and the plugin."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import TorchDynamoPlugin

    if args.deepspeed_plugin is not None:
        raise ShardError(
            "args.deepspeed is set; expected FSDP2 (fsdp=True), DDP or one process. Leave it out"
        )
    _ = args.device  # makes the shared state now: the first access would replace it later
    settings = args.fsdp_plugin_args
    return Accelerator(
        mixed_precision=args.mixed_precision,
        fsdp_plugin=None if settings is None else FullyShardedDataParallelPlugin(**settings),
        parallelism_config=args.parallelism_config,
        dynamo_plugin=TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode),
    )


class _DamagedError(Exception):
    """The checkpoint to resume from is damaged, as reading it has shown; an older one may be intact."""


class ShardwiseTrainer(Stopping, Saving):
    """The Trainer with ``checkpoint-N`` as shardwise checkpoints. It is also a mixin, before another trainer class.

    * ``checkpoint-N`` is one directory with everything, published whole or not at all, and proved by digests when it is
      read, at any world size. Its manifest lists the files that Trainer and its subclasses write beside
      (``trainer_state.json``, the tokenizer). ``save_total_limit`` applies after publishing and keeps the newest and
      the best.
    * ``resume_from_checkpoint=True`` takes the newest undamaged checkpoint, also if damage shows only when tensors are
      read. Plain Trainer reads its own checkpoints. ``resume_report`` lists the restored state. The first save renames
      checkpoints newer than the resumed one to ``_superseded-checkpoint-N-…``, or ``_damaged-…``.
    * A resume goes on in the data exactly at the place of the save, in any epoch, with any sampler and loader: the
      epoch begins again under its own random states. The report's ``differences`` name exceptions. With another
      global batch size than the saved one samples are skipped or seen again, and the report says so.
    * ``checkpoint-N`` holds the files of ``_save`` and ``save_model`` of other classes. This class writes the weights,
      once: a ``_save`` that it calls gets no tensors. ``from_pretrained(checkpoint-N)`` reads model and tokenizer.
    * ``save_model`` writes hub files, or adapters for a ``PeftModel``, without gathering; every rank must call it.
    * Reference models of TRL's trainers are clones of the sharded ``model``: nothing is read, and none is whole.
    * ``train`` holds ``output_dir`` (by a lock that ends with the process) and deletes leftovers of killed saves.
    * ``checkpoint_root`` of the constructor, a directory or the URL of an object store with conditional writes, says where
      checkpoints lie; ``output_dir`` stays local. In a store their names are ``step-N.<nonce>``. ``resume_from_checkpoint`` takes URLs.
    * ``stop_on=("SIGTERM", "SIGUSR1")`` of the constructor: while ``train`` runs, such a signal on any rank stops all ranks after
      the same step, or in the same batch of an evaluation, and ``train`` returns with that step saved. Then call
      ``sys.exit(trainer.exit_code)``: it is ``exit_status`` (75), and 0 for a run that came to its end. With ``deadline_s``, the seconds to the
      scheduler's SIGKILL, and after a second signal, no last save begins that takes longer than saves took; the run then goes on from
      the checkpoint before.

    Memory: ≤ 16 MiB besides the live tensors on CPU. Raises the errors of :func:`shardwise.save`,
    :func:`shardwise.restore` and :func:`shardwise.export_hf`, alike on every rank; its constructor raises
    :class:`ShardError` or :class:`CheckpointError` for unsupported settings: DeepSpeed, FSDP version 1, tensor or
    context parallelism, checkpoints pushed to the hub while training, ``save_on_each_node``, ``enable_jit_checkpoint``.
    """

    resume_report: ResumeReport | None = None
    """The report of the last ``train`` that resumed from a shardwise checkpoint."""
    reads_again: bool = True
    """Whether a resume inside an epoch reads the epoch's batches again if their items may draw random numbers (always
    with ``dataloader_num_workers``, otherwise if they were seen to). False: skips them by index, as Trainer does, in no
    time; the report then says what may differ."""
    _groups: Groups | None = None

    def __init__(
        self,
        *args: Any,
        checkpoint_root: str | os.PathLike[str] | None = None,
        stop_on: tuple[str, ...] = (),
        deadline_s: float | None = None,
        exit_status: int = EXIT_STATUS,
        **kwargs: Any,
    ) -> None:
        self._stop_options = StopOptions(stop_on=stop_on, deadline_s=deadline_s, exit_status=exit_status)
        self._stopping = StopCallback()
        if checkpoint_root is not None:
            self._checkpoint_root = place_at(checkpoint_root)
        with References() as self._references:
            super().__init__(*args, **kwargs)
        self.add_callback(self._stopping)
        if hasattr(self.args, "model_init_kwargs"):  # TRL's
            gather_head(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer does; then refuse unsupported settings."""
        super().create_accelerator_and_postprocess()
        self._run, self._data = Run(), DataPlace(self._differ, self.reads_again)
        check_supported(self.accelerator)
        if self.is_fsdp_enabled:
            self._references.stand_in(self.args, self.model)
            self._warn_if_whole()
        parallelism, wrong = self.accelerator.parallelism_config, ""
        if parallelism is not None and parallelism.tp_enabled:
            wrong = "tp_size > 1 in parallelism_config; use FSDP"
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            wrong = (
                f"hub_strategy={str(self.args.hub_strategy)!r} pushes weights out of checkpoints; say 'end'"
            )
        if is_url(self.args.output_dir or ""):
            wrong = f"output_dir={self.args.output_dir!r}, but Trainer's must be local; give the trainer checkpoint_root"
        for name in ("save_on_each_node", "enable_jit_checkpoint"):
            if getattr(self.args, name, False):
                wrong = f"{name} needs Trainer's own files; leave it out"
        if wrong:
            raise CheckpointError(f"a shardwise checkpoint can't be had with these arguments: {wrong}")

    def _warn_if_whole(self) -> None:
        """Warn of a model for FSDP that was loaded whole; with ``cpu_ram_efficient_loading`` only one rank did so."""
        devices = {p.device.type for p in self.model.parameters()}
        if "meta" not in devices and not self.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
            why = f"it was made before FSDP shards it. Load it by {LOAD}, not by from_pretrained"
            warn_if_whole(self.accelerator, self.model, ", ".join(sorted(devices)), why)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Runs after the optimizer is made and before ``accelerator.prepare``."""
        if self.is_fsdp_enabled:
            adopt(self.accelerator.state.fsdp_plugin, model)
            if training and self.optimizer is not None:
                self._groups = groups_of(self.optimizer)
        return super()._wrap_model(model, training, dataloader)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Runs after ``accelerator.prepare`` and before anything is resumed."""
        if self._groups is not None and self.optimizer is not None:
            put_back(self.optimizer, self._groups)
            self._groups = None
        return super().create_scheduler(num_training_steps, optimizer)

    # Resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``; holds ``output_dir`` and ``checkpoint_root`` meanwhile. True: resume from the newest undamaged checkpoint.

        Raises :class:`LockedError` if another run holds them, :class:`NoCheckpointError` if all checkpoints are damaged.
        A named checkpoint (a path or a URL) that is damaged raises :class:`IntegrityError`, or :class:`RankError` if only one rank
        finds it.
        """
        run = self._run = Run(falls_back=resume_from_checkpoint is True)
        self.resume_report = None
        with contextlib.ExitStack() as stack:
            if self._checkpoints != self._root:
                stack.enter_context(held(trainer_line_of(self._root)))
            stack.enter_context(held(self._line()))
            stack.callback(run.stand_ins.close)
            stack.enter_context(self._stoppable())
            self._data = DataPlace(self._differ, self.reads_again)
            return super().train(self._to_open(resume_from_checkpoint), *args, **kwargs)

    def has_checkpoint(self) -> bool:
        """Whether ``train(resume_from_checkpoint=True)`` has a checkpoint to resume from, damaged or not.

        For a script that begins and resumes by the same command. Every rank must call it. Raises :class:`SourceError` if a
        store can't be asked.
        """
        line = trainer_line_of(self._checkpoints)
        return bool(Ranks.current().on_first("look for checkpoints", lambda: bool(line.steps())))

    def _to_open(self, given: Any) -> Any:
        """What Trainer takes to resume: the folder of the newest or named checkpoint, or its stand-in. Collective."""
        if given is True:
            given = newest(self._line(), self._run.damaged) or True
            if given is True and self._checkpoint_root is not None:
                raise NoCheckpointError(
                    f"{self._checkpoints}: no checkpoint to resume from; begin with resume_from_checkpoint=False, or ask has_checkpoint()"
                )
        # No checkpoint in output_dir: let Trainer raise its own error.
        return given if given is None or isinstance(given, bool) else self._run.stand_ins.folder_for(given)

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
                resume_from_checkpoint = self._to_open(True)
            if not self.is_fsdp_enabled:  # a checkpoint of plain Trainer must be read before this
                self._load_from_checkpoint(resume_from_checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Skip shardwise checkpoints: they are restored at once, when all objects exist."""
        if not self._is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _is_ours(self, folder: str) -> bool:
        return is_ours(self._run.stand_ins.path_of(folder))

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is not None:
            self._run.resumed_step = self.state.global_step
            path = self._run.stand_ins.path_of(checkpoint_dir)
            if is_ours(path):
                try:
                    self._restore(path)
                except ShardwiseError as error:
                    if not (self._run.falls_back and is_damage(error)):
                        raise
                    self._run.damaged[self.state.global_step] = str(error)
                    if Ranks.current().rank == 0:
                        _log.warning("skipping damaged %s: %s", path, error)
                    raise _DamagedError(path) from error
        # Trainer finds none of its files there; subclasses may find theirs.
        super()._load_optimizer_and_scheduler(checkpoint_dir)

    def _restore(self, path: str) -> None:
        """Restore everything at once, and add the differences that Trainer itself causes to the report."""
        ranks, run = Ranks.current(), self._run
        holds = ranks.on_first("look at checkpoint", lambda: contents(path))
        with_optimizer = "optimizer" in holds["documents"]
        with_place = "extra.data" in holds["documents"] and holds["world_size"] == ranks.world_size
        if with_place:
            with ranks.agree("look at the place in the data"):
                check_place(path, read_manifest(path), f"rank/{ranks.rank:05d}")
        state = self._train_state(optimizer=with_optimizer, data=with_place, source=path)
        report = restore(state, path)
        run.rng = capture_rng()
        saved, now = holds["trainer"]["global_batch_size"], self._global_batch_size
        found = list(self._data.differences(run.loader, *run.place, "seeds" in holds["trainer"]))
        if keeps_completions(self) and not stores_completions(self):
            found.append(f"completions that {type(self).__name__} keeps for later steps are not stored")
        if not with_optimizer:
            found.append(
                "the checkpoint holds the model only (save_only_model): optimizer and learning rate begin anew"
            )
        if saved != now:
            found.append(
                f"global batch size (per device × accumulation × ranks): {saved} when saved, {now} now. Trainer finds its place "
                f"in the data by steps: about {abs(saved - now) * report.step} samples are "
                f"{'skipped' if now > saved else 'seen again'}; keep the product to avoid that"
            )
        if self.args.ignore_data_skip:
            found.append("ignore_data_skip: the epoch's data begin anew")
        report = report.with_history(run.damaged, ())
        differences = report.differences + tuple(found)
        self.resume_report = replace(report, exact=report.exact and not found, differences=differences)
        if differences and ranks.rank == 0:
            _log.warning("the resume is not exact: %s", "; ".join(differences))

    def _differ(self, line: str) -> None:
        """Add a difference that shows after the report was made."""
        if self.resume_report is not None:
            found = (*self.resume_report.differences, line)
            self.resume_report = replace(self.resume_report, exact=False, differences=found)
        _log.warning("the resume is not exact: %s", line)

    # The place in the data

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
            path = self._run.stand_ins.path_of(resume_from_checkpoint)
            self._find_best(self._run.stand_ins.best_of(resume_from_checkpoint))
            holds = Ranks.current().on_first("look for the place in the data", lambda: contents(path))[
                "trainer"
            ]
            now = self.args.gradient_accumulation_steps
            if (holds.get("accumulation"), holds["global_batch_size"]) == (now, self._global_batch_size):
                place = holds["epoch"], 0 if self.args.ignore_data_skip else holds["batches"]
                self._run.seeds = holds["seeds"]
        self._run.place = place
        return place

    def _find_best(self, best: str | None) -> None:
        """Take the best checkpoint of a resumed state that lies in a store, as Trainer does for a directory. Collective."""
        if best is None:
            return
        if Ranks.current().on_first("look for the best", lambda: is_file(join(best, MANIFEST_NAME))):
            self.state.best_model_checkpoint = best
        else:
            _log.warning("the best checkpoint %s is not there any more; this run goes on without it", best)

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
        given["train_dataloader"] = self._data.open(loader, epoch, skipped, resumed, self._run.rng)
        super()._run_epoch(**given)  # type: ignore[no-untyped-call]

    def _load_rng_state(self, checkpoint_dir: str | None) -> None:
        """Restore again, because Trainer draws numbers when it skips batches. A resumed epoch has done so itself."""
        if self._run.rng is None:
            super()._load_rng_state(checkpoint_dir)
        elif not self._data.sets_rng:
            restore_rng(self._run.rng)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self._stopping.has_stopped:
            return  # the run goes on
        if best is None or not is_ours(best):
            super()._load_best_model()
            return
        _log.info("loading the best model from %s (score %s)", best, self.state.best_metric)
        _load(self.model, best)
