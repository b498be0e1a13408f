"""Rules over given configurations: Accelerate's YAML and TrainingArguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .facts import Facts, Settings
from .rule import Bite, Rule, is_on, is_version, number

__all__ = ["SETTINGS"]


def _version_of(settings: Settings, default: int) -> int:
    fsdp = settings.fsdp
    found = number(fsdp.get("version"))
    return default if found is None else found


def _fsdp_settings(facts: Facts) -> Iterator[tuple[Settings, Mapping[str, Any], int]]:
    """Each configuration that uses FSDP, its FSDP settings and FSDP's version."""
    for settings in facts.accelerate:
        if str(settings.values.get("distributed_type", "FSDP")).upper() == "FSDP" and settings.fsdp:
            yield settings, settings.fsdp, _version_of(settings, 1)
    for settings in facts.arguments:
        if settings.values.get("fsdp") and settings.fsdp:
            yield settings, settings.fsdp, _version_of(settings, 2)


def _device_mesh(facts: Facts) -> Iterator[Bite]:
    for settings, fsdp, version in _fsdp_settings(facts):
        if version == 2 and is_on(fsdp.get("cpu_ram_efficient_loading", "")):
            yield Bite(
                settings.path,
                "prepare() ends in \"AttributeError: 'Tensor' object has no attribute 'device_mesh'\" for a model with a "
                "persistent buffer or a parameter that is not sharded.",
                "With cpu_ram_efficient_loading and FSDP2 Accelerate takes each entry of the state dict for a DTensor.",
                "Keep the YAML and load with ShardwiseAccelerator.load_model or load_pretrained "
                "(docs/cases/1-device-mesh.md), or switch the option off if every rank may hold the whole model.",
            )


def _whole_model(facts: Facts) -> Iterator[Bite]:
    for settings, fsdp, version in _fsdp_settings(facts):
        if version == 2 and is_on(fsdp.get("cpu_ram_efficient_loading", "")):
            yield Bite(
                settings.path,
                "from_pretrained puts the whole model into host memory on every rank for a while, although the option asks "
                "for rank 0 alone.",
                "transformers 5 makes placeholders of full size on the other ranks, and draws random numbers for them.",
                "Load with ShardwiseAccelerator.load_pretrained: each rank reads its own shards (docs/cases/2-host-memory.md).",
            )


def _not_efficient(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    if memory is None or facts.ranks < 2:
        return
    for settings, fsdp, _ in _fsdp_settings(facts):
        if is_on(fsdp.get("cpu_ram_efficient_loading", "")):
            continue
        for model in facts.models:
            if model.nbytes * facts.ranks > memory.free_bytes:
                yield Bite(
                    settings.path,
                    f"Loading {model.path} is killed: {facts.ranks} ranks hold {facts.ranks} whole models in host memory.",
                    "cpu_ram_efficient_loading is off, so that each rank loads all before it shards.",
                    "Load with ShardwiseAccelerator.load_pretrained, which holds each rank's shards only.",
                )


def _fsdp1(facts: Facts) -> Iterator[Bite]:
    for settings, _, version in _fsdp_settings(facts):
        if version != 2:
            yield Bite(
                settings.path,
                "shardwise refuses the model: this asks for FSDP1, whose flat parameters nothing here can fill or save.",
                "Accelerate's YAML means version 1 unless fsdp_version says 2; transformers calls FSDP1 deprecated.",
                "Set fsdp_version: 2 (accelerate to-fsdp2 rewrites a YAML).",
            )


def _sharded_fp32(facts: Facts) -> Iterator[Bite]:
    for settings, fsdp, version in _fsdp_settings(facts):
        # Accelerate's own default; the HF Trainer's is FULL_STATE_DICT.
        default = "SHARDED_STATE_DICT" if settings in facts.accelerate else "FULL_STATE_DICT"
        kind = str(fsdp.get("state_dict_type", default)).upper()
        is_mixed = str(settings.values.get("mixed_precision", "no")).lower() in ("bf16", "fp16")
        is_mixed |= bool(settings.values.get("bf16") or settings.values.get("fp16"))
        if version == 2 and kind in ("SHARDED_STATE_DICT", "3") and is_mixed:
            yield Bite(
                settings.path,
                "Checkpoints have twice the bytes of the model (fp32), and people met a loss spike at the first step after a "
                "resume, or a missing optimizer key.",
                "Mixed precision trains fp32 masters, which are stored; accelerator.load_state compares nothing with what was "
                "saved.",
                "Save and resume with ShardwiseAccelerator, whose report says what came back (docs/cases/5-loss-spike.md).",
            )


def _refused(facts: Facts) -> Iterator[Bite]:
    for settings, fsdp, version in _fsdp_settings(facts):
        if version != 2:
            continue
        reshard = str(fsdp.get("reshard_after_forward", True)).lower()
        bad = [
            ("forward_prefetch", is_on(fsdp.get("forward_prefetch", ""))),
            ("state_dict_type", str(fsdp.get("state_dict_type", "")).upper() in ("LOCAL_STATE_DICT", "2")),
            ("reshard_after_forward", reshard not in ("true", "false", "1", "0", "yes", "no")),
            (
                "activation_checkpointing_offload",
                is_on(fsdp.get("activation_checkpointing_offload", ""))
                and not is_on(fsdp.get("activation_checkpointing", "")),
            ),
        ]
        for name, is_bad in bad:
            if is_bad:
                yield Bite(
                    settings.path,
                    f"Accelerator() raises a ValueError: fsdp_{name} is {fsdp.get(name)!r}.",
                    "FSDP2 has no such setting; it is left from FSDP1, or needs another one beside it.",
                    f"Remove fsdp_{name}, or set what FSDP2 takes (reshard_after_forward: true, state_dict_type: "
                    "SHARDED_STATE_DICT).",
                )


def _one_group(facts: Facts) -> Iterator[Bite]:
    for settings, fsdp, version in _fsdp_settings(facts):
        policy = str(fsdp.get("auto_wrap_policy", "NO_WRAP")).upper()
        by_size = policy == "SIZE_BASED_WRAP" and not number(fsdp.get("min_num_params"))
        is_yaml = settings in facts.accelerate
        if is_yaml and version == 2 and (policy == "NO_WRAP" or by_size):
            yield Bite(
                settings.path,
                "Each forward gathers the whole model on every rank, so that sharding saves no memory at the peak.",
                f"fsdp_auto_wrap_policy is {policy}{' without fsdp_min_num_params' if by_size else ''}: one group holds all.",
                "Set TRANSFORMER_BASED_WRAP and the class of a block in fsdp_transformer_layer_cls_to_wrap.",
            )


def _other_engine(facts: Facts) -> Iterator[Bite]:
    for settings in facts.accelerate:
        kind = str(settings.values.get("distributed_type", "")).upper()
        if kind in ("DEEPSPEED", "MEGATRON_LM"):
            yield Bite(
                settings.path,
                f"shardwise refuses the accelerator: distributed_type is {kind}.",
                "That engine shards, loads and saves models by itself, without DTensors.",
                "Set distributed_type: FSDP with fsdp_version: 2, or leave shardwise out of this run.",
            )


def _tensor_parallel(facts: Facts) -> Iterator[Bite]:
    for settings in facts.accelerate:
        parallel = settings.values.get("parallelism_config")
        parallel = parallel if isinstance(parallel, Mapping) else {}
        sizes = {
            name: number(parallel.get(f"parallelism_config_{name}_size", parallel.get(f"{name}_size"))) or 1
            for name in ("tp", "cp", "sp")
        }
        if sizes["tp"] > 1 and settings.fsdp and is_version(facts, "transformers", ">=5.0"):
            yield Bite(
                settings.path,
                f"prepare() fails: tp_size is {sizes['tp']} beside FSDP.",
                "It imports ReplicateParallel, which went with transformers 4.",
                "Shard the model yourself and fill it with shardwise.load, or use one of the two.",
            )
        for name in ("cp", "sp"):
            if sizes[name] > 1:
                yield Bite(
                    settings.path,
                    f"shardwise refuses the accelerator: {name}_size is {sizes[name]}.",
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


def _main_process(facts: Facts) -> Iterator[Bite]:
    for settings in facts.accelerate:
        machines = number(settings.values.get("num_machines")) or 1
        address = str(settings.values.get("main_process_ip") or "")
        is_lost = not address and str(settings.values.get("rdzv_backend", "static")) == "static"
        if machines > 1 and (is_lost or address.startswith("127.") or address == "localhost"):
            yield Bite(
                settings.path,
                f"Every host waits for itself: num_machines is {machines}, and main_process_ip is {address or 'not set'}.",
                "The other hosts look for rank 0 at that address.",
                "Set main_process_ip to the first host's address, and main_process_port, in the YAML of each host.",
            )


#: What TrainingArguments put into fsdp_config by themselves.
_BY_DEFAULT = {"min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"}


def _ignored_fsdp(facts: Facts) -> Iterator[Bite]:
    for settings in facts.arguments:
        own = {name for name, value in settings.fsdp.items() if name not in _BY_DEFAULT or value}
        if own and not settings.values.get("fsdp"):
            yield Bite(
                settings.path,
                "Each GPU holds the whole model: fsdp_config is there, and fsdp is not set.",
                "The Trainer reads fsdp_config only with fsdp.",
                "Set fsdp to true (or 'full_shard').",
            )


def _best_model(facts: Facts) -> Iterator[Bite]:
    for settings in facts.arguments:
        values = settings.values
        if not (values.get("save_only_model") and values.get("fsdp")):
            continue
        is_sharded = str(settings.fsdp.get("state_dict_type", "")).upper() == "SHARDED_STATE_DICT"
        if values.get("load_best_model_at_end") or is_sharded:
            beside = "SHARDED_STATE_DICT" if is_sharded else "load_best_model_at_end"
            yield Bite(
                settings.path,
                f"Trainer() raises a ValueError: save_only_model beside {beside} under FSDP.",
                "Without the sharded state it could load no best model, and sharded states are saved with the optimizer.",
                "Leave save_only_model out: shardwise's Trainer integration saves what a resume needs.",
            )
        else:
            yield Bite(
                settings.path,
                "The run can't be resumed: save_only_model leaves optimizer, scheduler and random states out.",
                "A resume then begins with fresh moments, which shows as a jump of the loss.",
                "Set save_only_model to false, at least for the newest checkpoint.",
            )


def _skips(facts: Facts) -> Iterator[Bite]:
    for settings in facts.arguments:
        if settings.values.get("ignore_data_skip"):
            yield Bite(
                settings.path,
                "After a resume the run trains on some samples again, and never on the rest.",
                "ignore_data_skip begins the data anew at the step of the checkpoint.",
                "Set it to false; shardwise's Trainer integration goes on at the place without reading through the data.",
            )


def _both_halves(facts: Facts) -> Iterator[Bite]:
    for settings in facts.arguments:
        if settings.values.get("bf16") and settings.values.get("fp16"):
            yield Bite(
                settings.path,
                "TrainingArguments raises a ValueError: bf16 and fp16 are both on.",
                "A run has one half precision.",
                "Keep bf16, and set fp16 to false.",
            )


def _checkpointing(facts: Facts) -> Iterator[Bite]:
    for settings in facts.arguments:
        if settings.values.get("gradient_checkpointing") and settings.values.get("fsdp"):
            yield Bite(
                settings.path,
                "Each backward gathers every block once more than it needs to.",
                "gradient_checkpointing wraps inside of FSDP's groups, whose forward runs again with its all-gather.",
                "Set fsdp_config.activation_checkpointing in its place.",
            )


def _low_bit(facts: Facts) -> Iterator[Bite]:
    for settings in facts.arguments:
        optimizer = str(settings.values.get("optim", ""))
        is_theirs = ("8bit" in optimizer or optimizer.startswith("paged_")) and "torch" not in optimizer
        if settings.values.get("fsdp") and is_theirs:
            yield Bite(
                settings.path,
                f"A checkpoint of this run can't be resumed, or saving it fails: optim is {optimizer}.",
                "bitsandbytes keeps state of its local shard, without its place in the parameter.",
                "Take adamw_torch_fused, or torchao's AdamW8bit, whose state shardwise saves and resumes (docs/state.md).",
            )


SETTINGS = (
    Rule(
        id="accelerate.device-mesh",
        about="FSDP2 with cpu_ram_efficient_loading",
        source="case 1; accelerate#3898",
        check=_device_mesh,
        applies={"accelerate": "<1.16"},
    ),
    Rule(
        id="accelerate.whole-model",
        about="FSDP2 with cpu_ram_efficient_loading under transformers 5",
        source="case 2; transformers#43749",
        check=_whole_model,
        applies={"transformers": ">=5.0"},
    ),
    Rule(
        id="accelerate.not-ram-efficient",
        about="ranks × given model over the free memory, with the option off",
        source="case 3; ms-swift#9982",
        check=_not_efficient,
    ),
    Rule(id="accelerate.fsdp1", about="FSDP1", source="docs/howto/accelerate.md", check=_fsdp1),
    Rule(
        id="accelerate.sharded-fp32",
        about="FSDP2, mixed precision and SHARDED_STATE_DICT",
        source="case 5; accelerate#3971",
        check=_sharded_fp32,
    ),
    Rule(
        id="accelerate.refused-by-fsdp2",
        about="a setting that FSDP2 has not",
        source="FullyShardedDataParallelPlugin of accelerate 1.15",
        check=_refused,
    ),
    Rule(
        id="accelerate.one-group",
        about="FSDP2 without a wrap policy, or by size 0",
        source="docs/howto/does-it-fit.md",
        check=_one_group,
    ),
    Rule(
        id="accelerate.other-engine",
        about="DeepSpeed or Megatron-LM",
        source="docs/howto/accelerate.md",
        check=_other_engine,
    ),
    Rule(
        id="accelerate.parallelism",
        about="tp_size beside FSDP; cp_size or sp_size",
        source="docs/howto/accelerate.md",
        check=_tensor_parallel,
    ),
    Rule(
        id="accelerate.processes",
        about="num_processes against hosts, WORLD_SIZE or devices",
        source="accelerate launch",
        check=_processes,
    ),
    Rule(
        id="accelerate.main-process",
        about="several hosts without a reachable main_process_ip",
        source="accelerate launch",
        check=_main_process,
    ),
    Rule(
        id="trainer.fsdp-config-ignored",
        about="fsdp_config without fsdp",
        source="TrainingArguments of transformers 5.23",
        check=_ignored_fsdp,
    ),
    Rule(
        id="trainer.save-only-model",
        about="save_only_model under FSDP",
        source="Trainer of transformers 5.23",
        check=_best_model,
    ),
    Rule(id="trainer.data-skip", about="ignore_data_skip", source="case 17; accelerate#2016", check=_skips),
    Rule(
        id="trainer.two-halves",
        about="bf16 and fp16",
        source="TrainingArguments of transformers 5.23",
        check=_both_halves,
    ),
    Rule(
        id="trainer.checkpointing",
        about="gradient_checkpointing under FSDP",
        source="transformers#30404",
        check=_checkpointing,
    ),
    Rule(
        id="trainer.low-bit-optimizer",
        about="an optimizer of bitsandbytes under FSDP",
        source="bitsandbytes#89, axolotl#2744",
        check=_low_bit,
    ),
)
