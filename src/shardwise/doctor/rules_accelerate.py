"""Rules over Accelerate's YAML, and over what TrainingArguments share with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from ..gates import GATES
from ..objects import frozen
from .facts import Facts, Model, Settings
from .rule import Bite, Rule, each, is_on, is_version, number

__all__ = ["ACCELERATE"]


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
                    f"Loading {model.path} is killed: {facts.ranks} ranks hold {facts.ranks} whole models in host memory.",
                    "cpu_ram_efficient_loading is off, so that each rank loads all before it shards.",
                    "Load with ShardwiseAccelerator.load_pretrained, which holds each rank's shards only.",
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
                "FSDP2 has no such setting; it is left from FSDP1, or needs another setting next to it.",
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
                    f"The first forward of {model.path} raises a ValueError: embed_tokens.weight 'is shared with a parameter "
                    "already managed by another FSDP group'.",
                    f"The model ties its head to its embedding, and they come into groups of their own: {why}.",
                    "Name only the block's class in fsdp_transformer_layer_cls_to_wrap: the root then holds both.",
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
                        f"transformers' code of {model.config.get('model_type')} has none: it is misspelled, or of another architecture.",
                        f"Name the class of the model's block{f', such as {near[0]}' if near else ''}, or leave it out: the model's "
                        "own is taken.",
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
                f"prepare() fails: tp_size is {sizes['tp']} together with FSDP.",
                "It imports ReplicateParallel, which transformers 5.1 removed.",
                "Shard the model yourself and fill it with shardwise.load, or use one of the two.",
            )
        for name in (n for n in ("cp", "sp") if sizes[n] > 1):
            yield Bite(
                settings.path,
                f"shardwise rejects the accelerator: {name}_size is {sizes[name]}.",
                "Context and sequence parallelism through parallelism_config are not supported here.",
                f"Set {name}_size to 1, or shard the model yourself and fill it with shardwise.load.",
            )


def _processes(facts: Facts) -> Iterator[Bite]:
    for settings in facts.accelerate:
        processes = number(settings.values.get("num_processes"))
        machines = number(settings.values.get("num_machines")) or 1
        world = number(facts.environment.get("WORLD_SIZE"))
        why = ""
        if processes and processes % machines:
            why = f"num_processes {processes} is no multiple of num_machines {machines}"
        elif processes and world and world != processes:
            why = f"num_processes is {processes}, and WORLD_SIZE says {world}"
        elif processes and facts.machine.gpus and -(-processes // machines) > facts.machine.gpus:
            why = f"{-(-processes // machines)} processes a host share {facts.machine.gpus} devices"
        if why:
            yield Bite(
                settings.path,
                f"Ranks are missing, or share a device: {why}.",
                "num_processes counts the ranks of all hosts, one for each device.",
                "Set it to the number of devices of all hosts.",
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
        "(docs/cases/1-device-mesh.md), or turn the option off if every rank has room for the whole model.",
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
        bites="from_pretrained puts the whole model into host memory on every rank for a while, although the option asks "
        "for rank 0 alone.",
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
        bites="shardwise rejects the model: this asks for FSDP1, whose flat parameters nothing here can fill or save.",
        why="Accelerate's YAML means version 1 unless fsdp_version says 2, and so do TrainingArguments before transformers 5.10.",
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
            "FSDP2, mixed precision and SHARDED_STATE_DICT",
            "case 5; accelerate#3971",
        ),
        kind="note",
        when=_stores_masters,
        bites="Checkpoints have twice the bytes of the model (fp32), and people met a loss spike at the first step after a "
        "resume, or a missing optimizer key.",
        why="Mixed precision trains fp32 masters, which are stored; accelerator.load_state compares nothing with what was "
        "saved.",
        do="Save and resume with ShardwiseAccelerator, whose report says what was restored (docs/cases/5-loss-spike.md).",
    ),
    Rule(
        "accelerate.refused-by-fsdp2",
        "a setting that FSDP2 doesn't have",
        "FullyShardedDataParallelPlugin of accelerate 1.15",
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
        bites="Each forward gathers the whole model on every rank, so that sharding saves no memory at the peak.",
        why=lambda one: (
            f"fsdp_auto_wrap_policy is {one.policy}"
            f"{' without fsdp_min_num_params' if _by_size_zero(one) else ''}: one group holds all."
            if one.is_yaml
            else "Before transformers 5.10 fsdp wraps blocks only where it says auto_wrap: one group holds all."
        ),
        do=lambda one: (
            "Set TRANSFORMER_BASED_WRAP and the class of a block in fsdp_transformer_layer_cls_to_wrap."
            if one.is_yaml
            else "Set fsdp to 'full_shard auto_wrap'."
        ),
    ),
    Rule(
        "accelerate.tied-groups",
        "FSDP2 that wraps the embedding, for a model whose head is tied to it",
        "case 8; FSDP2 in torch 2.12",
        _tied_groups,
        applies={"torch": ">=2.12"},
    ),
    Rule(
        "accelerate.wrap-class",
        "a class to wrap that the model doesn't have",
        "accelerate 1.10: FullyShardedDataParallelPlugin.set_auto_wrap_policy",
        _unknown_class,
    ),
    each(
        _accelerate,
        ("accelerate.other-engine", "DeepSpeed or Megatron-LM", "docs/howto/accelerate.md"),
        when=lambda s: str(s.values.get("distributed_type", "")).upper() in ("DEEPSPEED", "MEGATRON_LM"),
        bites=lambda s: (
            f"shardwise rejects the accelerator: distributed_type is {s.values['distributed_type']}."
        ),
        why="That engine shards, loads and saves models in its own way, without DTensors.",
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
        "num_processes that doesn't match hosts, WORLD_SIZE or devices",
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
