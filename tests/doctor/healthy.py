"""Facts of sane machines, launches and files, to be spoilt by pathologies; and a hundred of them, of different kinds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardwise.doctor.facts import (
    Bucket,
    Checkpoint,
    Cores,
    Facts,
    Limits,
    Log,
    Machine,
    Meeting,
    Memory,
    Model,
    Mount,
    Network,
    Place,
    Seen,
    Settings,
    Speeds,
)

GIB = 1024**3
SOFTWARE = {
    "python": "3.12.4",
    "accelerate": "1.15.0",
    "huggingface_hub": "2.4.0",
    "numpy": "2.4.6",
    "peft": "0.21.2",
    "safetensors": "0.8.0",
    "torch": "2.13.0+cu130",
    "torchvision": "0.28.0+cu130",
    "transformers": "5.23.0",
    "xxhash": "3.5.0",
}
NETWORK = Network(host="node3", addresses=("10.0.0.3",), interface="eth0", interfaces=("lo", "eth0", "eth1"))
MACHINE = Machine(
    memory=Memory(
        limit_bytes=512 * GIB,
        limit_from="/sys/fs/cgroup/memory.max",
        free_bytes=480 * GIB,
        is_unified=False,
        shm_bytes=256 * GIB,
    ),
    limits=Limits(open_files=65_536, locked_bytes=None, file_bytes=None),
    cores=Cores(usable=64, machine=128),
    network=NETWORK,
    clock_s=1_795_000_000.0,
    gpu_files=8,
    gpus=8,
    has_rdma=True,
)
PLACE = Place(
    path="/data/run",
    mount=Mount(kind="ext4", point="/data", source="/dev/nvme0n1", options=("rw", "relatime")),
    free_bytes=4000 * GIB,
    free_inodes=10_000_000,
    speeds=Speeds(write_bytes_s=1.5e9, read_bytes_s=2e9, random_bytes_s=1e9, fsync_s=0.002),
)
NFS = replace(
    PLACE,
    path="/nfs/run",
    mount=Mount(
        kind="nfs4", point="/nfs", source="srv:/x", options=("rw", "hard", "vers=4.2", "acdirmax=60")
    ),
    free_inodes=None,
)
BUCKET = Bucket(url="s3://bucket/run")
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node3",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TWO_NODES = {**TORCHRUN, "WORLD_SIZE": "16"}
SRUN = {
    **{"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "node3", "MASTER_PORT": "29500"},
    **{"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_NTASKS_PER_NODE": "8", "SLURM_NNODES": "1"},
    "OMP_NUM_THREADS": "2",
}
LAUNCH = {**TORCHRUN, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "false"}
YAML: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_version": 2,
    },
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
}
ARGUMENTS: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "bf16": True,
    "optim": "adamw_torch_fused",
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT", "activation_checkpointing": True},
}
MODEL = Model(
    path="/models/qwen",
    config={"model_type": "qwen3", "num_experts": 128, "vocab_size": 151_936},
    nbytes=16 * GIB,
)
CHECKPOINT = Checkpoint(path="/data/run", kind="steps", steps=(300, 200, 100))
LOG = Log(path="/logs/run.log", lines={}, first_loss=2.31)
SEEN = Seen(
    rank=0,
    host="node3",
    versions=SOFTWARE,
    limits={"cores": 64.0, "memory (bytes)": 512.0 * GIB},
    clock_s=1_795_000_000.0,
    files={"/models/qwen/model.safetensors": 16 * GIB},
)
MEETING = Meeting(
    world_size=4,
    ranks=tuple(replace(SEEN, rank=r, host=f"node{r}", clock_s=SEEN.clock_s + 0.01 * r) for r in range(4)),
    missing=(),
    waited_s=2.0,
)
REQUIRED = ("torch>=2.9", "transformers>=5.0", "safetensors>=0.4.3", "xxhash>=3.2", "click>=8.1")
HEALTHY = Facts(ranks=8, machine=MACHINE, software=SOFTWARE, environment=TORCHRUN, requirements=REQUIRED)


def settings(values: dict[str, Any], **fsdp: Any) -> Settings:
    """A configuration with other FSDP settings; None removes one."""
    changed = {**values.get("fsdp_config", {}), **fsdp}
    found = {n: v for n, v in changed.items() if v is not None}
    return Settings(path="/runs/config", values={**values, "fsdp_config": found})


def hundred() -> Iterator[Facts]:
    """A hundred healthy runs: launches × machines × storage × files, drawn once and for all."""
    draw = random.Random(14)
    yamls = [
        settings(YAML),
        settings({**YAML, "mixed_precision": "no"}, fsdp_state_dict_type="SHARDED_STATE_DICT"),
        settings(
            {**YAML, "num_machines": 2, "num_processes": 16, "main_process_ip": "10.0.0.1"},
            fsdp_offload_params=True,
        ),
        Settings(path="/runs/ddp.yaml", values={"distributed_type": "MULTI_GPU", "num_processes": 8}),
        settings(YAML, fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=1_000_000),
    ]
    arguments = [
        Settings(path="/runs/args.json", values=ARGUMENTS),
        Settings(
            path="/runs/plain.json", values={"output_dir": "x", "fsdp": [], "fsdp_config": {"xla": False}}
        ),
        settings({**ARGUMENTS, "optim": "adamw_torch_8bit", "gradient_checkpointing": False}),
    ]
    machines = [
        MACHINE,
        replace(
            MACHINE,
            gpus=0,
            gpu_files=0,
            cores=Cores(usable=8.0, machine=64, quota_from="/sys/fs/cgroup/cpu.max"),
        ),
        replace(MACHINE, memory=None, has_rdma=False),
        replace(MACHINE, limits=Limits(open_files=1024, locked_bytes=None, file_bytes=None)),
        replace(MACHINE, network=replace(NETWORK, addresses=("127.0.1.1",), interface="lo")),
        replace(MACHINE, gpus=1, gpu_files=1),
    ]
    places = [
        PLACE,
        NFS,
        replace(PLACE, mount=None),
        replace(PLACE, mount=replace(PLACE.mount, kind="lustre")),
    ]
    for k in range(100):
        machine = machines[k % len(machines)]
        several = machine.network.is_loopback or machine.gpus == 1
        environment = draw.choice(
            [{}, TORCHRUN, SRUN, LAUNCH, {"OMP_NUM_THREADS": "4"}, {"CUDA_VISIBLE_DEVICES": ""}]
        )
        if not several and draw.random() < 0.3:
            environment = TWO_NODES
        fits = machine.gpus != 1 and environment in ({}, TORCHRUN, LAUNCH, SRUN)
        yaml = draw.choice(yamls)
        if several or environment is not TWO_NODES:
            yaml = yamls[draw.choice((0, 1, 3, 4))]
        elif yaml is not yamls[2]:
            fits = False
        yield Facts(
            ranks=draw.choice((1, 2, 4, 8)),
            machine=machine,
            software={n: v for n, v in SOFTWARE.items() if n in ("python", "torch") or draw.random() < 0.8},
            environment=environment,
            requirements=REQUIRED,
            places=tuple(draw.sample(places, draw.randrange(3))),
            buckets=(BUCKET,) if draw.random() < 0.3 else (),
            accelerate=(yaml,) if fits and draw.random() < 0.7 else (),
            arguments=(draw.choice(arguments),) if draw.random() < 0.5 else (),
            models=(MODEL,) if draw.random() < 0.5 else (),
            checkpoints=(CHECKPOINT,) if draw.random() < 0.5 else (),
            logs=(LOG,) if draw.random() < 0.5 else (),
            meeting=MEETING if draw.random() < 0.3 else None,
        )
