"""The conditions of ``rules.toml`` that need code: each takes what its rule looks at. Pure."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from ..gates import GATES
from ..objects import frozen
from .facts import Checkpoint, Facts, Log, Model, Place, Seen, Settings, count, is_on, is_version, number

_GIB, _MIB = 1024**3, 1024**2
#: The values that a rule's sentences name.
Values = Mapping[str, object]


def some(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# ----------------------------------------------------------------------------------------------------
# Conditions over the machine: memory, limits, cores, names, clock.

#: Of one process with torch and transformers, before it loads anything.
_PROCESS_BYTES = _GIB
#: Docker's default is 64 MiB.
_SHM_BYTES = 256 * _MIB
_OPEN_FILES = 1024
_FILE_BYTES = 64 * _GIB
_LOCKED_BYTES = _GIB
#: 2024-01-01.
_EARLIEST_S = 1_704_067_200


def _nodes(facts: Facts) -> int:
    """Hosts of the run, as the launch or the given YAML says."""
    told = facts.environment
    world, local = number(told.get("WORLD_SIZE")), number(told.get("LOCAL_WORLD_SIZE"))
    found = [number(told.get("SLURM_NNODES")) or 1]
    if world and local:
        found.append(-(-world // local))
    found += [number(one.values.get("num_machines")) or 1 for one in facts.accelerate]
    return max(found)


def _below(limit: int | None, least: int) -> bool:
    return limit is not None and limit < least


def _machine_threads(facts: Facts) -> Iterator[Values]:
    usable, told = facts.machine.cores.usable, facts.environment.get("OMP_NUM_THREADS")
    threads = number((told or "").partition(",")[0])
    share = max(1, int(usable) // facts.ranks)
    if threads is not None and threads > 1 and facts.ranks > 1 and facts.ranks * threads > 2 * usable:
        yield {"threads": threads, "share": share}
    elif told is None and facts.ranks > 1 and "SLURM_PROCID" in facts.environment:
        yield {"variant": "unset", "share": share}


def _machine_cores(facts: Facts) -> Iterator[Values]:
    cores = facts.machine.cores
    if facts.ranks > max(1.0, 2 * cores.usable):
        file = cores.quota_from
        what = f"the quota in {file}" if file else "the process's CPU affinity or the machine"
        yield {"where": file or "cores", "what": what}


def _machine_gpus_unseen(facts: Facts) -> Iterator[Values]:
    machine = facts.machine
    if machine.gpu_files and not machine.gpus and facts.environment.get("CUDA_VISIBLE_DEVICES") != "":
        yield {"torch": facts.software.get("torch", "")}


def _by_host_name(facts: Facts) -> bool:
    """Whether ranks of several hosts find each other by the hosts' names."""
    return _nodes(facts) > 1 and not facts.environment.get("GLOO_SOCKET_IFNAME")


def _network_interface(facts: Facts) -> Iterator[Values]:
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = facts.environment.get(name, "")
        if not given or given.startswith("^"):
            continue
        wanted = [one.lstrip("=") for one in given.split(",") if one]
        known = facts.machine.network.interfaces
        by_prefix = name.startswith("NCCL") and not given.startswith("=")  # NCCL takes prefixes
        lost = [w for w in wanted if not any(k.startswith(w) if by_prefix else k == w for k in known)]
        if lost:
            yield {"name": name, "lost": lost}


def _network_slow_interface(facts: Facts) -> Iterator[Values]:
    network = facts.machine.network
    fast = [name for name in network.interfaces if name.startswith("ib")]
    slow = (
        network.interface is not None and not network.interface.startswith("ib") and not network.is_loopback
    )
    if fast and slow and _by_host_name(facts) and not facts.environment.get("NCCL_SOCKET_IFNAME"):
        yield {"fast": fast[0]}


# ----------------------------------------------------------------------------------------------------
# Conditions over the launch (the variables that torchrun, Accelerate, SLURM and MPI set) and over installed versions.

_GROUP = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _launch_incomplete(facts: Facts) -> Iterator[Values]:
    given = [n for n in _GROUP if facts.environment.get(n)]
    lost = [n for n in _GROUP if not facts.environment.get(n)]
    if {"RANK", "WORLD_SIZE"} & set(given) and lost:
        yield {"given": given, "lost": lost}


def _launch_numbers(facts: Facts) -> Iterator[Values]:
    told = facts.environment
    for inner, outer in (
        ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ):
        if not (told.get(inner) and told.get(outer)):
            continue
        low, high = number(told[inner]), number(told[outer])
        is_rank = inner.endswith("RANK")
        if low is None or high is None or low > high or (is_rank and low == high):
            yield {"inner": inner, "outer": outer, "low": told[inner], "high": told[outer]}


def _launch_port(facts: Facts) -> bool:
    given = facts.environment.get("MASTER_PORT")
    found = number(given)
    return bool(given) and (found is None or not 0 < found < 65_536)


def _launch_master_loopback(facts: Facts) -> bool:
    address = facts.environment.get("MASTER_ADDR", "")
    return (address.startswith("127.") or address in ("localhost", "::1")) and _nodes(facts) > 1


def _is_elastic(facts: Facts) -> bool:
    """Whether torchrun started this process."""
    return any(name.startswith("TORCHELASTIC_") for name in facts.environment)


def _launch_torchrun_per_task(facts: Facts) -> Iterator[Values]:
    told = facts.environment
    given = told.get("SLURM_NTASKS_PER_NODE") or told.get("SLURM_TASKS_PER_NODE") or ""
    tasks = number(given.partition("(")[0])
    if tasks and tasks > 1 and _is_elastic(facts):
        yield {"tasks": tasks}


def _launch_slurm_world(facts: Facts) -> Iterator[Values]:
    if _is_elastic(facts):
        return
    told = facts.environment
    tasks, world = number(told.get("SLURM_NTASKS")), number(told.get("WORLD_SIZE"))
    if tasks and world and "SLURM_PROCID" in told and tasks not in (1, world):
        yield {"world": world, "tasks": tasks}
    task, rank = number(told.get("SLURM_PROCID")), number(told.get("RANK"))
    if tasks == world and tasks and task is not None and rank is not None and task != rank:
        yield {"variant": "rank", "rank": rank, "task": task}


def _launch_mpi_world(facts: Facts) -> Iterator[Values]:
    told = facts.environment
    size, world = number(told.get("OMPI_COMM_WORLD_SIZE")), number(told.get("WORLD_SIZE"))
    if size and world and size != world and not _is_elastic(facts):
        yield {"size": size, "world": world}


def _launch_devices(facts: Facts) -> Iterator[Values]:
    given = facts.environment.get("CUDA_VISIBLE_DEVICES", "")
    if not given.strip() or given.strip() == "-1":
        return
    devices = [one.strip() for one in given.split(",") if one.strip()]
    local = number(facts.environment.get("LOCAL_WORLD_SIZE"))
    if len(set(devices)) < len(devices):
        yield {}
    elif local and local > len(devices):
        yield {"variant": "few", "visible": len(devices), "local": local}


def _says(facts: Facts, name: str) -> bool:
    """Whether a variable says yes."""
    return is_on(facts.environment.get(name, ""))


def _launch_no_watchdog(facts: Facts) -> Iterable[Values]:
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
    return [{"name": name} for name in names if facts.environment.get(name) == "0"]


def _software_requires(facts: Facts) -> Iterator[Values]:
    for text in facts.requirements:
        required = Requirement(text)
        if required.marker is None and not is_version(facts, required.name, str(required.specifier)):
            yield {"required": required, "installed": facts.software[required.name]}


def _software_gates(facts: Facts) -> Iterator[Values]:
    for gate in GATES.values():
        installed = facts.software.get(gate.package)
        if installed is not None and not is_version(facts, gate.package, gate.needs):
            yield {"gate": gate, "missing": gate.missing(installed)}


def _software_peft(facts: Facts) -> Iterator[Values]:
    software = facts.software
    if not {"peft", "transformers"} <= software.keys():
        return
    if is_version(facts, "transformers", ">=5.6") and is_version(facts, "peft", "==0.19.*"):
        yield {}
    if (
        "torchao" in software
        and is_version(facts, "torchao", ">=0.18")
        and is_version(facts, "peft", "<0.19")
    ):
        yield {"variant": "torchao"}


def _software_torchvision(facts: Facts) -> Iterator[Values]:
    for name, offset in (("torchvision", 15), ("torchaudio", None)):
        torch, other = _release(facts, "torch"), _release(facts, name)
        if torch is None or other is None or torch[0] != 2:
            continue
        wanted = (0, torch[1] + offset) if offset is not None else torch
        # torchaudio ended its pairing with torch at 2.9
        if other != wanted and (offset is not None or torch < (2, 9)):
            yield {"name": name, "installed": facts.software[name], "wanted": f"{wanted[0]}.{wanted[1]}"}


def _release(facts: Facts, name: str) -> tuple[int, int] | None:
    try:
        found = Version(facts.software[name])
    except (KeyError, InvalidVersion):
        return None
    return found.major, found.minor


# ----------------------------------------------------------------------------------------------------
# Conditions over the places in which a run writes: directories and buckets.

_LEAST_FREE_BYTES = _GIB
_LEAST_INODES = 10_000
_LEAST_BYTES_S = 30 * _MIB
_MOST_FSYNC_S = 1.0
_MOST_AHEAD_S = 5.0
#: Bytes of a checkpoint with fp32 masters and AdamW's moments, for each byte of bf16 weights.
_STATE_PER_WEIGHT = 6


def _storage_space(facts: Facts) -> Iterator[Values]:
    needed = max([_LEAST_FREE_BYTES, *(_STATE_PER_WEIGHT * m.nbytes for m in facts.models)])
    what = "A checkpoint of this model with AdamW" if facts.models else "A checkpoint"
    for place in facts.places:
        is_short = place.free_bytes is not None and place.free_bytes < needed
        if is_short and "write" not in place.failures:  # of those, one rule speaks
            yield {"it": place, "what": what, "needed": needed}


def _storage_slow_write(place: Place) -> Iterator[Values]:
    if place.speeds and place.speeds.write_bytes_s < _LEAST_BYTES_S:
        yield {"minutes": 10 * _GIB / place.speeds.write_bytes_s / 60}


def _storage_slow_read(place: Place) -> Iterator[Values]:
    if place.speeds:
        bytes_s = min(place.speeds.read_bytes_s, place.speeds.random_bytes_s)
        if bytes_s < _LEAST_BYTES_S:
            yield {"bytes_s": bytes_s}


def _storage_no_direct(place: Place) -> bool:
    in_memory = place.mount is None or place.mount.kind in ("tmpfs", "ramfs")
    return "direct" in place.failures and "write" not in place.failures and not in_memory


def _options(place: Place, *names: str) -> Iterable[Values]:
    """The first of these options that it is mounted with."""
    options = place.mount.options if place.mount else ()
    return [{"option": name} for name in names if name in options][:1]


def _storage_nfs_stale(place: Place) -> Iterator[Values]:
    """The longest time that NFS's client answers from its cache, over the default; and the option."""
    found = []
    for option in place.mount.options if place.mount else ():
        name, _, value = option.partition("=")
        if name in ("acdirmax", "acregmax", "actimeo") and value.isdecimal() and int(value) > 60:
            found.append((int(value), option))
    if found:
        late_s, option = max(found)
        yield {"late_s": late_s, "option": option}


def _storage_clock(facts: Facts) -> Iterator[Values]:
    found = [(p.path, p.clock_ahead_s) for p in facts.places]
    found += [(b.url, b.clock_ahead_s) for b in facts.buckets]
    for where, ahead_s in found:
        if abs(ahead_s) > _MOST_AHEAD_S:
            yield {
                "where": where,
                "apart_s": abs(ahead_s),
                "side": "ahead of" if ahead_s > 0 else "behind",
            }


# ----------------------------------------------------------------------------------------------------
# Conditions over given models.

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _model_few_experts(facts: Facts) -> Iterator[Values]:
    for model in facts.models:
        experts = next((found for n in _EXPERTS if (found := number(model.text_config.get(n)))), None)
        if experts is not None and 1 < experts < facts.ranks:
            yield {"it": model, "experts": experts}


def _model_quant_storage(facts: Facts) -> Iterator[Values]:
    for model in facts.models:
        quantized = model.config.get("quantization_config")
        if not isinstance(quantized, Mapping) or not quantized.get("load_in_4bit") or facts.ranks < 2:
            continue
        if str(quantized.get("bnb_4bit_quant_storage", "uint8")) in ("uint8", "torch.uint8"):
            yield {"it": model}


def _model_unified_memory(facts: Facts) -> Iterable[Values]:
    memory = facts.machine.memory
    if memory is None or not memory.is_unified:
        return []
    return [{"it": m} for m in facts.models if m.nbytes <= memory.free_bytes < 2 * m.nbytes]


def _model_too_large(facts: Facts) -> Iterable[Values]:
    memory = facts.machine.memory
    if memory is None or (facts.machine.gpus and not memory.is_unified):
        return []
    return [{"it": m} for m in facts.models if m.nbytes > memory.limit_bytes]


# ----------------------------------------------------------------------------------------------------
# Conditions over Accelerate's YAML, and over what TrainingArguments share with it.


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


def _accelerate_not_ram_efficient(facts: Facts) -> Iterator[Values]:
    memory = facts.machine.memory
    if memory is None or facts.ranks < 2:
        return
    for one in _fsdp(facts):
        for model in facts.models:
            if not one.says("cpu_ram_efficient_loading") and model.nbytes * facts.ranks > memory.free_bytes:
                yield {"it": one, "model": model}


def _accelerate_fsdp1(one: _Fsdp) -> Iterator[Values]:
    if one.version != 2:
        yield {} if one.is_yaml else {"variant": "arguments", "instead": GATES["fsdp-version"].instead}


def _accelerate_sharded_fp32(one: _Fsdp) -> bool:
    # Accelerate's own default; the HF Trainer's is FULL_STATE_DICT.
    default = "SHARDED_STATE_DICT" if one.is_yaml else "FULL_STATE_DICT"
    is_sharded = str(one.get("state_dict_type", default)).upper() in ("SHARDED_STATE_DICT", "3")
    is_mixed = str(one.values.get("mixed_precision", "no")).lower() in ("bf16", "fp16")
    return is_sharded and (is_mixed or bool(one.values.get("bf16") or one.values.get("fp16")))


def _accelerate_refused_by_fsdp2(one: _Fsdp) -> Iterable[Values]:
    reshard = str(one.get("reshard_after_forward", True)).lower()
    bad = {
        "forward_prefetch": one.says("forward_prefetch"),
        "state_dict_type": str(one.get("state_dict_type")).upper() in ("LOCAL_STATE_DICT", "2"),
        "reshard_after_forward": reshard not in ("true", "false", "1", "0", "yes", "no"),
        "activation_checkpointing_offload": one.says("activation_checkpointing_offload")
        and not one.says("activation_checkpointing"),
    }
    return [{"name": name, "value": one.get(name)} for name, is_bad in bad.items() if is_bad]


def _accelerate_one_group(one: _Fsdp) -> Iterator[Values]:
    by_size_zero = one.policy == "SIZE_BASED_WRAP" and not number(one.get("min_num_params"))
    if not one.wraps_blocks and (one.policy == "NO_WRAP" or by_size_zero):
        without = " without fsdp_min_num_params" if by_size_zero else ""
        yield {"without": without} if one.is_yaml else {"variant": "arguments"}


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


def _accelerate_tied_groups(facts: Facts) -> Iterator[Values]:
    for one in _fsdp2(facts):
        for model in facts.models:
            is_tied = is_on(model.text_config.get("tie_word_embeddings", ""))
            if is_tied and (why := _splits_ties(one, model)):
                yield {"it": one, "model": model, "why": why}


def _wrapped_classes(one: _Fsdp) -> list[str]:
    """The classes that a policy by class is to wrap; empty for another policy, or for the model's own."""
    if one.policy != "TRANSFORMER_BASED_WRAP" and (one.is_yaml or one.policy != "NO_WRAP"):
        return []
    found = one.get("transformer_layer_cls_to_wrap") or ""
    names = found if isinstance(found, list) else str(found).split(",")
    return [text for name in names if (text := str(name).strip())]


def _accelerate_wrap_class(facts: Facts) -> Iterator[Values]:
    for one in _fsdp(facts):
        for model in facts.models:
            known = (*model.classes, "Embedding", "Linear", "LayerNorm", "Conv2d", "Conv3d")
            for name in _wrapped_classes(one) if model.classes else ():
                if name not in known:
                    near = difflib.get_close_matches(name, model.classes, 1, 0.4)
                    yield {
                        "it": one,
                        "model": model,
                        "model_type": model.config.get("model_type"),
                        "name": name,
                        "near": f", such as {near[0]}" if near else "",
                    }


def _accelerate_parallelism(facts: Facts) -> Iterator[Values]:
    for settings in facts.accelerate:
        found = settings.values.get("parallelism_config")
        parallel = found if isinstance(found, Mapping) else {}
        sizes = {
            name: number(parallel.get(f"parallelism_config_{name}_size", parallel.get(f"{name}_size"))) or 1
            for name in ("tp", "cp", "sp")
        }
        if sizes["tp"] > 1 and settings.fsdp and is_version(facts, "transformers", ">=5.0"):
            yield {"it": settings, "size": sizes["tp"]}
        for name in (n for n in ("cp", "sp") if sizes[n] > 1):
            yield {"variant": "sequence", "it": settings, "name": name, "size": sizes[name]}


def _accelerate_processes(facts: Facts) -> Iterator[Values]:
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
            yield {"it": settings, "why": why}


def _accelerate_main_process(settings: Settings) -> Iterator[Values]:
    address = str(settings.values.get("main_process_ip") or "")
    is_lost = not address and str(settings.values.get("rdzv_backend", "static")) == "static"
    is_here = address.startswith("127.") or address == "localhost"
    if (number(settings.values.get("num_machines")) or 1) > 1 and (is_lost or is_here):
        yield {"address": address or "not set"}


# ----------------------------------------------------------------------------------------------------
# Conditions over TrainingArguments alone.

#: What TrainingArguments put into fsdp_config by themselves.
_BY_DEFAULT = {"min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"}


def _trainer_fsdp_config_ignored(settings: Settings) -> bool:
    own = {name for name, value in settings.fsdp.items() if name not in _BY_DEFAULT or value}
    return bool(own) and not settings.values.get("fsdp")


def _trainer_save_only_model(settings: Settings) -> Iterator[Values]:
    values = settings.values
    if not (values.get("save_only_model") and values.get("fsdp")):
        return
    is_sharded = str(settings.fsdp.get("state_dict_type", "")).upper() == "SHARDED_STATE_DICT"
    if values.get("load_best_model_at_end") or is_sharded:
        yield {"beside": "SHARDED_STATE_DICT" if is_sharded else "load_best_model_at_end"}
    else:
        yield {"variant": "resume"}


def _trainer_low_bit_optimizer(settings: Settings) -> bool:
    optimizer = str(settings.values.get("optim", ""))
    is_theirs = ("8bit" in optimizer or optimizer.startswith("paged_")) and "torch" not in optimizer
    return is_theirs and bool(settings.values.get("fsdp"))


def _all_set(*names: str) -> Callable[[Settings], bool]:
    return lambda settings: all(settings.values.get(name) for name in names)


# ----------------------------------------------------------------------------------------------------
# Conditions over given checkpoints.

#: What a resume does without each part.
_WITHOUT = {
    "optimizer": "a resume from it starts with fresh moments, and the loss jumps",
    "scheduler": "the HF Trainer then restores neither scheduler nor optimizer, and the loss jumps",
    "RNG states": "dropout and the order of the data then differ from those of a run that never stopped",
}


def _checkpoint_set_aside(checkpoint: Checkpoint) -> Iterator[Values]:
    if checkpoint.set_aside:
        what = (
            "and they still take up space" if checkpoint.steps else "and no other step is left to resume from"
        )
        yield {"steps": count(len(checkpoint.set_aside), "step"), "what": what}


def _is_model_only(facts: Facts, checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.lost) and (
        checkpoint.is_model_only or any(a.values.get("save_only_model") is True for a in facts.arguments)
    )


def _checkpoint_incomplete(facts: Facts) -> Iterator[Values]:
    for one in facts.checkpoints:
        if not (one.lost or one.lost_files) or _is_model_only(facts, one):
            continue
        name, files, lost = os.path.basename(one.path), some(one.lost_files), [*one.lost]
        if lost:
            words = f"{', '.join(lost[:-1])} and {lost[-1]}" if len(lost) > 1 else lost[0]
            others = f". It's also missing {files}" if one.lost_files else ""
            lacks = f"{name} has no {words}: {_WITHOUT[lost[0]]}{others}"
        else:
            lacks = f"{name} is missing {files}, which the checkpoints next to it have"
        yield {"it": one, "lacks": lacks}


def _only_models(facts: Facts, *, resumed: bool) -> Iterator[Values]:
    found = [c for c in facts.checkpoints if _is_model_only(facts, c)]
    if found and any(log.resumed for log in facts.logs) == resumed:
        one = f"{os.path.basename(found[0].path)} contains"
        yield {
            "where": _together(found),
            "holds": one if len(found) == 1 else f"{len(found)} checkpoints contain",
        }


def _checkpoint_pickle(facts: Facts) -> Iterator[Values]:
    if found := [c for c in facts.checkpoints if c.pickles]:
        which = "this checkpoint" if len(found) == 1 else f"one of these {len(found)} checkpoints"
        names = tuple(dict.fromkeys(name for c in found for name in c.pickles))
        yield {"where": _together(found), "which": which, "names": names}


def _together(found: Sequence[Checkpoint]) -> str:
    """One path, or the directory of several and how many there are."""
    if len(found) == 1:
        return found[0].path
    above = {os.path.dirname(c.path) for c in found}
    if len(above) == 1:
        return f"{above.pop()}: {len(found)} checkpoints"
    return f"{found[0].path} and {len(found) - 1} more"


def _checkpoint_merge(facts: Facts) -> Iterable[Values]:
    memory = facts.machine.memory
    if memory is None:
        return []
    return [{"it": c} for c in facts.checkpoints if c.kind == "dcp" and c.nbytes > memory.free_bytes]


# ----------------------------------------------------------------------------------------------------
# Conditions over logs.


def _jumped(log: Log, jump: tuple[str, float, float] | None, why: str) -> Iterable[Values]:
    if jump is None:
        return []
    line, before, after = jump
    at = "at a resume" if log.jump_is_certain else f"after {line}{why}"
    return [{"line": line, "at": at, "before": before, "after": after}]


def _log_random_loss(facts: Facts) -> Iterator[Values]:
    for log in facts.logs:
        for model in facts.models:
            words = number(model.text_config.get("vocab_size"))
            if log.first_loss is not None and words and log.first_loss > 0.95 * math.log(words):
                yield {"it": log, "model": model, "words": words, "guess": math.log(words)}


# ----------------------------------------------------------------------------------------------------
# Conditions over what the ranks told each other: they name the odd one out.

_MOST_APART_S = 5.0


def _odd(ranks: Sequence[Seen], value: Callable[[Seen], object]) -> tuple[object, list[Seen]]:
    """What most ranks have (of equally many, what the first rank has), and the ranks that have something else."""
    values = [value(one) for one in ranks]
    usual = max(values, key=lambda one: (values.count(one), one == values[0]))
    return usual, [one for one, has in zip(ranks, values, strict=True) if has != usual]


def _named(odd: Sequence[Seen]) -> str:
    names = ", ".join(f"{one.rank} ({one.host})" for one in odd[:8])
    more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
    return f"rank{'s' if len(odd) > 1 else ''} {names}{more}"


def _ranks(facts: Facts) -> Sequence[Seen]:
    return facts.meeting.ranks if facts.meeting is not None else ()


def _ranks_missing(facts: Facts) -> Iterator[Values]:
    if facts.meeting is not None and facts.meeting.missing:
        yield {"names": ", ".join(map(str, facts.meeting.missing[:16]))}


def _ranks_versions(facts: Facts) -> Iterator[Values]:
    ranks = _ranks(facts)
    for name in sorted({n for one in ranks for n in one.versions}):
        usual, odd = _odd(ranks, lambda one, name=name: one.versions.get(name))  # type: ignore[misc]
        if odd:
            yield {"name": name, "odd": _named(odd), "value": odd[0].versions.get(name), "usual": usual}


def _ranks_limits(facts: Facts) -> Iterator[Values]:
    ranks = _ranks(facts)
    for name in sorted({n for one in ranks for n in one.limits}):
        values = [one.limits.get(name, 0.0) for one in ranks]
        usual = sorted(values)[len(values) // 2]
        odd = [one for one in ranks if one.limits.get(name, 0.0) < 0.9 * usual]
        if odd:
            yield {"name": name, "odd": _named(odd), "value": odd[0].limits.get(name, 0.0), "usual": usual}


def _ranks_clocks(facts: Facts) -> Iterator[Values]:
    clocks = sorted(one.clock_s for one in _ranks(facts))
    odd = [one for one in _ranks(facts) if abs(one.clock_s - clocks[len(clocks) // 2]) > _MOST_APART_S]
    if odd:
        apart_s = odd[0].clock_s - clocks[len(clocks) // 2]
        yield {"odd": _named(odd), "apart_s": abs(apart_s), "side": "ahead" if apart_s > 0 else "behind"}


def _ranks_files(facts: Facts) -> Iterator[Values]:
    hosts = [one for one in _ranks(facts) if one.files is not None]
    found = []
    for name in sorted({n for one in hosts for n in one.files or {}}):
        usual, odd = _odd(hosts, lambda one, name=name: (one.files or {}).get(name))  # type: ignore[misc]
        if odd:
            found.append((name, usual, odd))
    if found:
        name, usual, odd = found[0]
        size = (odd[0].files or {}).get(name)
        yield {
            "name": name,
            "odd": _named(odd),
            "what": "is missing" if size is None else f"has {size} bytes",
            "most": "it's missing" if usual is None else f"it has {usual} bytes",
            "more": f" ({len(found) - 1} more files differ)" if len(found) > 1 else "",
        }


def _ranks_not_shared(facts: Facts) -> Iterator[Values]:
    for path in sorted({p for one in _ranks(facts) for p in one.unseen}):
        blind = [one for one in _ranks(facts) if one.unseen.get(path)]
        yield {"path": path, "blind": _named(blind), "hidden": blind[0].unseen[path][0]}


# ----------------------------------------------------------------------------------------------------
# By name.

SOURCES: Mapping[str, Callable[[Facts], Iterable[Any]]] = {"fsdp": _fsdp, "fsdp2": _fsdp2}
#: How the ids of rules begin.
_KINDS = [
    "accelerate",
    "checkpoint",
    "launch",
    "log",
    "machine",
    "model",
    "network",
    "ranks",
    "software",
    "storage",
    "trainer",
]
#: By rule: true, or the values of each finding. A function here has the id of its rule as its name.
CONDITIONS: Mapping[str, Callable[[Any], bool | Iterable[Values]]] = {
    **{
        name[1:].replace("_", ".", 1).replace("_", "-"): function
        for name, function in list(globals().items())
        if name.startswith(tuple(f"_{kind}_" for kind in _KINDS))
    },
    "machine.memory": lambda facts: (
        (m := facts.machine.memory) is not None and facts.ranks * _PROCESS_BYTES > m.free_bytes
    ),
    "machine.shm": lambda facts: (m := facts.machine.memory) is not None and _below(m.shm_bytes, _SHM_BYTES),
    "machine.open-files": lambda facts: _below(facts.machine.limits.open_files, _OPEN_FILES),
    "machine.file-size": lambda facts: _below(facts.machine.limits.file_bytes, _FILE_BYTES),
    "machine.locked-memory": lambda facts: (
        _below(facts.machine.limits.locked_bytes, _LOCKED_BYTES)
        and facts.machine.has_rdma
        and _nodes(facts) > 1
    ),
    "machine.clock": lambda facts: facts.machine.clock_s < _EARLIEST_S,
    "network.loopback": lambda facts: facts.machine.network.is_loopback and _by_host_name(facts),
    "network.hostname": lambda facts: not facts.machine.network.addresses and _by_host_name(facts),
    "network.gloo-pattern": lambda facts: facts.environment.get("GLOO_SOCKET_IFNAME", "").startswith(
        ("^", "=")
    ),
    "storage.unresponsive": lambda facts: [{"path": p, "waited_s": s} for p, s in facts.silent.items()],
    "storage.inodes": lambda place: (
        _below(place.free_inodes, _LEAST_INODES) and "write" not in place.failures
    ),
    "storage.slow-fsync": lambda place: bool(place.speeds) and place.speeds.fsync_s > _MOST_FSYNC_S,
    "storage.nfs-locks": lambda place: _options(place, "nolock", "local_lock=all", "local_lock=posix"),
    "storage.nfs-soft": lambda place: _options(place, "soft", "softerr"),
    "launch.ram-efficient-off": lambda facts: (
        _says(facts, "FSDP_CPU_RAM_EFFICIENT_LOADING") and not _says(facts, "ACCELERATE_USE_FSDP")
    ),
    "launch.fsdp1": lambda facts: (
        _says(facts, "ACCELERATE_USE_FSDP") and facts.environment.get("FSDP_VERSION", "1") != "2"
    ),
    "accelerate.device-mesh": lambda one: one.says("cpu_ram_efficient_loading"),
    "accelerate.whole-model": lambda one: one.says("cpu_ram_efficient_loading"),
    "accelerate.other-engine": lambda settings: (
        str(settings.values.get("distributed_type", "")).upper() in ("DEEPSPEED", "MEGATRON_LM")
    ),
    "trainer.data-skip": _all_set("ignore_data_skip"),
    "trainer.two-halves": _all_set("bf16", "fp16"),
    "trainer.checkpointing": _all_set("gradient_checkpointing", "fsdp"),
    "model.damaged-file": lambda model: [{"name": name, "how": how} for name, how in model.damaged.items()],
    "checkpoint.resumed-model-only": lambda facts: _only_models(facts, resumed=True),
    "checkpoint.damaged": lambda one: [{"name": name, "how": how} for name, how in one.damaged.items()],
    "checkpoint.model-only": lambda facts: _only_models(facts, resumed=False),
    "log.loss-jump": lambda log: _jumped(log, log.jump, ", from which a run may have resumed"),
    "log.lr-jump": lambda log: _jumped(log, log.rate_jump, ""),
    "log.rising-loss": lambda log: [{"low": log.rise[0], "last": log.rise[1]}] if log.rise else [],
    "ranks.no-store": lambda facts: facts.meeting is not None and facts.meeting.problem is not None,
}
