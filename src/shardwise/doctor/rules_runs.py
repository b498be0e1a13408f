"""Rules over runs: Accelerate's and the Trainer's settings, and checkpoints."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..gates import GATES
from ..objects import frozen
from .facts import Bite, Checkpoint, Facts, Model, Rule, Settings, count, each, gib, is_on, is_version, number
from .rules_machine import some

__all__ = [
    "ACCELERATE",
    "CHECKPOINTS",
    "TRAINER",
]


# ----------------------------------------------------------------------------------------------------
# Rules over Accelerate's YAML, and over what TrainingArguments share with it.


@frozen
class _Fsdp:
    """A configuration that uses FSDP."""

    settings: Settings
    version: int
    is_yaml: bool
    wraps_blocks: bool = False
    """Whether blocks are wrapped without a policy."""

    @property
    def path(self) -> str:
        return self.settings.path

    @property
    def values(self) -> Mapping[str, Any]:
        return self.settings.values

    def get(self, name: str, default: Any = "") -> Any:
        """An FSDP setting, without the prefix."""
        return self.settings.fsdp.get(name, default)

    def says(self, name: str) -> bool:
        return is_on(self.get(name))

    @property
    def policy(self) -> str:
        return str(self.get("auto_wrap_policy", "NO_WRAP")).upper()


def _fsdp(facts: Facts) -> Iterator[_Fsdp]:
    for settings in facts.accelerate:
        if str(settings.values.get("distributed_type", "FSDP")).upper() == "FSDP" and settings.fsdp:
            yield _Fsdp(settings, number(settings.fsdp.get("version", 1)) or 1, is_yaml=True)
    default = 2 if is_version(facts, "transformers", GATES["fsdp-version"].needs) else 1
    for settings in facts.arguments:
        if settings.values.get("fsdp"):
            version = number(settings.fsdp.get("version", default)) or default
            wraps = default == 2 or "auto_wrap" in str(settings.values["fsdp"])
            yield _Fsdp(settings, version, is_yaml=False, wraps_blocks=wraps)


def _fsdp2(facts: Facts) -> Iterator[_Fsdp]:
    return (one for one in _fsdp(facts) if one.version == 2)


def _accelerate(facts: Facts) -> Iterator[Settings]:
    return iter(facts.accelerate)


def _not_efficient(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    if memory is None or facts.ranks < 2:
        return
    for one in _fsdp(facts):
        for model in facts.models:
            if not one.says("cpu_ram_efficient_loading") and model.nbytes * facts.ranks > memory.free_bytes:
                yield Bite(
                    one.path,
                    f"Loading {model.path} will run out of host memory: each of the {facts.ranks} ranks loads the full model.",
                    "cpu_ram_efficient_loading is off, so each rank loads the full model before sharding it.",
                    "Load with ShardwiseAccelerator.load_pretrained, which gives each rank only its own shards.",
                )


def _stores_masters(one: _Fsdp) -> bool:
    # Accelerate's own default; the HF Trainer's is FULL_STATE_DICT.
    default = "SHARDED_STATE_DICT" if one.is_yaml else "FULL_STATE_DICT"
    is_sharded = str(one.get("state_dict_type", default)).upper() in ("SHARDED_STATE_DICT", "3")
    is_mixed = str(one.values.get("mixed_precision", "no")).lower() in ("bf16", "fp16")
    return is_sharded and (is_mixed or bool(one.values.get("bf16") or one.values.get("fp16")))


def _refused(facts: Facts) -> Iterator[Bite]:
    for one in _fsdp2(facts):
        reshard = str(one.get("reshard_after_forward", True)).lower()
        bad = {
            "forward_prefetch": one.says("forward_prefetch"),
            "state_dict_type": str(one.get("state_dict_type")).upper() in ("LOCAL_STATE_DICT", "2"),
            "reshard_after_forward": reshard not in ("true", "false", "1", "0", "yes", "no"),
            "activation_checkpointing_offload": one.says("activation_checkpointing_offload")
            and not one.says("activation_checkpointing"),
        }
        for name in (name for name, is_bad in bad.items() if is_bad):
            yield Bite(
                one.path,
                f"Accelerator() raises a ValueError: fsdp_{name} is {one.get(name)!r}.",
                "FSDP2 doesn't have this setting: it's left over from FSDP1, or needs another setting to go with it.",
                f"Remove fsdp_{name}, or set what FSDP2 accepts (reshard_after_forward: true, state_dict_type: "
                "SHARDED_STATE_DICT).",
            )


def _by_size_zero(one: _Fsdp) -> bool:
    return one.policy == "SIZE_BASED_WRAP" and not number(one.get("min_num_params"))


def _splits_ties(one: _Fsdp, model: Model) -> str:
    """Why embedding and head of a tied model would come into different groups; empty if they do not."""
    if one.policy == "TRANSFORMER_BASED_WRAP":
        classes = [name.strip() for name in str(one.get("transformer_layer_cls_to_wrap")).split(",")]
        alone = [name for name in classes if name in ("Embedding", "Linear")]
        return f"fsdp_transformer_layer_cls_to_wrap names {alone[0]}" if alone else ""
    rows, width = number(model.text_config.get("vocab_size")), number(model.text_config.get("hidden_size"))
    least = number(one.get("min_num_params"))
    if one.policy == "SIZE_BASED_WRAP" and rows and width and least and rows * width > least:
        return f"fsdp_min_num_params {least} is less than the embedding's {rows * width} parameters"
    return ""


def _tied_groups(facts: Facts) -> Iterator[Bite]:
    for one in _fsdp2(facts):
        for model in facts.models:
            is_tied = is_on(model.text_config.get("tie_word_embeddings", ""))
            if is_tied and (why := _splits_ties(one, model)):
                yield Bite(
                    one.path,
                    f"The first forward pass of {model.path} raises a ValueError: embed_tokens.weight 'is shared with a parameter "
                    "already managed by another FSDP group'.",
                    f"The model ties its head to its embedding, but they end up in different FSDP groups: {why}.",
                    "List only the block's class in fsdp_transformer_layer_cls_to_wrap, so that the root group contains both.",
                )


def _wrapped_classes(one: _Fsdp) -> list[str]:
    """The classes that a policy by class is to wrap; empty for another policy, or for the model's own."""
    if one.policy != "TRANSFORMER_BASED_WRAP" and (one.is_yaml or one.policy != "NO_WRAP"):
        return []
    found = one.get("transformer_layer_cls_to_wrap") or ""
    names = found if isinstance(found, list) else str(found).split(",")
    return [text for name in names if (text := str(name).strip())]


def _unknown_class(facts: Facts) -> Iterator[Bite]:
    for one in _fsdp(facts):
        for model in facts.models:
            known = (*model.classes, "Embedding", "Linear", "LayerNorm", "Conv2d", "Conv3d")
            for name in _wrapped_classes(one) if model.classes else ():
                if name not in known:
                    near = difflib.get_close_matches(name, model.classes, 1, 0.4)
                    yield Bite(
                        one.path,
                        f"prepare() raises a ValueError: fsdp_transformer_layer_cls_to_wrap names {name}, and {model.path} has no "
                        "module of that class.",
                        f"transformers' code for {model.config.get('model_type')} has none: the name is misspelled, or belongs to another architecture.",
                        f"Name the class of the model's block{f', such as {near[0]}' if near else ''}, or leave it out to use the "
                        "model's own.",
                    )


def _sizes(settings: Settings) -> dict[str, int]:
    parallel = settings.values.get("parallelism_config")
    parallel = parallel if isinstance(parallel, Mapping) else {}
    return {
        name: number(parallel.get(f"parallelism_config_{name}_size", parallel.get(f"{name}_size"))) or 1
        for name in ("tp", "cp", "sp")
    }


def _parallelism(facts: Facts) -> Iterator[Bite]:
    for settings in facts.accelerate:
        sizes = _sizes(settings)
        if sizes["tp"] > 1 and settings.fsdp and is_version(facts, "transformers", ">=5.0"):
            yield Bite(
                settings.path,
                f"prepare() fails: tp_size is {sizes['tp']}, and FSDP is on.",
                "Accelerate imports ReplicateParallel, which transformers 5.1 removed.",
                "Shard the model yourself and load its weights with shardwise.load, or use only one of the two.",
            )
        for name in (n for n in ("cp", "sp") if sizes[n] > 1):
            yield Bite(
                settings.path,
                f"shardwise rejects the accelerator: {name}_size is {sizes[name]}.",
                "shardwise doesn't support context or sequence parallelism through parallelism_config.",
                f"Set {name}_size to 1, or shard the model yourself and load its weights with shardwise.load.",
            )


def _processes(facts: Facts) -> Iterator[Bite]:
    for settings in facts.accelerate:
        processes = number(settings.values.get("num_processes"))
        machines = number(settings.values.get("num_machines")) or 1
        world = number(facts.environment.get("WORLD_SIZE"))
        why = ""
        if processes and processes % machines:
            why = f"num_processes {processes} isn't a multiple of num_machines {machines}"
        elif processes and world and world != processes:
            why = f"num_processes is {processes}, but WORLD_SIZE is {world}"
        elif processes and facts.machine.gpus and -(-processes // machines) > facts.machine.gpus:
            why = f"{-(-processes // machines)} processes per host share {facts.machine.gpus} devices"
        if why:
            yield Bite(
                settings.path,
                f"Ranks are missing, or share a device: {why}.",
                "num_processes counts the ranks on all hosts, one per device.",
                "Set it to the total number of devices on all hosts.",
            )


def _main_process(settings: Settings) -> str:
    return str(settings.values.get("main_process_ip") or "")


def _lacks_main_process(settings: Settings) -> bool:
    address = _main_process(settings)
    is_lost = not address and str(settings.values.get("rdzv_backend", "static")) == "static"
    is_here = address.startswith("127.") or address == "localhost"
    return (number(settings.values.get("num_machines")) or 1) > 1 and (is_lost or is_here)


ACCELERATE = (
    each(
        _fsdp2,
        ("accelerate.device-mesh", "FSDP2 with cpu_ram_efficient_loading", "case 1; accelerate#3898"),
        applies={"accelerate": "<1.16"},
        when=lambda one: one.says("cpu_ram_efficient_loading"),
        bites="prepare() fails with \"AttributeError: 'Tensor' object has no attribute 'device_mesh'\" for a model with a "
        "persistent buffer or an unsharded parameter.",
        why="With cpu_ram_efficient_loading and FSDP2, Accelerate assumes that every entry in the state dict is a DTensor.",
        do="Keep the YAML and load with ShardwiseAccelerator.load_model or load_pretrained "
        "(docs/cases/1-device-mesh.md), or turn the option off if every rank has enough memory for the full model.",
    ),
    each(
        _fsdp2,
        (
            "accelerate.whole-model",
            "FSDP2 with cpu_ram_efficient_loading under transformers 5",
            "case 2; transformers#43749",
        ),
        applies={"transformers": ">=5.0"},
        when=lambda one: one.says("cpu_ram_efficient_loading"),
        bites="from_pretrained temporarily puts the full model into host memory on every rank, although the option asks "
        "for rank 0 only.",
        why="transformers 5 creates full-size placeholders on the other ranks, and draws random numbers for them.",
        do="Load with ShardwiseAccelerator.load_pretrained: each rank reads its own shards (docs/cases/2-host-memory.md).",
    ),
    Rule(
        "accelerate.not-ram-efficient",
        "cpu_ram_efficient_loading is off, and ranks × the model's size exceeds free memory",
        "case 3; ms-swift#9982",
        _not_efficient,
    ),
    each(
        _fsdp,
        ("accelerate.fsdp1", "FSDP1", "docs/howto/accelerate.md"),
        when=lambda one: one.version != 2,
        bites="shardwise will reject the model: this configuration uses FSDP1, and shardwise can't load or save its flat parameters.",
        why="Accelerate uses FSDP1 unless fsdp_version is 2, and so do TrainingArguments before transformers 5.10.",
        do=lambda one: (
            "Set fsdp_version: 2 (accelerate to-fsdp2 rewrites a YAML)."
            if one.is_yaml
            else GATES["fsdp-version"].instead
        ),
    ),
    each(
        _fsdp2,
        (
            "accelerate.sharded-fp32",
            "FSDP2, mixed precision, and SHARDED_STATE_DICT",
            "case 5; accelerate#3971",
        ),
        kind="note",
        when=_stores_masters,
        bites="Checkpoints are twice the size of the model (fp32), and people have reported a loss spike at the first step after "
        "a resume, or a missing optimizer key.",
        why="Mixed precision trains fp32 master weights, and checkpoints store those. accelerator.load_state doesn't compare "
        "anything with what was saved.",
        do="Save and resume with ShardwiseAccelerator, whose report says what was restored (docs/cases/5-loss-spike.md).",
    ),
    Rule(
        "accelerate.refused-by-fsdp2",
        "a setting that FSDP2 doesn't have",
        "FullyShardedDataParallelPlugin in accelerate 1.15",
        _refused,
    ),
    each(
        _fsdp2,
        (
            "accelerate.one-group",
            "FSDP2 without a wrap policy, or wrapping by size without a minimum",
            "docs/howto/does-it-fit.md",
        ),
        when=lambda one: not one.wraps_blocks and (one.policy == "NO_WRAP" or _by_size_zero(one)),
        bites="Each forward pass gathers the full model on every rank, so sharding doesn't reduce peak memory.",
        why=lambda one: (
            f"fsdp_auto_wrap_policy is {one.policy}"
            f"{' without fsdp_min_num_params' if _by_size_zero(one) else ''}, so a single group contains the full model."
            if one.is_yaml
            else "Before transformers 5.10, fsdp wraps blocks only if it includes auto_wrap. Here, a single group contains the full model."
        ),
        do=lambda one: (
            "Set TRANSFORMER_BASED_WRAP, and set fsdp_transformer_layer_cls_to_wrap to the block's class."
            if one.is_yaml
            else "Set fsdp to 'full_shard auto_wrap'."
        ),
    ),
    Rule(
        "accelerate.tied-groups",
        "FSDP2 wrapping the embedding of a model whose head is tied to it",
        "case 8; FSDP2 in torch 2.12",
        _tied_groups,
        applies={"torch": ">=2.12"},
    ),
    Rule(
        "accelerate.wrap-class",
        "a wrap class that the model doesn't have",
        "FullyShardedDataParallelPlugin.set_auto_wrap_policy in accelerate 1.10",
        _unknown_class,
    ),
    each(
        _accelerate,
        ("accelerate.other-engine", "DeepSpeed or Megatron-LM", "docs/howto/accelerate.md"),
        when=lambda s: str(s.values.get("distributed_type", "")).upper() in ("DEEPSPEED", "MEGATRON_LM"),
        bites=lambda s: (
            f"shardwise rejects the accelerator: distributed_type is {s.values['distributed_type']}."
        ),
        why="That engine shards, loads, and saves models in its own way, without DTensors.",
        do="Set distributed_type: FSDP with fsdp_version: 2, or leave shardwise out of this run.",
    ),
    Rule(
        "accelerate.parallelism",
        "tp_size together with FSDP; cp_size or sp_size",
        "docs/howto/accelerate.md",
        _parallelism,
    ),
    Rule(
        "accelerate.processes",
        "num_processes that doesn't match hosts, WORLD_SIZE, or devices",
        "accelerate launch",
        _processes,
    ),
    each(
        _accelerate,
        ("accelerate.main-process", "several hosts without a reachable main_process_ip", "accelerate launch"),
        when=_lacks_main_process,
        bites=lambda s: (
            f"Every host waits for itself: num_machines is {s.values.get('num_machines')}, and main_process_ip is "
            f"{_main_process(s) or 'not set'}."
        ),
        why="The other hosts look for rank 0 at that address.",
        do="Set main_process_ip to the first host's address, and main_process_port, in the YAML of each host.",
    ),
)


# ----------------------------------------------------------------------------------------------------
# Rules over given checkpoints.


def _checkpoints(facts: Facts) -> Iterator[Checkpoint]:
    return iter(facts.checkpoints)


def _damaged(facts: Facts) -> Iterator[Bite]:
    for checkpoint in facts.checkpoints:
        for name, how in checkpoint.damaged.items():
            yield Bite(
                f"{checkpoint.path}: {name}",
                f"A resume will skip this step, or fail: {how.partition(chr(10))[0]}",
                "Its files don't match its manifest.",
                "Check every step with shardwise verify PATH, and copy the corrupted ones again from a mirror if you have one.",
            )


def _aside(checkpoint: Checkpoint) -> str:
    what = "and they still take up space" if checkpoint.steps else "and no other step is left to resume from"
    return (
        f"A resume ignores {count(len(checkpoint.set_aside), 'step')} ({some(checkpoint.set_aside)}), {what}."
    )


#: What a resume does without each part.
_WITHOUT = {
    "optimizer": "a resume from it starts with fresh moments, and the loss jumps",
    "scheduler": "the HF Trainer then restores neither scheduler nor optimizer, and the loss jumps",
    "RNG states": "dropout and the order of the data then differ from those of a run that never stopped",
}


def _name(checkpoint: Checkpoint) -> str:
    return os.path.basename(checkpoint.path)


def _incomplete(checkpoint: Checkpoint) -> str:
    lost = [*checkpoint.lost]
    if not lost:
        return f"{_name(checkpoint)} is missing {some(checkpoint.lost_files)}, which the checkpoints next to it have."
    words = f"{', '.join(lost[:-1])} and {lost[-1]}" if len(lost) > 1 else lost[0]
    others = f". It's also missing {some(checkpoint.lost_files)}" if checkpoint.lost_files else ""
    return f"{_name(checkpoint)} has no {words}: {_WITHOUT[lost[0]]}{others}."


def _is_model_only(facts: Facts, checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.lost) and (
        checkpoint.is_model_only or any(a.values.get("save_only_model") is True for a in facts.arguments)
    )


def _lacking(facts: Facts) -> Iterator[Checkpoint]:
    for checkpoint in facts.checkpoints:
        if (checkpoint.lost or checkpoint.lost_files) and not _is_model_only(facts, checkpoint):
            yield checkpoint


def _model_only(facts: Facts) -> list[Checkpoint]:
    return [c for c in facts.checkpoints if _is_model_only(facts, c)]


def _was_resumed(facts: Facts) -> bool:
    return any(log.resumed for log in facts.logs)


def _resumed(facts: Facts) -> Iterator[Bite]:
    if (found := _model_only(facts)) and _was_resumed(facts):
        yield Bite(
            _places(found),
            "The run was resumed from a checkpoint that has only the model: the optimizer's moments and the learning rate schedule "
            "started again, and the loss jumps.",
            "The run's TrainingArguments have save_only_model=True, and a log or trainer_state.json shows a resume.",
            "Set save_only_model to false and start again from before the resume; these checkpoints can't restore what they don't have.",
        )


def _only_noted(facts: Facts) -> Iterator[Bite]:
    if (found := _model_only(facts)) and not _was_resumed(facts):
        holds = f"{_name(found[0])} contains" if len(found) == 1 else f"{len(found)} checkpoints contain"
        yield Bite(
            _places(found),
            f"{holds} only the model: a resume starts with fresh moments and from the beginning of the learning rate schedule, and "
            "the loss jumps.",
            "The run's TrainingArguments have save_only_model=True.",
            "Set save_only_model to false if you want to resume.",
        )


def _pickles(facts: Facts) -> Iterator[Bite]:
    if found := [c for c in facts.checkpoints if c.pickles]:
        names = tuple(dict.fromkeys(name for c in found for name in c.pickles))
        which = "this checkpoint" if len(found) == 1 else f"one of these {len(found)} checkpoints"
        yield Bite(
            _places(found),
            f"Opening {which} can run any code that its author put into it: {some(names)}.",
            "These files are pickles, and torch.load(weights_only=False) and DCP's reader execute them.",
            "If it is not your own, read it only with shardwise: shardwise convert PATH OUT --to checkpoint.",
        )


def _places(found: Sequence[Checkpoint]) -> str:
    """One path, or the directory of several and how many there are."""
    if len(found) == 1:
        return found[0].path
    above = {os.path.dirname(c.path) for c in found}
    return (
        f"{above.pop()}: {len(found)} checkpoints"
        if len(above) == 1
        else f"{found[0].path} and {len(found) - 1} more"
    )


def _merge(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    for checkpoint in facts.checkpoints:
        if memory is not None and checkpoint.kind == "dcp" and checkpoint.nbytes > memory.free_bytes:
            yield Bite(
                checkpoint.path,
                f"accelerate merge-weights and dcp_to_torch_save will run out of memory on this host: {gib(checkpoint.nbytes)} of parts, "
                f"{gib(memory.free_bytes)} of free memory.",
                "A single process reads the entire checkpoint before it writes anything.",
                "Use shardwise export PATH OUT, which keeps only a few tensors in memory at a time.",
            )


CHECKPOINTS = (
    Rule(
        "checkpoint.resumed-model-only",
        "a checkpoint-N saved with save_only_model, and a log or trainer_state.json that shows a resume",
        "case 5; Trainer in transformers 5.23",
        _resumed,
    ),
    Rule("checkpoint.damaged", "one of the newest steps is corrupted", "docs/format.md", _damaged),
    each(
        _checkpoints,
        ("checkpoint.set-aside", "steps that a resume quarantined", "docs/format.md"),
        kind="note",
        when=lambda c: c.set_aside,
        bites=_aside,
        why="An earlier resume started from an older step and renamed the newer ones, or found one of them corrupted.",
        do="Compare them with shardwise inspect PATH. Delete the ones that you don't need, or resume from one by its path.",
    ),
    each(
        _checkpoints,
        ("checkpoint.leftovers", "leftovers from killed saves", "docs/concepts/publish.md"),
        kind="note",
        when=lambda c: c.leftovers,
        bites=lambda c: f"A save was killed or is still running: {some(c.leftovers)}.",
        why="These folders aren't steps; they take up space until the next Checkpointer opens the directory and deletes them.",
        do="If no run is writing here now, find out why the last run ended (memory, disk, time limit) before you start the next one.",
    ),
    each(
        _checkpoints,
        (
            "checkpoint.per-rank",
            "one file per rank, without the shards' positions in the tensors",
            "accelerate#4105",
        ),
        when=lambda c: c.per_rank,
        bites=lambda c: (
            f"The checkpoint can only be resumed on the same number of ranks ({some(c.per_rank)})."
        ),
        why="Each file contains one rank's part, without its position in the tensors (use_dcp=False).",
        do="Resume once on that number of ranks, and save with DCP (use_dcp=True) or with shardwise.",
    ),
    each(
        _lacking,
        (
            "checkpoint.incomplete",
            "a checkpoint-N without an optimizer, a scheduler, RNG state, or a file that its neighbors have",
            "case 5; Trainer in transformers 5.23",
        ),
        when=lambda c: c.lost or c.lost_files,
        bites=_incomplete,
        why="They were deleted or not copied, or the save was killed. A resume continues without them, and without an error.",
        do="Resume from another checkpoint of the run, or copy the missing files from the original.",
    ),
    Rule(
        "checkpoint.model-only",
        "a checkpoint-N saved with save_only_model",
        "Trainer in transformers 5.23",
        _only_noted,
        kind="note",
    ),
    Rule(
        "checkpoint.merge",
        "DCP parts larger than this host's free memory",
        "case 16; accelerate merge-weights",
        _merge,
        kind="note",
    ),
    each(
        _checkpoints,
        ("checkpoint.unfinished", "DCP parts without .metadata", "torch.distributed.checkpoint"),
        when=lambda c: c.lacks_metadata,
        bites="The checkpoint can't be loaded: it has DCP parts but no .metadata.",
        why="Rank 0 writes that file last: the save was killed or is still running.",
        do="Use the previous checkpoint.",
    ),
    Rule("checkpoint.pickle", "pickled files", "case 20", _pickles, kind="note"),
)


# ----------------------------------------------------------------------------------------------------
# Rules over TrainingArguments alone.


def _arguments(facts: Facts) -> Iterator[Settings]:
    return iter(facts.arguments)


#: What TrainingArguments put into fsdp_config by themselves.
_BY_DEFAULT = {"min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"}


def _ignores_fsdp(settings: Settings) -> bool:
    own = {name for name, value in settings.fsdp.items() if name not in _BY_DEFAULT or value}
    return bool(own) and not settings.values.get("fsdp")


def _model_alone(facts: Facts) -> Iterator[Bite]:
    for settings in facts.arguments:
        values = settings.values
        if not (values.get("save_only_model") and values.get("fsdp")):
            continue
        is_sharded = str(settings.fsdp.get("state_dict_type", "")).upper() == "SHARDED_STATE_DICT"
        if values.get("load_best_model_at_end") or is_sharded:
            beside = "SHARDED_STATE_DICT" if is_sharded else "load_best_model_at_end"
            yield Bite(
                settings.path,
                f"Trainer() raises a ValueError: save_only_model together with {beside} under FSDP.",
                "Without the sharded state it couldn't load the best model, and sharded states are saved together with the optimizer.",
                "Leave save_only_model out: shardwise's Trainer integration saves what a resume needs.",
            )
        else:
            yield Bite(
                settings.path,
                "The run can't be resumed: save_only_model leaves out the optimizer, the scheduler, and the RNG states.",
                "A resume then starts with fresh moments, and the loss jumps.",
                "Set save_only_model to false, at least for the newest checkpoint.",
            )


def _is_low_bit(settings: Settings) -> bool:
    optimizer = str(settings.values.get("optim", ""))
    is_theirs = ("8bit" in optimizer or optimizer.startswith("paged_")) and "torch" not in optimizer
    return is_theirs and bool(settings.values.get("fsdp"))


TRAINER = (
    each(
        _arguments,
        ("trainer.fsdp-config-ignored", "fsdp_config without fsdp", "TrainingArguments in transformers 5.23"),
        when=_ignores_fsdp,
        bites="Each GPU holds the full model: fsdp_config is set, but fsdp isn't.",
        why="The Trainer reads fsdp_config only if fsdp is set.",
        do="Set fsdp to true (or 'full_shard').",
    ),
    Rule(
        "trainer.save-only-model",
        "save_only_model under FSDP",
        "Trainer in transformers 5.23",
        _model_alone,
    ),
    each(
        _arguments,
        ("trainer.data-skip", "ignore_data_skip", "case 17; accelerate#2016"),
        when=lambda s: s.values.get("ignore_data_skip"),
        bites="After a resume, the run trains on some samples twice, and never on others.",
        why="With ignore_data_skip, a resume starts the epoch's data over.",
        do="Set it to false; shardwise's Trainer integration continues at the data position without reading through the data.",
    ),
    each(
        _arguments,
        ("trainer.two-halves", "both bf16 and fp16", "TrainingArguments in transformers 5.23"),
        when=lambda s: s.values.get("bf16") and s.values.get("fp16"),
        bites="TrainingArguments raises a ValueError: bf16 and fp16 are both on.",
        why="A run can use only one of them.",
        do="Keep bf16, and set fp16 to false.",
    ),
    each(
        _arguments,
        ("trainer.checkpointing", "gradient_checkpointing under FSDP", "transformers#30404"),
        when=lambda s: s.values.get("gradient_checkpointing") and s.values.get("fsdp"),
        bites="Each backward pass gathers every block once more than necessary.",
        why="gradient_checkpointing wraps modules inside FSDP's groups, whose forward runs again with its all-gather.",
        do="Set fsdp_config.activation_checkpointing instead.",
    ),
    each(
        _arguments,
        (
            "trainer.low-bit-optimizer",
            "a bitsandbytes optimizer under FSDP",
            "bitsandbytes#89, axolotl#2744",
        ),
        when=_is_low_bit,
        bites=lambda s: (
            f"A checkpoint of this run can't be resumed, or saving it fails: optim is {s.values['optim']}."
        ),
        why="bitsandbytes keeps state for its local shard, without the shard's position in the parameter.",
        do="Use adamw_torch_fused, or torchao's AdamW8bit, whose state shardwise saves and resumes (docs/state.md).",
    ),
)
