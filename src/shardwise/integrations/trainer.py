"""Load models sharded and save shardwise checkpoints with the HF Trainer and TRL's trainers.

Your script changes in four places, here with TRL::

    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained  # 1

    class MyTrainer(ShardwiseTrainer, SFTTrainer): ...                            # 2

    model = load_pretrained(args, "path/to/model")            # 3: instead of AutoModelForCausalLM.from_pretrained
    trainer = MyTrainer(model, args, train_dataset=dataset)   # 4: instead of SFTTrainer
    trainer.train(resume_from_checkpoint=True)                # as usual, and so are save_model and the arguments

With the Trainer itself, use :class:`ShardwiseTrainer` directly. It overrides methods; no class, module or function of another package is
patched. docs/concepts/patching.md lists the changes to your run's objects.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from ..checkpoint.resume_report import ResumeReport, log_resume
from ..checkpoint.run import FailurePolicy, Failures, LastSave
from ..checkpoint.save import SaveReport, write_checkpoint
from ..checkpoint.sites import Hosts, Opened, hosts_of
from ..checkpoint.take import Lineage
from ..errors import CheckpointError, NoCheckpointError, ShardError, ShardwiseError, is_corruption
from ..format.header import TRAINER_FILE
from ..format.manifest import MANIFEST_NAME, read_manifest
from ..gates import require
from ..internals.peft import peft_model
from ..internals.trainers import (
    counts_as_grpo,
    end_epoch,
    fsdp_settings,
    keeps_completions,
    leaves_out_fsdp_version,
)
from ..loading.load import load
from ..publish.line import Line
from ..ranks.ranks import Ranks, patiently
from ..ranks.stop import PreemptionPolicy
from ..rng import capture_rng, restore_rng
from ..runs.history import lost_parts, ranks_of
from ..runs.run import restore_unlogged
from ..state.arguments import given_settings_of, replaced_settings
from ..state.optimizer import TrainState
from ..state.parts import own_states, put_seeds
from ..storage import absolute, is_directory, is_file, place_at, real
from ..storage.records import is_url, join
from ..tensors.live import describe
from ..tensors.placements import mesh_text
from . import accelerate as swa
from ._accelerate import (
    Groups,
    adopt,
    check_supported,
    explained,
    groups_of,
    keep_taken_over,
    put_back,
    warn_if_whole,
)
from ._folders import keep_only, path_in, rotate, trainer_line_of
from ._trainer_data import DataPlace, check_place, contents
from ._trainer_files import (
    ADAPTER,
    FULL,
    Run,
    StoppedInEvaluationError,
    Watch,
    adapter_files,
    add_beside,
    drop_empty_weights,
    exported,
    gathered,
    held,
    into_model,
    is_ours,
    move_into,
    newest,
    read_all,
    save_processing,
    set_newer_aside,
)
from .trl import LOAD, References, gather_head, generation_state

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["ShardwiseTrainer", "load_pretrained"]

require("trainer")
_log = logging.getLogger(__name__)


def load_pretrained(args: TrainingArguments, path: str | os.PathLike[str], **options: Any) -> Any:
    """Load a transformers model, sharded as the Trainer would shard it with these arguments.

    Follows ``args`` (``fsdp_config``, ``parallelism_config``, ``bf16``, …) and ``accelerate launch``. See
    :func:`shardwise.integrations.accelerate.load_pretrained` for the supported settings, the ``options`` (``dtype``,
    ``adapter=LoraConfig(…)``, ``seed``, …) and memory. Returns the sharded model, for the trainer.

    Every rank must call it, before it creates the trainer. Raises :class:`ShardError` for DeepSpeed and other unsupported settings, and, with
    transformers before 5.10, for an ``fsdp_config`` without ``version``. Otherwise raises the errors of :func:`shardwise.load_pretrained`.
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
    _check_fsdp_version(args)
    _ = args.device  # makes the shared state now: the first access would replace it later
    settings = fsdp_settings(args)
    return Accelerator(
        mixed_precision=args.mixed_precision,
        fsdp_plugin=None if settings is None else FullyShardedDataParallelPlugin(**settings),
        parallelism_config=args.parallelism_config,
        dynamo_plugin=TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode),
    )


def _check_fsdp_version(args: TrainingArguments) -> None:
    """Raise :class:`ShardError` where the arguments leave the version to a transformers that takes FSDP1."""
    if leaves_out_fsdp_version(args):
        require("fsdp-version")


class _DamagedError(Exception):
    """The checkpoint to resume from is damaged, as reading it has shown; an older one may be intact."""


class ShardwiseTrainer(Trainer):
    """The HF Trainer, with every ``checkpoint-N`` saved as a shardwise checkpoint. Use it alone, or as a mixin before another trainer class.

    * **Saving.** ``checkpoint-N`` is one directory with everything, published completely or not at all, readable at any world size, and
      checked against its digests when it is read. Its manifest also lists the files that Trainer and its subclasses write
      (``trainer_state.json``, the tokenizer). ``save_total_limit`` applies after publishing, and keeps the newest and the best checkpoint.
    * **Resuming.** ``resume_from_checkpoint=True`` uses the newest undamaged checkpoint, even if the damage shows only when tensors are
      read. Checkpoints written by the plain Trainer are resumed by its own code. ``resume_report`` lists the restored state. The first save renames
      checkpoints newer than the resumed one to ``_superseded-checkpoint-N-…`` or ``_damaged-…``.
    * **Data position.** A resume continues exactly where the save was, in any epoch, with any sampler and loader: the epoch starts
      again with its own RNG states. The report's ``differences`` lists exceptions. With a different global batch size, samples are skipped or
      repeated, and the report says so.
    * **Other classes' files.** ``checkpoint-N`` includes the files that other classes' ``_save`` and ``save_model`` write. This class writes
      the weights, once: a ``_save`` that it calls gets no tensors. ``from_pretrained(checkpoint-N)`` loads model and tokenizer.
    * **Export.** ``save_model`` writes Hugging Face files, or adapters for a ``PeftModel``, without gathering. Every rank must call it.
    * **Reference models** of TRL's trainers are clones of the sharded ``model``: they aren't read from disk, and no rank holds a full one.
    * **Locking.** ``train`` locks ``output_dir`` (the lock ends with the process) and deletes what killed saves left behind.
    * **A different place for checkpoints.** ``checkpoint_root=`` is a directory or the URL of an object store that supports conditional writes;
      ``output_dir`` stays local. In a store, checkpoints are named ``step-N.<nonce>``. ``resume_from_checkpoint`` accepts URLs.
    * **Preemption.** With ``preemption=PreemptionPolicy()``, a signal on any rank (SIGTERM, SIGUSR1) during ``train`` stops all ranks after the
      same step, or in the same batch of an evaluation, and ``train`` returns with that step saved. Then call
      ``sys.exit(trainer.exit_code)``: it is the policy's ``exit_status`` (75), or 0 for a run that finished. The last save
      isn't started after a second signal, or if the policy's ``deadline_s`` leaves less time than previous saves took; the run then
      resumes from the previous checkpoint. ``request_stop()`` does the same without a signal.
    * **Failed saves.** With ``failures=FailurePolicy()``, a save that fails because of a storage problem is logged, and training continues.
      :attr:`save_report` gives the reason, and the next save is attempted as usual. After ``max_failures`` failed saves in a row,
      ``train`` raises. A checkpoint that can't be saved in its usual place goes to the policy's ``fallback``, and
      ``resume_from_checkpoint=True`` uses the newest of both.
    * **Local disks.** With ``local=True``, each host only stores its own ranks' files, on its own disk, below ``output_dir`` or
      ``checkpoint_root`` there. A resume uses the newest checkpoint that is complete across all hosts, with any number of ranks and hosts, as long
      as every host that saved it is there. Other programs can read it once its parts are merged; see docs/howto/several-hosts.md.
      ``save_model`` needs a folder that all ranks can see.

    Memory: at most 16 MiB in addition to the live tensors on CPU. Raises the errors of :func:`shardwise.save`, :func:`shardwise.restore` and
    :func:`shardwise.export_hf`, the same on every rank. The constructor raises :class:`ShardError` or :class:`CheckpointError` for
    unsupported settings: DeepSpeed, FSDP version 1, tensor or context parallelism, checkpoints pushed to the hub while training,
    ``save_on_each_node`` and ``enable_jit_checkpoint``.
    """

    model: Any
    resume_report: ResumeReport | None = None
    """The report of the last ``train`` that resumed. A checkpoint of the plain Trainer is read by Trainer's own code; the
    report says what it restores."""
    reads_again: bool = True
    """Whether a resume inside an epoch reads the epoch's earlier batches again if their items may draw random numbers (always assumed with
    ``dataloader_num_workers``, otherwise only if they were observed to). False: skip them by index, as Trainer does, which takes no time; the
    report then lists possible differences."""
    frozen: Literal["hold", "refer", "auto"] = "auto"
    """Whether checkpoints of a LoRA run contain the base (``"hold"``), only its digests (``"refer"``), or only its digests as long as it is what
    the load read (``"auto"``); see :attr:`shardwise.TrainState.frozen`."""
    save_report: SaveReport | None = None
    """The report of the last save that was attempted. If it failed and training continued, ``failure`` says why."""
    _run: Run
    _data: DataPlace
    _last_save: LastSave
    _groups: Groups | None = None
    _staging: str | None = None
    _writes_beside = False
    _processing_files: Mapping[str, bytes] = {}
    _failed_beside: Exception | None = None

    def __init__(
        self,
        *args: Any,
        checkpoint_root: str | os.PathLike[str] | None = None,
        preemption: PreemptionPolicy | None = None,
        failures: FailurePolicy | None = None,
        local: bool = False,
        **kwargs: Any,
    ) -> None:
        self._failures = Failures.under(failures)
        self._hosts = hosts_of(local=local, fallback=self._failures.fallback)
        self._preemption = preemption
        self._watch = Watch()
        self._checkpoint_root = None if checkpoint_root is None else place_at(checkpoint_root)
        with References(kwargs.get("model", next(iter(args), None))) as self._references:
            super().__init__(*args, **kwargs)
        self.add_callback(self._watch)
        if hasattr(self.args, "model_init_kwargs"):  # TRL's
            gather_head(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer does; then refuse unsupported settings."""
        _check_fsdp_version(self.args)
        super().create_accelerator_and_postprocess()
        self._run, self._data = Run(), DataPlace(self._differ, self.reads_again)
        check_supported(self.accelerator)
        if self.is_fsdp_enabled:
            keep_taken_over(self.accelerator.state.fsdp_plugin)
            self._references.stand_in(self.args, self.model)
            # With cpu_ram_efficient_loading only one rank has loaded the whole model.
            devices = {p.device.type for p in self.model.parameters()}
            if "meta" not in devices and not self.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
                why = f"it was made before FSDP shards it. Load it by {LOAD}, not by from_pretrained"
                warn_if_whole(self.accelerator, self.model, ", ".join(sorted(devices)), why)
        parallelism, wrong = self.accelerator.parallelism_config, ""
        if parallelism is not None and parallelism.tp_enabled:
            wrong = "tp_size > 1 in parallelism_config; use FSDP"
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            wrong = f"hub_strategy={str(self.args.hub_strategy)!r} pushes weights from checkpoints; set it to 'end'"
        if is_url(self.args.output_dir or ""):
            wrong = f"output_dir={self.args.output_dir!r}, but Trainer needs a local directory; pass checkpoint_root to the trainer"
        fallback = self._failures.fallback
        if fallback is not None and real(fallback) in map(real, (self._root, self._checkpoints)):
            wrong = f"the fallback is the run's own directory: {fallback}; use a different one"
        if self._hosts.is_local and is_url(self._checkpoints):
            wrong = f"local=True keeps checkpoints on the hosts' own disks, and checkpoint_root is a URL: {self._checkpoints}"
        for name in ("save_on_each_node", "enable_jit_checkpoint"):
            if getattr(self.args, name, False):
                wrong = f"{name} needs Trainer's own files; leave it out"
        if wrong:
            raise CheckpointError(f"these arguments don't work with shardwise checkpoints: {wrong}")

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

    # ------------------------------------------------------------------------------------------ stopping

    def request_stop(self) -> None:
        """Ask all ranks to stop, as a signal would: at a time limit, or when the loss is NaN. One rank's call is enough, for example in a callback.

        ``train`` checks for requests only with a :class:`shardwise.PreemptionPolicy`; without one, this raises :class:`CheckpointError`. Does
        nothing while ``train`` isn't running.
        """
        if self._preemption is None:
            raise CheckpointError(
                "request_stop: train() doesn't check for stop requests; pass the trainer preemption=shardwise.PreemptionPolicy()"
            )
        if self._watch.stops is not None and self._watch.is_listening:
            self._watch.stops.request()

    @property
    def exit_code(self) -> int:
        """Pass this to ``sys.exit``: the policy's ``exit_status`` if ``train`` was stopped, otherwise 0."""
        return 0 if self._watch.stops is None else self._watch.stops.exit_code

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
        return True if self._watch.has_stopped else bool(super()._determine_best_metric(metrics, trial))

    # ------------------------------------------------------------------------------------------ saving

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

    def _lines(self, trial: Any = None) -> list[Line]:
        """The line of the checkpoints of this call of ``train``, then that of the fall-back if there is one."""
        roots = [absolute(self._below(root, trial)) for root in self._failures.roots(self._checkpoints)]
        for root in roots:
            if root not in self._run.lines:
                self._run.lines[root] = trainer_line_of(root, sweeps=not self._hosts.is_local)
        return [self._run.lines[root] for root in roots]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save where storage lets it; a failure passes if failures may. Not if it is the last save and there is no time for it."""
        ranks, run, step = Ranks.current(), self._run, self.state.global_step
        lines, stops, started = self._lines(trial), self._watch.stops, time.monotonic()
        if step in run.published:  # an evaluation at the end of the epoch may have come after the save
            best = self._hosts.on_own(
                lines[0].root, "look at checkpoints", lambda: self._best(trial, run.published[step])
            )
            self.state.best_model_checkpoint = best or self.state.best_model_checkpoint
            return
        if (
            stops is not None
            and stops.has_stopped
            and (why := self._last_save.refusal(stops.left_s(), ranks))
        ):
            _log.warning("checkpoint %d was not saved: %s", step, why)
            return
        ways = {line.root: partial(self._save_at, line, model, trial) for line in lines}
        self.save_report = self._failures.attempt(step, ways, is_first_rank=ranks.rank == 0)
        if step in run.published:
            self._last_save.saved(time.monotonic() - started)

    def _save_at(self, line: Line, model: Any, trial: Any) -> SaveReport:
        """Let Trainer write its small files into a separate folder, then publish everything at once."""
        ranks, run, step = Ranks.current(), self._run, self.state.global_step
        lines, best_before = self._lines(trial), self.state.best_model_checkpoint
        hosts = self._hosts

        def look() -> list[Any]:
            """A name for this step's checkpoint in the line, and the path of the best one, which may be this."""
            name = line.fresh_name(step)
            return [name, self._best(trial, join(line.root, name))]

        name, best = hosts.on_own(line.root, "look at checkpoints", look)
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
            lineage = Lineage(ranks.on_first("run id", lambda: secrets.token_hex(8)), None, run.base)
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
                # Trainer looked for the best checkpoint in the temporary folder.
                self.state.best_model_checkpoint = best or self.state.best_model_checkpoint
                if self.args.should_save:
                    self.state.save_to_json(os.path.join(folder, TRAINER_FILE))
                return read_all(folder)
        raise AssertionError("an agreement raises or returns")

    def _best(self, trial: Any, path: str) -> str | None:
        """The path of the best checkpoint, if it is there: one of this run's, or the one of this step, at ``path``. For rank 0."""
        best = self.state.best_global_step
        if not best:
            return None
        if best == self.state.global_step:
            return path
        return next((found for line in self._lines(trial) if (found := path_in(line, best))), None)

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. With ``save_total_limit=1`` the best checkpoint alone stays, also where Trainer sees none.

        A stopped run resumes from its newest checkpoint, so it keeps that one and doesn't load the best model.
        """
        best, has_stopped = self.state.best_model_checkpoint, self._watch.has_stopped
        if has_stopped:
            self.state.best_model_checkpoint = None
        output = super()._finalize_training(trial, *args, **kwargs)  # type: ignore[no-untyped-call]
        self.state.best_model_checkpoint = best
        if best is not None and not has_stopped and self.args.save_total_limit == 1:
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
            frozen=self.frozen,
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
            "end_is_due": is_at_end and not self._watch.epoch_has_ended,
            "seeds": {} if loader is None else own_states(loader)["seeds"],
        }

    @property
    def _global_batch_size(self) -> int:
        """Samples per step: per device × accumulation × data ranks."""
        if self.accelerator.split_batches:
            return int(self._train_batch_size * self.args.gradient_accumulation_steps)
        return int(self.get_total_train_batch_size(self.args))

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
        with_adapters = peft_model(self.model) is not None
        with exported(self.model, target, "export") as (folder, _):
            with tempfile.TemporaryDirectory(prefix="shardwise-") as staging:
                with ranks.agree("write Trainer's files"):
                    self._write_beside(staging)
                    files = read_all(staging)
                files = gathered(ranks, files)
            with ranks.agree("publish export"):
                if ranks.rank == 0:
                    add_beside(folder, files)
                    move_into(target, folder, ADAPTER if with_adapters else FULL)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_beside(self, folder: str) -> Collection[str]:
        """Write the files of ``save_model`` and ``_save`` of the other classes, without weights. Returns the names of those that
        tokenizer or processor save."""
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        self._processing_files = save_processing(processing if self.args.should_save else None)
        # Under FSDP Trainer would gather the model for its ``_save``, or not call it. We write the weights.
        was, self.is_fsdp_enabled, self._writes_beside = self.is_fsdp_enabled, False, True
        try:
            super().save_model(folder, _internal_call=True)
        finally:
            self.is_fsdp_enabled, self._writes_beside = was, False
        drop_empty_weights(folder)
        return self._processing_files

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write tokenizer and arguments, and the files of the next class's ``_save``, called without tensors."""
        order = type(self).__mro__
        following = next(k for k in order[order.index(ShardwiseTrainer) + 1 :] if "_save" in vars(k))
        if not self._writes_beside:
            super()._save(output_dir, state_dict)
        elif following is not Trainer:
            super()._save(output_dir, {})
        elif self.args.should_save:
            folder = output_dir or self._root
            patiently(os.makedirs, folder, exist_ok=True)
            add_beside(folder, self._processing_files)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))  # as Trainer does

    # ------------------------------------------------------------------------------------------ resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``, which locks ``output_dir``, ``checkpoint_root`` and the fallback while it runs.

        ``resume_from_checkpoint=True`` resumes from the newest undamaged checkpoint. Raises :class:`LockedError` if another run has the lock, and
        :class:`NoCheckpointError` if all checkpoints are damaged. If you name a checkpoint (a path or a URL) and it is damaged, raises
        :class:`IntegrityError`, or :class:`RankError` if only one rank notices.
        """
        run = self._run = Run(falls_back=resume_from_checkpoint is True)
        self.resume_report, self._last_save = None, LastSave()
        with contextlib.ExitStack() as stack:
            if self._checkpoints != self._root:
                stack.enter_context(held(trainer_line_of(self._root), Hosts()))
            for line in self._lines():
                stack.enter_context(held(line, self._hosts))
            stack.callback(run.close)
            stack.enter_context(self._watch.listening(self._preemption))
            self._data = DataPlace(self._differ, self.reads_again)
            return super().train(self._to_open(resume_from_checkpoint), *args, **kwargs)

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint for ``train(resume_from_checkpoint=True)``, damaged or not.

        Use it in a script that starts and resumes with the same command. Every rank must call it. Raises :class:`SourceError` if a store can't be
        reached.
        """
        lines = self._lines()
        return any(
            self._hosts.on_each(
                lines[0].root, "look for checkpoints", lambda: any(line.seen_steps() for line in lines)
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
        resumed = self._run.checkpoint_in(os.fspath(given), self._hosts)
        resumed.make_folder()
        return resumed.folder

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
        place = self._run.checkpoint_in(folder, self._hosts).reading().path
        if not is_url(place) and not os.path.isdir(place):
            raise CheckpointError(
                f"{place}: no such directory; give the path of a checkpoint, or True for the newest"
            )
        return is_ours(place)

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        run, step = self._run, self.state.global_step
        if checkpoint_dir is not None:
            run.resumed_step = step
            resumed = run.checkpoint_in(checkpoint_dir, self._hosts)
            if not self._is_ours(checkpoint_dir):
                self._restore_plain(resumed.path, checkpoint_dir)
                return
            try:
                with resumed.opened() as opened:
                    self._restore(resumed.path, opened)
            except ShardwiseError as error:
                if not (run.falls_back and is_corruption(error)):
                    raise
                run.damaged[resumed.path] = (step, str(error))
                if Ranks.current().rank == 0:
                    _log.warning("skipping damaged %s: %s", resumed.path, error)
                raise _DamagedError(resumed.path) from error
            run.published[step] = absolute(resumed.path)
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
        states = [one for optimizer in state.optimizers.values() for one in optimizer.state.values()]
        values = [value for one in states for value in one.values()]
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
            tensors=sum(
                t.tensor.requires_grad or not is_adapted for live in lives.values() for t in live.stored
            ),
            optimizer_tensors=sum(isinstance(value, torch.Tensor) for value in values)
            if with_optimizer
            else 0,
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
        self._note_resume(report)

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
        report = replace(restore_unlogged(state, place, io=opened.io), path=path, not_given=())
        run.rng = capture_rng()
        saved, now = holds["trainer"]["global_batch_size"], self._global_batch_size
        found = list(self._data.differences(run.loader, *run.place, "seeds" in holds["trainer"]))
        if keeps_completions(self) and not counts_as_grpo(self):
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
        self._note_resume(replace(report, exact=report.exact and not found, differences=differences))

    def _note_resume(self, report: ResumeReport) -> None:
        self.resume_report = report
        self._last_save.resumed()
        log_resume(report)

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
            resumed = self._run.checkpoint_in(resume_from_checkpoint, self._hosts)
            path = resumed.reading().path
            self._find_best(resumed.best, trial)
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
            put_seeds(train_dataloader, self._run.seeds)
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
            # Make up for the end of the epoch, which came after the save: callbacks, and the evaluation that is due there. Without it
            # the evaluation is lost, and what its loader draws is missing in the epochs that follow.
            self._run.end_is_due = False
            restore_rng(self._run.rng)
            end_epoch(self, epoch - 1, given)
            self._run.rng = capture_rng()
            if self.control.should_training_stop:
                return
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
        if best is None or not is_ours(best):
            super()._load_best_model()
            return
        _log.info("loading the best model from %s (score %s)", best, self.state.best_metric)
        with self._hosts.opened(best) as opened:
            load(self.model, opened.path, io=opened.io)
