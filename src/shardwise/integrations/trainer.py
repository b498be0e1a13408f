"""HF Trainer, and through it TRL's trainers: models loaded sharded, checkpoints published whole or not at all, exports.

The changes in a script, here with TRL::

    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained  # 1

    class MyTrainer(ShardwiseTrainer, SFTTrainer): ...                            # 2

    model = load_pretrained(args, "path/to/model")            # 3: for AutoModelForCausalLM.from_pretrained
    trainer = MyTrainer(model, args, train_dataset=dataset)   # 4: for SFTTrainer
    trainer.train(resume_from_checkpoint=True)                # as usual, and so are save_model and the arguments

With the Trainer itself, :class:`ShardwiseTrainer` takes its place. Methods are overridden; no class, module or function
of another package is changed. Changes to objects of the run: docs/concepts/patching.md.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from ..checkpoint.failures import FailurePolicy, Failures
from ..checkpoint.hosts import hosts_of
from ..errors import CheckpointError, ShardError
from ..gates import require
from ..internals.trainer import fsdp_settings, leaves_out_fsdp_version
from ..preemption.stops import PreemptionPolicy
from ..storage import is_url, place_at, real
from . import accelerate as swa
from ._accelerate_settings import check_supported, keep_taken_over
from ._accelerate_sharding import warn_if_whole
from ._prepare import Groups, adopt, groups_of, put_back
from ._trainer_data import DataPlace
from ._trainer_folder import Run
from ._trainer_resuming import Resuming
from ._trainer_saving import EpochEnds
from ._trainer_stop import StopCallback
from ._trl import LOAD, References, gather_head

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["ShardwiseTrainer", "load_pretrained"]

require("trainer")


def load_pretrained(args: TrainingArguments, path: str | os.PathLike[str], **options: Any) -> Any:
    """:func:`shardwise.load_pretrained`, sharded as the Trainer with these arguments would shard it.

    Follows ``args`` (``fsdp_config``, ``parallelism_config``, ``bf16``, …) and ``accelerate launch``. See
    :func:`shardwise.integrations.accelerate.load_pretrained` for the supported settings, the ``options`` (``dtype``,
    ``adapter=LoraConfig(…)``, ``seed``, …) and memory. Returns the sharded model, for the trainer.

    Every rank must call it, before it makes the trainer. Raises :class:`ShardError` for DeepSpeed and other unsupported
    settings, with transformers before 5.10 also for an ``fsdp_config`` without ``version``, else as
    :func:`shardwise.load_pretrained`.
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
    """The Trainer with ``checkpoint-N`` as shardwise checkpoints. It is also a mixin, before another trainer class.

    * ``checkpoint-N`` is one directory with everything, published whole or not at all, and proved by digests when it is
      read, at any world size. Its manifest lists the files that Trainer and its subclasses write as well
      (``trainer_state.json``, the tokenizer). ``save_total_limit`` applies after publishing and keeps the newest and
      the best.
    * ``resume_from_checkpoint=True`` takes the newest undamaged checkpoint, also if damage shows only when tensors are
      read. Plain Trainer reads its own checkpoints. ``resume_report`` lists the restored state. The first save renames
      checkpoints newer than the resumed one to ``_superseded-checkpoint-N-…``, or ``_damaged-…``.
    * A resume continues exactly at the data position of the save, in any epoch, with any sampler and loader: the
      epoch begins again under its own random states. The report's ``differences`` name exceptions. With another
      global batch size than the saved one samples are skipped or seen again, and the report says so.
    * ``checkpoint-N`` holds the files of ``_save`` and ``save_model`` of other classes. This class writes the weights,
      once: a ``_save`` that it calls gets no tensors. ``from_pretrained(checkpoint-N)`` reads model and tokenizer.
    * ``save_model`` writes hub files, or adapters for a ``PeftModel``, without gathering; every rank must call it.
    * Reference models of TRL's trainers are clones of the sharded ``model``: nothing is read, and none is whole.
    * ``train`` holds ``output_dir`` (by a lock that ends with the process) and deletes leftovers of killed saves.
    * ``checkpoint_root`` of the constructor, a directory or the URL of an object store with conditional writes, says where
      checkpoints are saved; ``output_dir`` stays local. In a store their names are ``step-N.<nonce>``. ``resume_from_checkpoint`` takes URLs.
    * ``preemption=PreemptionPolicy()`` of the constructor: while ``train`` runs, a signal on any rank (SIGTERM, SIGUSR1) stops all ranks
      after the same step, or in the same batch of an evaluation, and ``train`` returns with that step saved. Then call
      ``sys.exit(trainer.exit_code)``: it is the policy's ``exit_status`` (75), and 0 for a run that came to its end. With the policy's
      ``deadline_s``, and after a second signal, no last save begins that takes longer than saves took; the run then continues from
      the checkpoint before. ``request_stop()`` asks for the same without a signal.
    * ``failures=FailurePolicy()`` of the constructor: a save that storage made fail is logged, and training continues.
      :attr:`save_report` says why, and the next save is tried as usual; at ``max_failures`` failed saves in a row ``train`` raises.
      A checkpoint that can't be saved in the first place goes to the policy's ``fallback``; ``resume_from_checkpoint=True`` takes
      the newest of both.

    * ``local=True`` of the constructor: each host keeps the files of its ranks of a ``checkpoint-N`` on its own disk, below ``output_dir`` or
      ``checkpoint_root`` there. A resume takes the newest that all hosts together hold, on any ranks and hosts, if all are there that
      saved it. Other programs read it once its parts are merged: docs/howto/several-hosts.md. ``save_model`` needs a folder that
      all ranks see.

    Memory: ≤ 16 MiB besides the live tensors on CPU. Raises the errors of :func:`shardwise.save`,
    :func:`shardwise.restore` and :func:`shardwise.export_hf`, the same on every rank; its constructor raises
    :class:`ShardError` or :class:`CheckpointError` for unsupported settings: DeepSpeed, FSDP version 1, tensor or
    context parallelism, checkpoints pushed to the hub while training, ``save_on_each_node``, ``enable_jit_checkpoint``.
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
            wrong = (
                f"hub_strategy={str(self.args.hub_strategy)!r} pushes weights out of checkpoints; say 'end'"
            )
        if is_url(self.args.output_dir or ""):
            wrong = f"output_dir={self.args.output_dir!r}, but Trainer's must be local; give the trainer checkpoint_root"
        fallback = self._failures.fallback
        if fallback is not None and real(fallback) in map(real, (self._root, self._checkpoints)):
            wrong = f"the fallback is the run's own place: {fallback}; give another one"
        if self._hosts.is_local and is_url(self._checkpoints):
            wrong = f"local=True keeps checkpoints on the hosts' own disks, and checkpoint_root is a URL: {self._checkpoints}"
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
