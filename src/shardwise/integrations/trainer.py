"""HF Trainer, and through it TRL's trainers: models loaded sharded, checkpoints that are whole or not there, exports.

What changes in a script, here with TRL::

    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained  # 1

    class MyTrainer(ShardwiseTrainer, SFTTrainer): ...                            # 2

    model, report = load_pretrained(args, "path/to/model")    # 3: for AutoModelForCausalLM.from_pretrained
    trainer = MyTrainer(model, args, train_dataset=dataset)   # 4: for SFTTrainer
    trainer.train(resume_from_checkpoint=True)                # as ever, and so are save_model and the arguments

With the Trainer itself, :class:`ShardwiseTrainer` takes its place. Methods are overridden; nothing is patched.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from .. import checkpoint
from .._peft import peft_model
from ..dist import Ranks
from ..errors import CheckpointError, ShardError, ShardwiseError
from ..export import export_hf
from ..loading import load as _load
from ..patience import patiently, remove_tree
from ..proof.report import LoadReport
from ..restoring import ResumeReport
from ..state.rng import capture_rng, restore_rng
from ..state.train_state import TrainState
from . import accelerate as swa
from ._accelerate_settings import check_supported
from ._prepare import Groups, adopt, groups_of, put_back
from ._trainer_folder import (
    ADAPTER,
    FULL,
    STATE_NAME,
    Run,
    has_optimizer,
    held,
    is_ours,
    move_into,
    newest,
    read_all,
    rotate,
    set_newer_aside,
)
from ._trl import References, gather_head, generation_state, stores_completions
from .peft import save_adapter

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["ShardwiseTrainer", "load_pretrained"]

_log = logging.getLogger(__name__)


def load_pretrained(
    args: TrainingArguments, path: str | os.PathLike[str], **options: Any
) -> tuple[Any, LoadReport]:
    """:func:`shardwise.load_pretrained`, sharded as the Trainer with these arguments would shard it.

    What ``args`` (``fsdp_config``, ``parallelism_config``, ``bf16``, …) or ``accelerate launch`` say counts; see
    :func:`shardwise.integrations.accelerate.load_pretrained` for what is honoured, for the ``options`` (``dtype``,
    ``adapter=LoraConfig(…)``, ``seed``, …), memory and errors. Every rank must call it, before it makes the trainer.
    """
    return swa.load_pretrained(_accelerator_of(args), path, **options)


def _accelerator_of(args: TrainingArguments) -> Accelerator:
    """An accelerator as the Trainer will make one. Both share their state, and with it the plugin."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import TorchDynamoPlugin

    if args.deepspeed_plugin is not None:
        raise ShardError(
            "args.deepspeed is set; expected FSDP2 (fsdp=True), DDP or one process. Leave it out"
        )
    _ = args.device  # makes the shared state; whoever asks first makes it anew
    settings = args.fsdp_plugin_args
    return Accelerator(
        mixed_precision=args.mixed_precision,
        fsdp_plugin=None if settings is None else FullyShardedDataParallelPlugin(**settings),
        parallelism_config=args.parallelism_config,
        dynamo_plugin=TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode),
    )


class _DamagedError(Exception):
    """The checkpoint to resume from turned out to be damaged while it was read, and an older one may do."""


class ShardwiseTrainer(Trainer):
    """The Trainer with ``checkpoint-N`` as shardwise checkpoints. Before another trainer class: a mixin for it.

    * ``checkpoint-N`` is one directory with everything, published whole or not at all, proved by digests when it is
      read, under any world size; what Trainer and its subclasses write beside (``trainer_state.json``, the tokenizer)
      is listed in it. ``save_total_limit`` applies after publishing and spares the newest and the best.
    * ``resume_from_checkpoint=True`` takes the newest checkpoint that is undamaged, also if that shows only when its
      tensors are read; what plain Trainer wrote is read by plain Trainer. ``resume_report`` says what was restored.
      Checkpoints newer than the one resumed from are renamed to ``_superseded-checkpoint-N-…``, or ``_damaged-…``, at
      the first save.
    * Trainer finds its place in the data by counting steps: with another global batch size than the saved one samples
      are skipped or seen again. A resume warns of that, and its report is not exact.
    * ``save_model`` writes hub files, of a ``PeftModel`` adapters, without gathering; every rank must call it.
    * The reference models that TRL's trainers make are clones of the sharded ``model``: nothing is read, none is whole.
    * While ``train`` runs, it holds ``output_dir`` (a lock that goes with the process); leftovers of killed saves go.

    Memory: ≤ 16 MiB besides the live tensors on CPU. Raises what :func:`shardwise.save`, :func:`shardwise.restore` and
    :func:`shardwise.export_hf` raise, alike on every rank; :class:`ShardError` or :class:`CheckpointError` when it is
    made with what can't be honoured: DeepSpeed, FSDP version 1, tensor or context parallelism, checkpoints pushed to
    the hub while training, ``save_on_each_node``, ``enable_jit_checkpoint``.
    """

    model: Any
    resume_report: ResumeReport | None = None
    """Of the last ``train`` that resumed from a shardwise checkpoint."""
    _run: Run
    _staging: str | None = None
    _groups: Groups | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with References() as self._references:
            super().__init__(*args, **kwargs)
        if hasattr(self.args, "model_init_kwargs"):  # TRL's
            gather_head(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer does; then what can't be honoured is refused."""
        super().create_accelerator_and_postprocess()
        self._run = Run()
        check_supported(self.accelerator)
        if self.is_fsdp_enabled:
            self._references.stand_in(self.args, self.model)
        parallelism, wrong = self.accelerator.parallelism_config, ""
        if parallelism is not None and parallelism.tp_enabled:
            wrong = "tp_size > 1 in parallelism_config; use FSDP"
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            wrong = (
                f"hub_strategy={str(self.args.hub_strategy)!r} pushes weights out of checkpoints; say 'end'"
            )
        for name in ("save_on_each_node", "enable_jit_checkpoint"):
            if getattr(self.args, name, False):
                wrong = f"{name} needs Trainer's own files; leave it out"
        if wrong:
            raise CheckpointError(f"a shardwise checkpoint can't be had with these arguments: {wrong}")

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Comes after the optimizer is made and before ``accelerator.prepare``."""
        if self.is_fsdp_enabled:
            adopt(self.accelerator.state.fsdp_plugin, model)
            if training and self.optimizer is not None:
                self._groups = groups_of(self.optimizer)
        return super()._wrap_model(model, training, dataloader)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Comes after ``accelerator.prepare`` and before anything is resumed."""
        if self._groups is not None and self.optimizer is not None:
            put_back(self.optimizer, self._groups)
            self._groups = None
        return super().create_scheduler(num_training_steps, optimizer)

    @property
    def _root(self) -> str:
        return os.path.abspath(self.args.output_dir or ".")

    # Saving

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else self._staging

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let Trainer write its small files into a folder of its own, then publish everything in one."""
        ranks, run_dir = Ranks.current(), os.path.abspath(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        final = os.path.join(run_dir, name)
        if final in self._run.published:
            self._name_best(run_dir)  # an evaluation at the end of the epoch may have come after it
            return
        with tempfile.TemporaryDirectory(prefix="shardwise-") as staging:
            folder = os.path.join(staging, name)
            with ranks.agree("write Trainer's files"):
                patiently(os.mkdir, folder)
                self._staging = staging
                try:
                    super()._save_checkpoint(model, trial)
                finally:
                    self._staging = None
                self._name_best(run_dir)
                if self.args.should_save:
                    self.state.save_to_json(os.path.join(folder, STATE_NAME))
                state = self._train_state(optimizer=not self.args.save_only_model, files=read_all(folder))
        run = self._run
        ranks.on_first("set newer checkpoints aside", lambda: set_newer_aside(run_dir, run))
        checkpoint.save(state, final, step=self.state.global_step)
        self._run.published.add(final)
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        ranks.on_first("rotate checkpoints", lambda: rotate(run_dir, limit, best))

    def _train_state(
        self, *, optimizer: bool = True, files: Mapping[str, bytes] | None = None, source: str | None = None
    ) -> TrainState:
        return TrainState(
            model=self.model,
            optimizer=self.optimizer if optimizer else None,
            scheduler=self.lr_scheduler if optimizer else None,
            scaler=getattr(self.accelerator, "scaler", None) if optimizer else None,
            files=files or {},
            extra={"trainer": {"global_batch_size": self._global_batch_size}}
            | (generation_state(self, source) if optimizer else {}),
        )

    @property
    def _global_batch_size(self) -> int:
        """Samples that a step takes: per device × accumulation × data ranks."""
        if self.accelerator.split_batches:
            return int(self._train_batch_size * self.args.gradient_accumulation_steps)
        return int(self.get_total_train_batch_size(self.args))

    def _name_best(self, run_dir: str) -> None:
        """Trainer looked for the best checkpoint where it wrote; where it will be is what its state must say."""
        if self.state.best_global_step:
            best = os.path.join(run_dir, f"checkpoint-{self.state.best_global_step}")
            if self.state.best_global_step == self.state.global_step or os.path.isdir(best):
                self.state.best_model_checkpoint = best

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Part of the checkpoint."""

    def _save_scaler(self, output_dir: str) -> None:
        """Part of the checkpoint."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Part of the checkpoint."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in hub format, or its adapters, with config, tokenizer and arguments, into ``output_dir``.

        The folder may hold other things, ``checkpoint-N`` among them; weights of an export before are replaced.
        Every rank must call it. Raises as :func:`shardwise.export_hf`.
        """
        target = os.path.abspath(output_dir or self._root)
        if self._staging is not None:
            if self.args.should_save:
                self._save_processing_class(os.path.join(target, "model"))
            return
        ranks = Ranks.current()

        def name() -> bytes:
            patiently(os.makedirs, target, exist_ok=True)
            return os.path.join(target, f".tmp-export-{secrets.token_hex(8)}").encode()

        folder = ranks.on_first("make room for the export", name).decode()
        try:
            with_adapters = peft_model(self.model) is not None
            (save_adapter if with_adapters else export_hf)(self.model, folder)
            with ranks.agree("publish export"):
                if ranks.rank == 0:
                    self._save_processing_class(folder)
                    torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))  # as Trainer does
                    move_into(target, folder, ADAPTER if with_adapters else FULL)
        finally:
            if ranks.rank == 0:
                with ranks.patience():
                    remove_tree(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_processing_class(self, folder: str) -> None:
        found = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if found is not None:
            found.save_pretrained(folder)

    # Resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``; holds ``output_dir`` meanwhile. True: from the newest undamaged checkpoint in it.

        Raises :class:`LockedError` if another run holds it, :class:`NoCheckpointError` if all are damaged. Damage of a
        checkpoint that is named is :class:`IntegrityError`, or :class:`RankError` where one rank alone meets it.
        """
        root = self._root
        with held(root):
            self._run, self.resume_report = Run(falls_back=resume_from_checkpoint is True), None
            if resume_from_checkpoint is True:
                # What there is to say of none, Trainer says.
                resume_from_checkpoint = newest(root, self._run.damaged) or True
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Begun again with the checkpoint before, where one is damaged; Trainer does so with smaller batches."""
        while True:
            try:
                return super()._inner_training_loop(
                    batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
                )
            except _DamagedError:
                resume_from_checkpoint = newest(self._root, self._run.damaged)
            if not self.is_fsdp_enabled:  # of plain Trainer's, it has to be read before
                self._load_from_checkpoint(resume_from_checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """All of a shardwise checkpoint is restored at once, when everything is there."""
        if not is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is not None:
            self._run.resumed_step = self.state.global_step
            if is_ours(checkpoint_dir):
                try:
                    self._restore(checkpoint_dir)
                except ShardwiseError as error:
                    if not (self._run.falls_back and checkpoint.is_damage(error)):
                        raise
                    self._run.damaged[self.state.global_step] = str(error)
                    if Ranks.current().rank == 0:
                        _log.warning("skipping damaged %s: %s", checkpoint_dir, error)
                    raise _DamagedError(checkpoint_dir) from error
        # It finds none of its files there; subclasses have their own.
        super()._load_optimizer_and_scheduler(checkpoint_dir)

    def _restore(self, path: str) -> None:
        """Everything at once; what Trainer makes of it withdraws the promise of an exact resume."""
        ranks = Ranks.current()
        with_optimizer = bool(ranks.on_first("look for optimizer", lambda: has_optimizer(path)))
        state = self._train_state(optimizer=with_optimizer, source=path)
        report = checkpoint.restore(state, path)
        self._run.rng = capture_rng()
        saved, now = state.extra["trainer"]["global_batch_size"], self._global_batch_size
        found = []
        if hasattr(self, "_buffered_inputs") and not stores_completions(self):
            found.append(f"completions that {type(self).__name__} keeps for later steps are not stored")
        if not with_optimizer:
            found.append(
                "the checkpoint holds the model only (save_only_model): optimizer and learning rate begin anew"
            )
        if saved != now:
            found.append(
                f"global batch size (per device × accumulation × ranks): saved {saved}, now {now}. Trainer finds its place "
                f"in the data by steps: about {abs(saved - now) * report.step} samples are "
                f"{'skipped' if now > saved else 'seen again'}; keep the product to avoid that"
            )
        if self.args.ignore_data_skip:
            found.append("ignore_data_skip: the epoch's data begin anew")
        report = report.with_history(self._run.damaged, ())
        differences = report.differences + tuple(found)
        self.resume_report = replace(report, exact=report.exact and not found, differences=differences)
        if differences and ranks.rank == 0:
            _log.warning("the resume is not exact: %s", "; ".join(differences))

    def _load_rng_state(self, checkpoint_dir: str | None) -> None:
        """Once more, because Trainer draws numbers when it skips batches."""
        if self._run.rng is None:
            super()._load_rng_state(checkpoint_dir)
        else:
            restore_rng(self._run.rng)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not is_ours(best):
            super()._load_best_model()
            return
        _log.info("loading the best model from %s (score %s)", best, self.state.best_metric)
        _load(self.model, best)
