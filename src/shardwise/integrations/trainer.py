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

import functools
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer, TrainingArguments

from .. import checkpoint
from .._compat import original_class
from .._peft import peft_model
from ..dist import Ranks
from ..errors import CheckpointError, ShardError
from ..export import export_hf
from ..loading import load as _load
from ..names import unwrap
from ..proof.report import LoadReport
from ..restoring import ResumeReport
from ..state.rng import capture_rng, restore_rng
from ..state.train_state import TrainState
from ..store.publish import discard
from ..store.write import fsync_directory
from . import accelerate as swa
from ._trainer_folder import (
    ADAPTER,
    FULL,
    STATE_NAME,
    checkpoints,
    held,
    is_ours,
    move_into,
    newest,
    read_all,
)
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


class ShardwiseTrainer(Trainer):
    """The Trainer with ``checkpoint-N`` as shardwise checkpoints. Before another trainer class: a mixin for it.

    * ``checkpoint-N`` is one directory with everything, published whole or not at all, proved by digests when it is
      read, under any world size; what Trainer and its subclasses write beside (``trainer_state.json``, the tokenizer)
      is listed in it. ``save_total_limit`` applies after publishing and spares the newest and the best.
    * ``resume_from_checkpoint=True`` takes the newest checkpoint that is undamaged; what plain Trainer wrote is read by
      plain Trainer. ``resume_report`` says what was restored. Checkpoints newer than the one resumed from are renamed
      to ``superseded-checkpoint-N-…`` at the first save.
    * ``save_model`` writes hub files, of a ``PeftModel`` adapters, without gathering; every rank must call it.
    * While ``train`` runs, it holds ``output_dir`` (a lock that goes with the process); leftovers of killed saves go.

    Memory: ≤ 16 MiB besides the live tensors on CPU. Raises what :func:`shardwise.save`, :func:`shardwise.restore` and
    :func:`shardwise.export_hf` raise, alike on every rank; :class:`ShardError` or :class:`CheckpointError` when it is
    made with what can't be honoured: DeepSpeed, FSDP version 1, tensor or context parallelism, checkpoints pushed to
    the hub while training, ``save_on_each_node``, ``enable_jit_checkpoint``.
    """

    model: Any
    resume_report: ResumeReport | None = None
    """Of the last ``train`` that resumed from a shardwise checkpoint."""
    _staging: str | None = None
    _published: frozenset[str] = frozenset()
    _resumed_step: int = -1
    _rng: Any = None

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer does; then what can't be honoured is refused."""
        super().create_accelerator_and_postprocess()
        swa._check_supported(self.accelerator)
        wrong = ""
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            wrong = (
                f"hub_strategy={str(self.args.hub_strategy)!r} pushes weights out of checkpoints; say 'end'"
            )
        for name in ("save_on_each_node", "enable_jit_checkpoint"):
            if getattr(self.args, name, False):
                wrong = f"{name} needs Trainer's own files; leave it out"
        if wrong:
            raise CheckpointError(f"a shardwise checkpoint can't be had with these arguments: {wrong}")

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_fsdp_enabled:
            _adopt(self.accelerator.state.fsdp_plugin, model)
        return super()._wrap_model(model, *args, **kwargs)

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
        if final in self._published:
            return
        with tempfile.TemporaryDirectory(prefix="shardwise-") as staging:
            folder = os.path.join(staging, name)
            with ranks.agree("write Trainer's files"):
                os.mkdir(folder)
                self._staging = staging
                try:
                    super()._save_checkpoint(model, trial)
                finally:
                    self._staging = None
                self._note_best(run_dir, folder)
                state = self._train_state(optimizer=not self.args.save_only_model, files=read_all(folder))
        ranks.on_first("set newer checkpoints aside", lambda: self._make_way(run_dir))
        checkpoint.save(state, final, step=self.state.global_step)
        self._published |= {final}
        ranks.on_first("rotate checkpoints", lambda: self._rotate(run_dir))

    def _train_state(self, *, optimizer: bool = True, files: Mapping[str, bytes] | None = None) -> TrainState:
        return TrainState(
            model=self.model,
            optimizer=self.optimizer if optimizer else None,
            scheduler=self.lr_scheduler if optimizer else None,
            scaler=getattr(self.accelerator, "scaler", None) if optimizer else None,
            files=files or {},
        )

    def _note_best(self, run_dir: str, folder: str) -> None:
        """Trainer looked for the best checkpoint where it wrote; where it will be is what its state must say."""
        if self.state.best_global_step:
            best = os.path.join(run_dir, f"checkpoint-{self.state.best_global_step}")
            if self.state.best_global_step == self.state.global_step or os.path.isdir(best):
                self.state.best_model_checkpoint = best
        if self.args.should_save:
            self.state.save_to_json(os.path.join(folder, STATE_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Part of the checkpoint."""

    def _save_scaler(self, output_dir: str) -> None:
        """Part of the checkpoint."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Part of the checkpoint."""

    def _make_way(self, run_dir: str) -> bytes:
        """Checkpoints that a line before this one wrote are kept, under names that nothing takes for newer ones."""
        newer = {step: p for step, p in checkpoints(run_dir).items() if step > self._resumed_step}
        for path in (p for p in newer.values() if p not in self._published):
            aside = os.path.join(run_dir, f"superseded-{os.path.basename(path)}-{secrets.token_hex(4)}")
            try:
                os.rename(path, aside)
            except OSError as error:
                raise CheckpointError(f"{path}: can't be set aside: {error.strerror}") from error
            fsync_directory(run_dir)
            _log.warning("%s is of another line than this run; it is %s now", path, aside)
        return b""

    def _rotate(self, run_dir: str) -> bytes:
        """What stays too much harms nobody: nothing here makes a save fail, which is published."""
        limit, found = self.args.save_total_limit, list(checkpoints(run_dir).values())
        if not limit or limit < 1:
            return b""
        kept = {found[0], os.path.abspath(self.state.best_model_checkpoint or found[0])}
        excess = len(found) - max(limit, len(kept))
        for path in [p for p in reversed(found) if p not in kept][: max(excess, 0)]:
            try:
                discard(path)
            except OSError as error:
                _log.warning("can't delete %s: %s", path, error)
        return b""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in hub format, or its adapters, with config and tokenizer, into ``output_dir``.

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
            os.makedirs(target, exist_ok=True)
            return os.path.join(target, f".tmp-export-{secrets.token_hex(8)}").encode()

        folder = ranks.on_first("make room for the export", name).decode()
        try:
            with_adapters = peft_model(self.model) is not None
            (save_adapter if with_adapters else export_hf)(self.model, folder)
            with ranks.agree("publish export"):
                if ranks.rank == 0:
                    self._save_processing_class(folder)
                    move_into(target, folder, ADAPTER if with_adapters else FULL)
        finally:
            if ranks.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_processing_class(self, folder: str) -> None:
        found = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if found is not None:
            found.save_pretrained(folder)

    # Resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``; holds ``output_dir`` meanwhile. True: from the newest undamaged checkpoint in it.

        Raises :class:`LockedError` if another run holds it, :class:`NoCheckpointError` if all are damaged.
        """
        root = self._root
        with held(root):
            if resume_from_checkpoint is True:
                found = Ranks.current().on_first("find newest checkpoint", lambda: newest(root)).decode()
                resume_from_checkpoint = found or True  # what there is to say of none, Trainer says
            self._resumed_step, self._published, self._rng, self.resume_report = -1, frozenset(), None, None
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """All of a shardwise checkpoint is restored at once, when everything is there."""
        if not is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is not None:
            self._resumed_step = self.state.global_step
            if is_ours(checkpoint_dir):
                report = checkpoint.restore(self._train_state(), checkpoint_dir)
                self.resume_report, self._rng = report, capture_rng()
                if report.differences and Ranks.current().rank == 0:
                    _log.warning("the resume is not exact: %s", "; ".join(report.differences))
        super()._load_optimizer_and_scheduler(
            checkpoint_dir
        )  # finds none of its files; subclasses have their own

    def _load_rng_state(self, checkpoint_dir: str | None) -> None:
        """Once more, because Trainer draws numbers when it skips batches."""
        if self._rng is None:
            super()._load_rng_state(checkpoint_dir)
        else:
            restore_rng(self._rng)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not is_ours(best):
            super()._load_best_model()
            return
        _log.info("loading the best model from %s (score %s)", best, self.state.best_metric)
        _load(self.model, best)


def _adopt(plugin: Any, model: nn.Module) -> None:
    """Settle in the plugin what ``prepare`` would look up in a model that is sharded already, and can't find there.

    For models that were sharded under another plugin object, or by ``sw.shard``. Raises :class:`ShardError`.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    modules = list(model.modules())
    if not any(isinstance(m, FSDPModule) for m in modules):
        return
    if not isinstance(model, FSDPModule) and not isinstance(unwrap(model), FSDPModule):
        raise ShardError(
            f"parts of the {type(model).__name__} are sharded, and it is not: was it wrapped after it was loaded? "
            "Adapters belong into the load: load_pretrained(args, path, adapter=peft_config), without peft_config for the trainer"
        )
    if any(isinstance(m, CheckpointWrapper) for m in modules):
        plugin.activation_checkpointing = False  # the wrappers are there
    if plugin.auto_wrap_policy is not transformer_auto_wrap_policy:
        return
    names = plugin.transformer_cls_names_to_wrap
    if names is None:
        names = plugin.transformer_cls_names_to_wrap = list(getattr(model, "_no_split_modules", None) or ())
    classes = {kind for kind in map(original_class, modules) if kind.__name__ in names}
    plugin.auto_wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
