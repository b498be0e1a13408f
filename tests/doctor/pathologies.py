"""One spoilt fact each, for every rule: what is spoilt, the rule that must name it, and words of its sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.doctor.facts import Checkpoint, Cores, Facts, Foreign, Limits, Log, Settings
from shardwise.doctor.logs import KNOWN
from tests.doctor.healthy import (
    ARGUMENTS,
    BUCKET,
    CHECKPOINT,
    GIB,
    HEALTHY,
    LAUNCH,
    LOG,
    MACHINE,
    MEETING,
    MODEL,
    NETWORK,
    NFS,
    PLACE,
    SOFTWARE,
    SRUN,
    TORCHRUN,
    TWO_NODES,
    YAML,
    settings,
)

__all__ = ["PATHOLOGIES", "Pathology"]


@dataclass(frozen=True, slots=True)
class Pathology:
    rule: str
    words: str
    facts: Facts
    beside: tuple[str, ...] = ()
    """Rules that see it, too."""


def _machine(**changes: Any) -> Facts:
    return replace(HEALTHY, machine=replace(MACHINE, **changes))


def _memory(**changes: Any) -> Any:
    assert MACHINE.memory is not None
    return replace(MACHINE.memory, **changes)


def _limits(**changes: Any) -> Limits:
    return replace(MACHINE.limits, **changes)


def _place(**changes: Any) -> Facts:
    return replace(HEALTHY, places=(replace(PLACE, **changes),))


def _mount(kind: str, *options: str) -> Facts:
    assert NFS.mount is not None
    return replace(HEALTHY, places=(replace(NFS, mount=replace(NFS.mount, kind=kind, options=options)),))


def _speeds(**changes: float) -> Facts:
    assert PLACE.speeds is not None
    return _place(speeds=replace(PLACE.speeds, **changes))


def _bucket(**failures: str) -> Facts:
    return replace(HEALTHY, buckets=(replace(BUCKET, failures=failures),))


def _told(base: dict[str, str], **changes: str | None) -> Facts:
    found = {n: v for n, v in {**base, **changes}.items() if v is not None}
    return replace(HEALTHY, environment=found)


def _software(**changes: str) -> Facts:
    return replace(HEALTHY, software={**SOFTWARE, **changes})


def _yaml(values: dict[str, Any] | None = None, **fsdp: Any) -> Facts:
    return replace(HEALTHY, accelerate=(settings({**YAML, **(values or {})}, **fsdp),))


def _arguments(**changes: Any) -> Facts:
    return replace(HEALTHY, arguments=(Settings(path="/runs/args.json", values={**ARGUMENTS, **changes}),))


def _model(**changes: Any) -> Facts:
    return replace(HEALTHY, models=(replace(MODEL, **changes),))


def _wraps(classes: str) -> Facts:
    known = ("LlamaAttention", "LlamaDecoderLayer", "LlamaModel")
    return replace(_yaml(fsdp_transformer_layer_cls_to_wrap=classes), models=(replace(MODEL, classes=known),))


def _checkpoint(**changes: Any) -> Facts:
    return replace(HEALTHY, checkpoints=(replace(CHECKPOINT, **changes),))


def _rank(number: int, **changes: Any) -> Facts:
    ranks = [replace(one, **changes) if one.rank == number else one for one in MEETING.ranks]
    return replace(HEALTHY, meeting=replace(MEETING, ranks=tuple(ranks)))


def _told_two(**changes: Any) -> Callable[[Facts], Facts]:
    """Two nodes, on a machine with other facts."""
    return lambda facts: replace(facts, environment=TWO_NODES, machine=replace(MACHINE, **changes))


_BNB = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
_TIED = replace(
    MODEL, config={"text_config": {"tie_word_embeddings": True, "vocab_size": 1024, "hidden_size": 1024}}
)
_EFFICIENT = {"fsdp_cpu_ram_efficient_loading": True}

MODEL_ONLY = tuple(
    Checkpoint(path=f"/x/checkpoint-{step}", kind="full", lost=("optimizer",), is_model_only=True)
    for step in (150, 100)
)

PATHOLOGIES: tuple[Pathology, ...] = (
    Pathology("machine.memory", "8 ranks will be killed", _machine(memory=_memory(free_bytes=4 * GIB))),
    Pathology(
        "machine.shm",
        "bus error: /dev/shm has only 64.0 MiB",
        _machine(memory=_memory(shm_bytes=64 * 1024**2)),
    ),
    Pathology("machine.open-files", "it's only 256", _machine(limits=_limits(open_files=256))),
    Pathology("machine.file-size", "larger than 2.0 GiB", _machine(limits=_limits(file_bytes=2 * GIB))),
    Pathology(
        "machine.locked-memory",
        "can't register its buffers",
        _told_two(limits=_limits(locked_bytes=65_536))(HEALTHY),
    ),
    Pathology("machine.threads", "8 ranks × 64 threads", _told(TORCHRUN, OMP_NUM_THREADS="64")),
    Pathology("machine.threads", "start a thread for every one", _told(SRUN, OMP_NUM_THREADS=None)),
    Pathology(
        "machine.cores",
        "8 ranks share 2 cores",
        _machine(cores=Cores(usable=2.0, machine=128, quota_from="/sys/fs/cgroup/cpu.max")),
    ),
    Pathology("machine.clock", "a date before 2024", _machine(clock_s=1000.0)),
    Pathology("machine.gpus-unseen", "torch sees none of 8 GPUs", _machine(gpus=0)),
    Pathology(
        "network.loopback",
        "its name resolves to 127.0.1.1",
        _told_two(network=replace(NETWORK, addresses=("127.0.1.1",), interface="lo"))(HEALTHY),
    ),
    Pathology(
        "network.hostname",
        "its name can't be resolved",
        _told_two(network=replace(NETWORK, addresses=(), interface=None))(HEALTHY),
    ),
    Pathology("network.interface", "no interface eth9", _told(TORCHRUN, NCCL_SOCKET_IFNAME="eth9")),
    Pathology("network.gloo-pattern", "called '^lo'", _told(TORCHRUN, GLOO_SOCKET_IFNAME="^lo")),
    Pathology(
        "network.slow-interface",
        "goes through eth0, not through ib0",
        _told_two(network=replace(NETWORK, interfaces=("lo", "eth0", "ib0")))(HEALTHY),
    ),
    # ------------------------------------------------------------------------------------- storage
    Pathology(
        "storage.unresponsive", "didn't respond within 10 s", replace(HEALTHY, silent={"/nfs/run": 10.0})
    ),
    Pathology(
        "storage.not-writable", "Read-only file system", _place(failures={"write": "Read-only file system"})
    ),
    Pathology("storage.fsync", "Input/output error", _place(failures={"fsync": "Input/output error"})),
    Pathology("storage.space", "100.0 MiB is free", _place(free_bytes=100 * 1024**2)),
    Pathology(
        "storage.space",
        "96.0 GiB is needed",
        replace(_place(free_bytes=20 * GIB), models=(MODEL,)),
    ),
    Pathology("storage.inodes", "12 inodes are left", _place(free_inodes=12)),
    Pathology("storage.memory", "lost on a restart", _mount("tmpfs", "rw")),
    Pathology("storage.overlay", "lost with the container", _mount("overlay", "rw")),
    Pathology("storage.slow-write", "wrote 5 MiB/s", _speeds(write_bytes_s=5 * 1024**2)),
    Pathology("storage.slow-read", "read 4 MiB/s", _speeds(random_bytes_s=4 * 1024**2)),
    Pathology("storage.slow-fsync", "took 3.0 s", _speeds(fsync_s=3.0)),
    Pathology(
        "storage.no-locks", "can't be locked (No locks", _place(failures={"lock": "No locks available"})
    ),
    Pathology(
        "storage.no-exclusion", "grants the same lock twice", _place(failures={"exclude": "two holders"})
    ),
    Pathology(
        "storage.no-rename", "renaming failed", _place(failures={"rename": "Invalid cross-device link"})
    ),
    Pathology(
        "storage.no-direct", "O_DIRECT fails (Invalid", _place(failures={"direct": "Invalid argument"})
    ),
    Pathology("storage.over-object-store", "half a checkpoint", _mount("fuse.gcsfuse", "rw")),
    Pathology("storage.nfs-locks", "mounted with nolock", _mount("nfs", "rw", "nolock")),
    Pathology("storage.nfs-soft", "slow server makes a save fail", _mount("nfs4", "rw", "soft")),
    Pathology("storage.nfs-stale", "up to 600 s late", _mount("nfs4", "rw", "acdirmax=600")),
    Pathology("storage.clock", "120 s ahead of", _place(clock_ahead_s=120.0)),
    Pathology(
        "storage.clock", "900 s behind", replace(HEALTHY, buckets=(replace(BUCKET, clock_ahead_s=-900.0),))
    ),
    Pathology(
        "bucket.refused",
        "can't list objects under this prefix: no such bucket",
        _bucket(list="no such bucket"),
    ),
    Pathology(
        "bucket.no-conditions",
        "may overwrite each other's steps",
        _bucket(create="a second write replaced it"),
    ),
    Pathology("bucket.no-delete", "Old steps stay forever", _bucket(delete="403 (AccessDenied)")),
    # ------------------------------------------------------------------------------------- launch
    Pathology(
        "launch.incomplete", "MASTER_ADDR, MASTER_PORT are not", _told({"RANK": "0", "WORLD_SIZE": "8"})
    ),
    Pathology("launch.numbers", "RANK=8 and WORLD_SIZE=8", _told(TORCHRUN, RANK="8")),
    Pathology("launch.numbers", "LOCAL_WORLD_SIZE=8 and WORLD_SIZE=4", _told(TORCHRUN, WORLD_SIZE="4")),
    Pathology("launch.port", "is not a port", _told(TORCHRUN, MASTER_PORT="295000")),
    Pathology("launch.master-loopback", "MASTER_ADDR=127.0.0.1", _told(TWO_NODES, MASTER_ADDR="127.0.0.1")),
    Pathology(
        "launch.torchrun-per-task",
        "starts torchrun 8 times",
        _told(TORCHRUN, SLURM_NTASKS_PER_NODE="8", SLURM_PROCID="0"),
    ),
    Pathology("launch.slurm-world", "WORLD_SIZE=4, but srun started 8", _told(SRUN, WORLD_SIZE="4")),
    Pathology("launch.slurm-world", "RANK=0 in task 3", _told(SRUN, SLURM_PROCID="3")),
    Pathology(
        "launch.mpi-world",
        "WORLD_SIZE=1, but mpirun started 8",
        _told(
            {}, OMPI_COMM_WORLD_SIZE="8", WORLD_SIZE="1", RANK="0", MASTER_ADDR="node3", MASTER_PORT="29500"
        ),
    ),
    Pathology("launch.devices", "2 are visible for 8 ranks", _told(TORCHRUN, CUDA_VISIBLE_DEVICES="0,1")),
    Pathology("launch.devices", "lists one twice", _told(TORCHRUN, CUDA_VISIBLE_DEVICES="0,0,1")),
    Pathology(
        "launch.ram-efficient-off",
        "Every rank loads the full model",
        _told(TORCHRUN, FSDP_CPU_RAM_EFFICIENT_LOADING="True"),
    ),
    Pathology("launch.fsdp1", "uses FSDP1", _told(LAUNCH, FSDP_VERSION="1")),
    Pathology("launch.no-watchdog", "wait forever", _told(TORCHRUN, TORCH_NCCL_ASYNC_ERROR_HANDLING="0")),
    Pathology(
        "software.requires", "transformers is 4.57.6", _software(transformers="4.57.6"), ("software.gates",)
    ),
    Pathology(
        "software.requires",
        "torch is 2.8.0",
        _software(torch="2.8.0", torchvision="0.23.0"),
        ("software.gates",),
    ),
    Pathology(
        "software.gates", "needs transformers 5.22 or newer, but 5.21.1", _software(transformers="5.21.1")
    ),
    Pathology(
        "software.peft", "peft 0.19.1 with transformers 5.23.0", _software(peft="0.19.1"), ("software.gates",)
    ),
    Pathology(
        "software.peft",
        "peft 0.18.1 with torchao 0.18.0",
        _software(peft="0.18.1", torchao="0.18.0"),
        ("software.gates",),
    ),
    Pathology("software.torchvision", "torchvision 0.24.0", _software(torchvision="0.24.0")),
    # ------------------------------------------------------------------------------------- settings
    Pathology(
        "accelerate.device-mesh",
        "'Tensor' object has no attribute 'device_mesh'",
        _yaml(**_EFFICIENT),
        ("accelerate.whole-model",),
    ),
    Pathology(
        "accelerate.whole-model",
        "full model into host memory on every rank",
        _arguments(fsdp_config={"version": 2, "cpu_ram_efficient_loading": "true"}),
        ("accelerate.device-mesh",),
    ),
    Pathology(
        "accelerate.not-ram-efficient",
        "each of the 8 ranks loads the full model",
        replace(_yaml(), models=(replace(MODEL, nbytes=70 * GIB),)),
    ),
    Pathology("accelerate.fsdp1", "uses FSDP1", _yaml(fsdp_version=1)),
    Pathology("accelerate.fsdp1", "uses FSDP1", _yaml(fsdp_version=None)),
    Pathology("accelerate.fsdp1", "uses FSDP1", _arguments(fsdp_config={"version": 1})),
    Pathology(
        "accelerate.fsdp1",
        "TrainingArguments before transformers 5.10",
        replace(_arguments(fsdp_config={}), software={**SOFTWARE, "transformers": "5.9.0"}),
        ("software.gates",),
    ),
    Pathology("accelerate.sharded-fp32", "loss spike", _yaml(fsdp_state_dict_type="SHARDED_STATE_DICT")),
    Pathology(
        "accelerate.refused-by-fsdp2", "fsdp_forward_prefetch is True", _yaml(fsdp_forward_prefetch=True)
    ),
    Pathology(
        "accelerate.refused-by-fsdp2",
        "fsdp_reshard_after_forward is 'FULL_SHARD'",
        _yaml(fsdp_reshard_after_forward="FULL_SHARD"),
    ),
    Pathology(
        "accelerate.tied-groups",
        "names Embedding",
        replace(_yaml(fsdp_transformer_layer_cls_to_wrap="Block,Embedding"), models=(_TIED,)),
    ),
    Pathology(
        "accelerate.tied-groups",
        "less than the embedding's 1048576 parameters",
        replace(
            _yaml(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=1_000_000), models=(_TIED,)
        ),
    ),
    Pathology("accelerate.one-group", "gathers the full model", _yaml(fsdp_auto_wrap_policy="NO_WRAP")),
    Pathology(
        "accelerate.one-group",
        "only if it includes auto_wrap",
        replace(_arguments(fsdp=True), software={**SOFTWARE, "transformers": "5.9.0"}),
        ("software.gates",),
    ),
    Pathology(
        "accelerate.other-engine", "distributed_type is DEEPSPEED", _yaml({"distributed_type": "DEEPSPEED"})
    ),
    Pathology(
        "accelerate.parallelism",
        "tp_size is 2, and FSDP is on",
        _yaml({"parallelism_config": {"parallelism_config_tp_size": 2}}),
    ),
    Pathology(
        "accelerate.processes", "isn't a multiple", _yaml({"num_machines": 3, "main_process_ip": "10.0.0.1"})
    ),
    Pathology("accelerate.processes", "WORLD_SIZE is 8", _yaml({"num_processes": 4})),
    Pathology(
        "accelerate.main-process",
        "main_process_ip is not set",
        replace(_yaml({"num_machines": 2, "num_processes": 16}), environment={}),
    ),
    Pathology(
        "accelerate.wrap-class",
        "LlamaDecoderLayr",
        _wraps("LlamaDecoderLayr"),
    ),
    Pathology(
        "accelerate.wrap-class",
        "names LamaLayer",
        _wraps("LlamaDecoderLayer,LamaLayer"),
    ),
    Pathology("trainer.fsdp-config-ignored", "Each GPU holds the full model", _arguments(fsdp="")),
    Pathology("trainer.save-only-model", "can't be resumed", _arguments(save_only_model=True)),
    Pathology(
        "trainer.save-only-model",
        "raises a ValueError: save_only_model together with load_best",
        _arguments(save_only_model=True, load_best_model_at_end=True),
    ),
    Pathology("trainer.data-skip", "trains on some samples twice", _arguments(ignore_data_skip=True)),
    Pathology("trainer.two-halves", "bf16 and fp16 are both on", _arguments(fp16=True)),
    Pathology("trainer.checkpointing", "once more than necessary", _arguments(gradient_checkpointing=True)),
    Pathology("trainer.low-bit-optimizer", "optim is adamw_bnb_8bit", _arguments(optim="adamw_bnb_8bit")),
    # ------------------------------------------------------------------------------------- files
    Pathology(
        "model.missing-file", "model-00002-of-00002", _model(lost=("model-00002-of-00002.safetensors",))
    ),
    Pathology(
        "model.damaged-file", "corrupted or truncated", _model(damaged={"model.safetensors": "too short"})
    ),
    Pathology("model.outside", "Don't load this model", _model(outside=("../../etc/passwd",))),
    Pathology("model.lfs-pointer", "contains no weights", _model(pointers=("model.safetensors",))),
    Pathology("model.pickle", "can run any code", _model(pickles=("pytorch_model.bin",))),
    Pathology("model.index", "tensor 'a' is stored twice", _model(problem="tensor 'a' is stored twice")),
    Pathology("model.two-formats", "will miss 2 tensors", _model(only_pickled=("a", "b"))),
    Pathology(
        "model.missing-base", "its base model /models/llama doesn't exist", _model(base="/models/llama")
    ),
    Pathology(
        "model.internal-names", "_orig_mod.lm_head.weight", _model(wrapped=("_orig_mod.lm_head.weight",))
    ),
    Pathology("model.adapter-slice", "has rank 2", _model(slices=("q.lora_A.weight has rank 2",))),
    Pathology(
        "model.conversion", "without an error: olmo_hybrid", _model(config={"model_type": "olmo_hybrid"})
    ),
    Pathology(
        "model.few-experts", "4 experts across 8 ranks", _model(config={"text_config": {"num_experts": 4}})
    ),
    Pathology("model.quant-storage", "stored as uint8", _model(config=_BNB)),
    Pathology(
        "model.unified-memory",
        "will freeze the machine",
        replace(
            _machine(memory=_memory(is_unified=True, limit_bytes=128 * GIB, free_bytes=110 * GIB)),
            models=(replace(MODEL, nbytes=62 * GIB),),
        ),
    ),
    Pathology(
        "model.too-large",
        "doesn't fit on this host",
        replace(_machine(gpus=0, gpu_files=0), models=(replace(MODEL, nbytes=600 * GIB),)),
    ),
    Pathology("checkpoint.damaged", "will skip this step", _checkpoint(damaged={"step-00000300": "lost"})),
    Pathology(
        "checkpoint.set-aside",
        "ignores 1 step (",
        _checkpoint(set_aside=("step-00000400.damaged-ab",)),
    ),
    Pathology("checkpoint.leftovers", "A save was killed", _checkpoint(leftovers=(".tmp-step-00000400-ab",))),
    Pathology(
        "checkpoint.per-rank",
        "only be resumed on the same number of ranks",
        replace(
            HEALTHY,
            checkpoints=(Checkpoint(path="/x", kind="per-rank", per_rank=("pytorch_model_fsdp_rank0.bin",)),),
        ),
    ),
    Pathology("checkpoint.pickle", "can run any code", _checkpoint(kind="dcp", pickles=("scheduler.bin",))),
    Pathology(
        "checkpoint.incomplete",
        "checkpoint-150 has no optimizer: a resume from it starts with fresh moments, and the loss jumps.",
        _checkpoint(path="/x/checkpoint-150", kind="full", lost=("optimizer",)),
    ),
    Pathology(
        "checkpoint.incomplete",
        "checkpoint-150 has no scheduler and RNG states: the HF Trainer then restores neither scheduler nor optimizer",
        _checkpoint(path="/x/checkpoint-150", kind="full", lost=("scheduler", "RNG states")),
    ),
    Pathology(
        "checkpoint.incomplete",
        "checkpoint-150 is missing scaler.pt, which the checkpoints next to it have.",
        _checkpoint(path="/x/checkpoint-150", kind="full", lost_files=("scaler.pt",)),
    ),
    Pathology(
        "checkpoint.model-only",
        "checkpoint-150 contains only the model",
        _checkpoint(path="/x/checkpoint-150", kind="full", lost=("optimizer",), is_model_only=True),
    ),
    Pathology(
        "checkpoint.model-only",
        "2 checkpoints contain only the model",
        replace(HEALTHY, checkpoints=MODEL_ONLY),
    ),
    Pathology(
        "checkpoint.resumed-model-only",
        "the learning rate schedule started again",
        replace(HEALTHY, checkpoints=MODEL_ONLY, logs=(replace(LOG, resumed=True),)),
    ),
    Pathology(
        "checkpoint.merge",
        "600.0 GiB of parts, 480.0 GiB of free memory",
        _checkpoint(kind="dcp", nbytes=600 * GIB),
    ),
    Pathology("checkpoint.unfinished", "no .metadata", _checkpoint(kind="dcp", lacks_metadata=True)),
    *(
        Pathology(
            f"log.{known.line}",
            known.bites,
            replace(HEALTHY, logs=(Log(path="/l", lines={known.line: "x"}),)),
        )
        for known in KNOWN
    ),
    Pathology(
        "log.random-loss",
        "the first loss was 11.9, and guessing among 151936 tokens gives 11.9",
        replace(
            HEALTHY,
            logs=(replace(LOG, first_loss=11.9),),
            models=(replace(MODEL, config={"vocab_size": 151_936}),),
        ),
    ),
    Pathology(
        "log.loss-jump",
        "2.1 before, 9.8 after",
        replace(HEALTHY, logs=(replace(LOG, jump=("resuming from step 100", 2.1, 9.8)),)),
    ),
    Pathology(
        "log.loss-jump",
        "jumped after checkpoint-150, from which a run may have resumed: 2.1 before, 9.8 after",
        replace(HEALTHY, logs=(replace(LOG, jump=("checkpoint-150", 2.1, 9.8), jump_is_certain=False),)),
    ),
    Pathology(
        "log.lr-jump",
        "was reset at a resume: 0.007 before, 0.02 after",
        replace(HEALTHY, logs=(replace(LOG, rate_jump=("line 58, epoch 0.6406", 0.007, 0.02)),)),
    ),
    Pathology(
        "log.lr-jump",
        "was reset after checkpoint-40: 0.007 before, 0.02 after",
        replace(
            HEALTHY, logs=(replace(LOG, rate_jump=("checkpoint-40", 0.007, 0.02), jump_is_certain=False),)
        ),
    ),
    Pathology(
        "log.nan-loss", "NaN or infinite", replace(HEALTHY, logs=(replace(LOG, not_a_number="loss: nan"),))
    ),
    Pathology("log.rising-loss", "from 2.1 to 9.8", replace(HEALTHY, logs=(replace(LOG, rise=(2.1, 9.8)),))),
    # ------------------------------------------------------------------------------------- ranks
    Pathology(
        "ranks.missing",
        "rank 2 of 4 didn't show up",
        replace(
            HEALTHY, meeting=replace(MEETING, ranks=(*MEETING.ranks[:2], MEETING.ranks[3]), missing=(2,))
        ),
    ),
    Pathology(
        "ranks.no-store",
        "can't listen for the other ranks (address in use)",
        replace(HEALTHY, meeting=replace(MEETING, ranks=(), missing=(), problem="address in use")),
    ),
    Pathology(
        "ranks.versions",
        "torch is 2.12.0 on rank 3 (node3)",
        _rank(3, versions={**SOFTWARE, "torch": "2.12.0"}),
    ),
    Pathology(
        "ranks.limits",
        "cores is 8 on rank 1 (node1)",
        _rank(1, limits={"cores": 8.0, "memory (bytes)": 512.0 * GIB}),
    ),
    Pathology("ranks.clocks", "clock on rank 2 (node2) is 60 s ahead", _rank(2, clock_s=1_795_000_060.0)),
    Pathology(
        "ranks.files",
        "has 7 bytes on rank 1 (node1)",
        _rank(1, files={"/models/qwen/model.safetensors": 7}),
    ),
    Pathology("ranks.not-shared", "rank 3 (node3) didn't see", _rank(3, unseen={"/data/run": (0, 1, 2)})),
    Pathology(
        "path.foreign",
        "shardwise can't read it: it's a GGUF model",
        replace(HEALTHY, foreign=(Foreign(path="/x/a.gguf", name="a GGUF model", instead="Take another."),)),
    ),
    Pathology("path.absent", "there is no such file or directory", replace(HEALTHY, absent=("/nope",))),
    Pathology("path.unknown", "Nothing was checked here", replace(HEALTHY, unknown=("/x/config.json",))),
)
