"""What the ranks of test_trainer.py run: transformers' and TRL's real trainers with FSDP2 on CPU."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.harness.logged import warnings_logged
from tests.harness.versions import lacking
from tests.integrations._trainer_parts import Rows, arguments, dataset, tokenizer

if lacking("trainer") is None:
    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in model.state_dict().items()
    }


def stop_at(step: int) -> Any:
    """A callback that ends a life there, without a save."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == step

    return Stop()


def config_of(path: str, dropout: float) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, attention_dropout=dropout)


def life(
    path: str, args: Any, *, resume: Any = None, stop: int = 99, dropout: float = 0.2, **options: Any
) -> tuple[Any, list[Any]]:
    """One life of a run: the trainer afterwards, and (step, loss, gradient norm) of each step."""
    model = load_pretrained(args, path, config=config_of(path, dropout))
    trainer = ShardwiseTrainer(
        model, args, train_dataset=Rows(), processing_class=tokenizer(), callbacks=[stop_at(stop)], **options
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, history(trainer)


def history(trainer: Any) -> list[Any]:
    """(step, loss, gradient norm) of each step; a norm of 0 where torch gives each rank its own part of it."""
    is_whole = lacking("torch>=2.10", "item() of a DTensor reduces nothing") is None
    return [
        (row["step"], row["loss"], row["grad_norm"] * is_whole)
        for row in trainer.state.log_history
        if "loss" in row
    ]


def checkpoints(root: str) -> list[str]:
    return sorted(n for n in os.listdir(root) if "checkpoint" in n)


def resume(path: str, root: str, options: dict[str, Any]) -> dict[str, Any]:
    """An uninterrupted run; one that is stopped in the middle of an epoch and resumed; both with dropout."""
    found: dict[str, Any] = {}
    with arguments(f"{root}/whole", **options) as args:
        trainer, found["whole"] = life(path, args)
        found["after"] = whole(trainer.model)
    with arguments(f"{root}/run", **options) as args:
        _, found["first"] = life(path, args, stop=10)
        found["stopped"] = checkpoints(f"{root}/run")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(f"{root}/run", f"{root}/copy")
        os.mkdir(f"{root}/run/checkpoint-11")  # what a killed save of another program leaves
        os.mkdir(f"{root}/run/.tmp-checkpoint-12-{'ab' * 8}")  # or ours
    dist.barrier()
    changed = {"seed": 7, "data_seed": 42, "learning_rate": 0.5}
    with arguments(f"{root}/run", **changed, **options) as args, warnings_logged() as found["warned"]:
        trainer, found["resumed"] = life(path, args, resume=True)
        report = trainer.resume_report
        found["exact"], found["differences"] = report.exact, report.differences
        found["replaced"], found["not given"] = report.replaced, report.not_given
        found["resumed after"] = whole(trainer.model)
        found["at the end"] = checkpoints(f"{root}/run")
        trainer.save_model()
        trainer.save_model(f"{root}/export")
    return found


def elsewhere(path: str, root: str) -> dict[str, Any]:
    """From the same checkpoint on, without dropout, at this world size; and the best model of a short run."""
    found: dict[str, Any] = {}
    world = dist.get_world_size()
    with arguments(f"{root}/at-{world}") as args:
        trainer, found["steps"] = life(path, args, resume=f"{root}/copy/checkpoint-9", dropout=0.0)
        report = trainer.resume_report
        found["worlds"] = report.saved_world_size, report.world_size
        found["differences"] = report.differences
        found["after"] = whole(trainer.model)
    return found


def other_batch(path: str, root: str) -> dict[str, Any]:
    """From the same checkpoint on with batches of another size; and without looking for the place in the data."""
    found: dict[str, Any] = {}
    whole_batches = {"per_device_train_batch_size": 4, "accelerator_config": {"split_batches": True}}
    ways = {
        "larger": {"per_device_train_batch_size": 8 // dist.get_world_size()},
        "no skip": {"ignore_data_skip": True},
        "as large": whole_batches,
    }
    for name, options in ways.items():
        with arguments(f"{root}/{name}", save_strategy="no", **options) as args, warnings_logged() as warned:
            trainer, _ = life(path, args, resume=f"{root}/copy/checkpoint-9", stop=10)
        report = trainer.resume_report
        found[name] = report.exact, "; ".join(report.differences), "; ".join(warned)
    return found


def best(path: str, root: str) -> dict[str, Any]:
    """The best by a metric that falls is the first; rotation spares it, and it is loaded at the end."""
    from transformers import TrainerCallback

    found: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            found.setdefault(f"at {state.global_step}", whole(model))

    with arguments(
        root,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
    ) as args:
        model = load_pretrained(args, path)
        trainer = ShardwiseTrainer(model, args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Look()])
        trainer.train()
        found["best"] = os.path.basename(trainer.state.best_model_checkpoint)
        found["loaded"] = whole(trainer.model)
        # Another run in the same directory, which resumes nothing: what is there is kept under other names.
        trainer.args.max_steps = 1
        trainer.train()
        found["then"] = checkpoints(root)
    return found


def best_at_the_end_of_an_epoch(path: str, root: str) -> str:
    """A step is saved, and then evaluated, when its epoch ends: it is the best, and is there already."""
    from transformers import TrainerCallback

    class Save(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step == 6

    options = {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "loss"}
    with arguments(root, max_steps=6, **options) as args:
        model = load_pretrained(args, path)
        trainer = ShardwiseTrainer(model, args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Save()])
        trainer.train()
        return str(trainer.state.best_model_checkpoint)


def plain(path: str, root: str) -> dict[str, Any]:
    """Plain Trainer with plain loading, uninterrupted; a run of it taken up here."""
    from transformers import AutoModelForCausalLM, Trainer

    found: dict[str, Any] = {}
    with arguments(root) as args:
        model = AutoModelForCausalLM.from_pretrained(path, config=config_of(path, 0.2))
        trainer = Trainer(model, args, train_dataset=Rows(), callbacks=[stop_at(10)])
        trainer.train()
        found["plain"] = history(trainer)
    with arguments(root) as args:
        trainer, found["taken up"] = life(path, args, resume=True)
        found["reported"] = trainer.resume_report
        found["tensors"] = len(dict(trainer.model.named_parameters()))
        found["names"] = checkpoints(root)
    return found


def warned(path: str, root: str) -> dict[str, list[str]]:
    """What is warned of while a model is loaded, or handed to a trainer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def meta(args: Any) -> Any:
        with sw.meta_init():
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))

    def stock(args: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path)

    def ours(args: Any) -> Any:
        return load_pretrained(args, path)

    found = {}
    one_rank = {"fsdp_config": {"cpu_ram_efficient_loading": True}}
    for name, load, options in (
        ("no FSDP", ours, {"fsdp": False}),
        ("from_pretrained", stock, {}),
        ("sharded", ours, {}),
        ("one rank reads", stock, one_rank),
        ("meta", meta, {}),
    ):
        with arguments(root, **options) as args, warnings_logged() as texts:
            ShardwiseTrainer(load(args), args, train_dataset=Rows())
        found[name] = list(texts)
    return found


def checkpointed(path: str, root: str) -> tuple[list[str], bool]:
    """The blocks that ``fsdp_config`` wraps for activation checkpointing in a trained model, and whether the plugin asks for more."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    wanted = {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"], "activation_checkpointing": True}
    options = {"max_steps": 1, "save_strategy": "no", "fsdp_config": wanted}
    with arguments(root, plugin=False, fsdp="full_shard auto_wrap", **options) as args:
        PartialState._shared_state["distributed_type"] = (
            DistributedType.MULTI_GPU
        )  # then Accelerate chooses FSDP
        model = load_pretrained(args, path)
        trainer = ShardwiseTrainer(model, args, train_dataset=Rows())
        trainer.train()
        wrapped = [name for name, m in trainer.model.named_modules() if isinstance(m, CheckpointWrapper)]
        return wrapped, trainer.accelerator.state.fsdp_plugin.activation_checkpointing


def version_left_out(path: str, root: str) -> list[str]:
    """The errors of loading and of the trainer where the arguments don't say which FSDP they mean."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import AutoModelForCausalLM

    found = []
    with arguments(root, plugin=False, fsdp_config={"version": None}) as args:
        PartialState._shared_state["distributed_type"] = (
            DistributedType.MULTI_GPU
        )  # then Accelerate chooses FSDP
        model = AutoModelForCausalLM.from_pretrained(path)
        for ask in (
            lambda: load_pretrained(args, path),
            lambda: ShardwiseTrainer(model, args, train_dataset=Rows()),
        ):
            try:
                ask()
            except ShardwiseError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def one_rank_reads(path: str, root: str) -> str:
    """Training of a model with a persistent buffer and ``cpu_ram_efficient_loading``."""
    from transformers import AutoModelForCausalLM

    with arguments(root, fsdp_config={"cpu_ram_efficient_loading": True}) as args:
        model = AutoModelForCausalLM.from_pretrained(path)
        model.register_buffer("seen", torch.zeros(1))
        try:
            ShardwiseTrainer(model, args, train_dataset=Rows()).train()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "none"


def refused(path: str, root: str, locked: str) -> dict[str, str]:
    """What can't be honored is a named error, alike on all ranks. Another process holds the directory ``locked``."""
    import peft
    from accelerate import ParallelismConfig
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import fully_shard

    found = {}

    def attempt(name: str, make: Any = lambda model: model, output_dir: str = root, **options: Any) -> None:
        with arguments(output_dir, **options) as args:
            if "parallelism_config" in options:  # Accelerate takes that on GPUs only
                PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            try:
                model = load_pretrained(args, path)
                trainer = ShardwiseTrainer(make(model), args, train_dataset=Rows())
                trainer.train(resume_from_checkpoint=name == "damaged")
                found[name] = "nothing"
            except ShardwiseError as error:
                found[name] = f"{type(error).__name__}: {error}"

    attempt("each node", save_on_each_node=True)
    attempt("jit", enable_jit_checkpoint=True)
    attempt("locked", output_dir=locked)
    attempt("tp", fsdp=False, parallelism_config=ParallelismConfig(tp_size=dist.get_world_size()))
    attempt("wrapped", lambda model: peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])))
    if dist.get_rank() == 0:
        os.makedirs(f"{root}/checkpoint-3")
    dist.barrier()
    attempt("damaged")
    # Sharded by hand and not by this plugin object: the plugin learns the classes of the model as it was.
    with arguments(root, max_steps=1, save_strategy="no") as args:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        ShardwiseTrainer(model, args, train_dataset=Rows()).train()
        found["by hand"] = "trained"
    return found


def sft(path: str, folder: str, options: dict[str, Any], *, resume: Any = None) -> Any:
    """TRL's SFTTrainer with LoRA; exports the adapter at the end.

    Of rank 1: the second of two ranks has no rows of any ``lora_A``.
    """
    import peft
    from trl import SFTConfig, SFTTrainer

    class MyTrainer(ShardwiseTrainer, SFTTrainer):
        pass

    config = peft.LoraConfig(
        r=1, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    with arguments(folder, SFTConfig, max_length=16, **options) as args:
        model = load_pretrained(args, path, adapter=config)
        trainer = MyTrainer(model, args, train_dataset=dataset(), processing_class=tokenizer())
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{folder}/adapter")
    return trainer


def sft_killed(path: str, folder: str, options: dict[str, Any], step: int) -> None:
    """A life that ends while it writes the checkpoint of ``step``: rank 1 kills itself as soon as it sees that."""

    def watch() -> None:
        while not any(name.startswith(f".tmp-checkpoint-{step}-") for name in os.listdir(folder)):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    os.makedirs(folder, exist_ok=True)
    if dist.get_rank() == 1:
        threading.Thread(target=watch, daemon=True).start()
    sft(path, folder, options)


def lora(path: str, root: str, options: dict[str, Any]) -> dict[str, Any]:
    """The run uninterrupted, and the rest of the one that was killed."""
    found: dict[str, Any] = {"left": checkpoints(f"{root}/run")}
    trainer = sft(path, f"{root}/whole", options)
    found["whole"], found["after"] = history(trainer), whole(trainer.model)
    trainer = sft(path, f"{root}/run", options, resume=True)
    found["resumed"], found["resumed after"] = history(trainer), whole(trainer.model)
    found["exact"], found["step"] = trainer.resume_report.exact, trainer.resume_report.step
    found["verified"] = sw.verify(f"{root}/run/checkpoint-12").step
    return found
