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

import os
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from ..checkpoint.run import FailurePolicy, Failures
from ..checkpoint.sites import hosts_of
from ..errors import CheckpointError, ShardError
from ..gates import require
from ..internals.trainers import fsdp_settings, leaves_out_fsdp_version
from ..ranks.stop import PreemptionPolicy
from ..storage import place_at, real
from ..storage.records import is_url
from . import accelerate as swa
from ._accelerate import Groups, adopt, check_supported, groups_of, keep_taken_over, put_back, warn_if_whole
from ._trainer_data import DataPlace
from ._trainer_files import Run
from ._trainer_steps import EpochEnds, Resuming, StopCallback
from .trl import LOAD, References, gather_head

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["ShardwiseTrainer", "load_pretrained"]

require("trainer")


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


class ShardwiseTrainer(Resuming):
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

    _groups: Groups | None = None

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
        self._stopping, self._epoch_ends = StopCallback(), EpochEnds()
        if checkpoint_root is not None:
            self._checkpoint_root = place_at(checkpoint_root)
        with References(kwargs.get("model", next(iter(args), None))) as self._references:
            super().__init__(*args, **kwargs)
        self.add_callback(self._stopping)
        self.add_callback(self._epoch_ends)
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
            self._warn_if_whole()
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
