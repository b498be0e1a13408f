"""Rules over the machine, the launch, and models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from ..gates import GATES
from .facts import Bite, Facts, Model, Rule, each, gib, is_on, is_version, number

__all__ = [
    "CUT_ON_DIM_0",
    "LAUNCH",
    "MACHINE",
    "MODELS",
    "SOFTWARE",
    "nodes_of",
    "some",
]


# ----------------------------------------------------------------------------------------------------
# Rules over the machine: memory, limits, cores, names, clock.

_GIB = 1024**3
#: Of one process with torch and transformers, before it loads anything.
_PROCESS_BYTES = _GIB
#: Docker's default is 64 MiB.
_SHM_BYTES = 256 * 1024**2
_OPEN_FILES = 1024
_FILE_BYTES = 64 * _GIB
_LOCKED_BYTES = _GIB
#: 2024-01-01.
_EARLIEST_S = 1_704_067_200


def nodes_of(facts: Facts) -> int:
    """Hosts of the run, as the launch or the given YAML says."""
    told = facts.environment
    world, local = number(told.get("WORLD_SIZE")), number(told.get("LOCAL_WORLD_SIZE"))
    found = [number(told.get("SLURM_NNODES")) or 1]
    if world and local:
        found.append(-(-world // local))
    found += [number(one.values.get("num_machines")) or 1 for one in facts.accelerate]
    return max(found)


def _processes_fit(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    if memory is not None and facts.ranks * _PROCESS_BYTES > memory.free_bytes:
        yield Bite(
            memory.limit_from,
            f"{facts.ranks} ranks will be killed before they load anything: "
            f"only {gib(memory.free_bytes)} of {gib(memory.limit_bytes)} is free.",
            "Each process takes 0.5 to 1 GiB for torch and transformers, and all ranks share the limit of the cgroup or the machine.",
            "Raise the limit of the container or job, stop other processes, or start fewer ranks on this host.",
        )


def _shm(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    if memory is not None and memory.shm_bytes is not None and memory.shm_bytes < _SHM_BYTES:
        yield Bite(
            "/dev/shm",
            f"Data loader workers will crash with a bus error: /dev/shm has only {gib(memory.shm_bytes)}.",
            "Workers pass batches through shared memory, and NCCL uses it between GPUs; containers get 64 MiB by default.",
            "Start the container with --ipc=host or --shm-size=16g, or mount an emptyDir with medium: Memory there.",
        )


def _open_files(facts: Facts) -> Iterator[Bite]:
    limit = facts.machine.limits.open_files
    if limit is not None and limit < _OPEN_FILES:
        yield Bite(
            "RLIMIT_NOFILE",
            f"A rank will reach its open-file limit: it's only {limit}.",
            "Each weight file, socket, and shared tensor counts as one.",
            "Raise it before you launch: ulimit -n 65536 (or LimitNOFILE= in a systemd service).",
        )


def _file_size(facts: Facts) -> Iterator[Bite]:
    limit = facts.machine.limits.file_bytes
    if limit is not None and limit < _FILE_BYTES:
        yield Bite(
            "RLIMIT_FSIZE",
            f"A save or an export will fail as soon as a file grows larger than {gib(limit)}.",
            "The process isn't allowed to write larger files, no matter how much space the disk has.",
            "Raise it before you launch: ulimit -f unlimited.",
        )


def _locked(facts: Facts) -> Iterator[Bite]:
    limit = facts.machine.limits.locked_bytes
    if limit is not None and limit < _LOCKED_BYTES and facts.machine.has_rdma and nodes_of(facts) > 1:
        yield Bite(
            "RLIMIT_MEMLOCK",
            f"NCCL can't register its buffers with the InfiniBand or RoCE adapter: only {gib(limit)} may be locked.",
            "RDMA needs pinned pages, which count toward the locked-memory limit.",
            "Launch with ulimit -l unlimited (docker run --ulimit memlock=-1).",
        )


def _threads(facts: Facts) -> Iterator[Bite]:
    cores, told = facts.machine.cores, facts.environment.get("OMP_NUM_THREADS")
    threads = number((told or "").partition(",")[0])
    if threads is not None and threads > 1 and facts.ranks > 1 and facts.ranks * threads > 2 * cores.usable:
        yield Bite(
            "OMP_NUM_THREADS",
            f"{facts.ranks} ranks × {threads} threads share {cores.usable:g} cores and slow each other down.",
            "In every rank, torch uses this many threads for each CPU operator.",
            f"Set OMP_NUM_THREADS={max(1, int(cores.usable) // facts.ranks)}.",
        )
    elif told is None and facts.ranks > 1 and "SLURM_PROCID" in facts.environment:
        yield Bite(
            "OMP_NUM_THREADS",
            f"Each of the {facts.ranks} ranks will start a thread for every one of the {cores.usable:g} cores.",
            "srun doesn't set OMP_NUM_THREADS. torchrun sets it to 1; without it, torch uses all cores.",
            f"Set OMP_NUM_THREADS={max(1, int(cores.usable) // facts.ranks)}.",
        )


def _cores(facts: Facts) -> Iterator[Bite]:
    cores = facts.machine.cores
    if facts.ranks > max(1.0, 2 * cores.usable):
        what = (
            f"the quota in {cores.quota_from}"
            if cores.quota_from
            else "the process's CPU affinity or the machine"
        )
        yield Bite(
            cores.quota_from or "cores",
            f"{facts.ranks} ranks share {cores.usable:g} cores: each load, save, and step waits for the CPU.",
            f"That's what {what} allows; the machine has {cores.machine}.",
            "Give the container or job at least one core per rank (cpus, --cpus-per-task), or start fewer ranks.",
        )


def _loopback(facts: Facts) -> Iterator[Bite]:
    network = facts.machine.network
    if network.is_loopback and nodes_of(facts) > 1 and not facts.environment.get("GLOO_SOCKET_IFNAME"):
        yield Bite(
            network.host,
            f"Ranks on other hosts can't reach this one: its name resolves to {network.addresses[0]}.",
            "gloo tells the other ranks the address that the host's own name resolves to, and 127.* is local to every host.",
            "Add the name with its address to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface between the hosts.",
        )


def _unresolved(facts: Facts) -> Iterator[Bite]:
    network = facts.machine.network
    if not network.addresses and nodes_of(facts) > 1 and not facts.environment.get("GLOO_SOCKET_IFNAME"):
        yield Bite(
            network.host,
            "Ranks on other hosts can't reach this one: its name can't be resolved.",
            "gloo then uses the loopback address, and its warning is easy to miss.",
            "Add the name with its address to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface between the hosts.",
        )


def _no_interface(facts: Facts) -> Iterator[Bite]:
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = facts.environment.get(name, "")
        if not given or given.startswith("^"):
            continue
        wanted = [one.lstrip("=") for one in given.split(",") if one]
        known = facts.machine.network.interfaces
        by_prefix = name.startswith("NCCL") and not given.startswith("=")  # NCCL takes prefixes
        lost = [w for w in wanted if not any(k.startswith(w) if by_prefix else k == w for k in known)]
        if lost:
            yield Bite(
                name,
                f"The process group won't start: this host has no interface {', '.join(lost)}.",
                f"Its interfaces are {', '.join(known)}; names differ between hosts and containers.",
                f"On each host, set {name} to one of that host's interfaces.",
            )


def _gloo_pattern(facts: Facts) -> Iterator[Bite]:
    given = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    if given.startswith(("^", "=")):
        yield Bite(
            "GLOO_SOCKET_IFNAME",
            f"gloo won't start: it looks for an interface called {given!r}.",
            "Only NCCL understands patterns with ^ and =; gloo takes plain names.",
            "Name the interface, as in GLOO_SOCKET_IFNAME=eth0.",
        )


def _slow_interface(facts: Facts) -> Iterator[Bite]:
    network = facts.machine.network
    fast = [name for name in network.interfaces if name.startswith("ib")]
    chosen = facts.environment.get("GLOO_SOCKET_IFNAME") or facts.environment.get("NCCL_SOCKET_IFNAME")
    slow = (
        network.interface is not None and not network.interface.startswith("ib") and not network.is_loopback
    )
    if fast and slow and not chosen and nodes_of(facts) > 1:
        yield Bite(
            network.host,
            f"Traffic between ranks goes through {network.interface}, not through {fast[0]}.",
            "The host's name resolves to the slower interface. In one report, recovery from a peer took 800 s instead of 20 s.",
            f"Set GLOO_SOCKET_IFNAME={fast[0]} and NCCL_SOCKET_IFNAME={fast[0]}, or make the name resolve to its address.",
        )


def _clock(facts: Facts) -> Iterator[Bite]:
    if facts.machine.clock_s < _EARLIEST_S:
        yield Bite(
            "clock",
            "Requests to the Hub and to object stores will be rejected: this machine's clock is set to a date before 2024.",
            "Certificates aren't valid yet on that date, and stores treat the requests' signatures as expired.",
            "Set the clock, or start its time service (chronyd, systemd-timesyncd).",
        )


def _gpus_unseen(facts: Facts) -> Iterator[Bite]:
    if (
        facts.machine.gpu_files
        and not facts.machine.gpus
        and facts.environment.get("CUDA_VISIBLE_DEVICES") != ""
    ):
        yield Bite(
            "/dev/nvidia0",
            f"Training will run on the CPU, or not at all: torch sees none of {facts.machine.gpu_files} GPUs.",
            f"torch {facts.software.get('torch', '')} was built without CUDA, or needs a newer driver.",
            "Run python -c 'import torch; torch.cuda.init()' to see the error, and install the torch build that matches the driver.",
        )


MACHINE = (
    Rule(
        "machine.memory",
        "less than 1 GiB of free memory per rank (cgroup or machine)",
        "case 2; docs/howto/does-it-fit.md",
        _processes_fit,
    ),
    Rule("machine.shm", "/dev/shm smaller than 256 MiB", "pytorch#5040", _shm),
    Rule("machine.open-files", "RLIMIT_NOFILE below 1,024", "getrlimit(2)", _open_files),
    Rule("machine.file-size", "RLIMIT_FSIZE below 64 GiB", "getrlimit(2)", _file_size),
    Rule(
        "machine.locked-memory",
        "several hosts with an RDMA adapter, and RLIMIT_MEMLOCK below 1 GiB",
        "NCCL user guide, troubleshooting",
        _locked,
    ),
    Rule(
        "machine.threads",
        "ranks × OMP_NUM_THREADS above twice the cores, or the variable unset under srun",
        "torch.distributed.run (sets it to 1)",
        _threads,
    ),
    Rule(
        "machine.cores",
        "more than two ranks per usable core (quota and affinity)",
        "Linux sched-bwc",
        _cores,
    ),
    Rule("machine.clock", "a clock set to a date before 2024", "S3's RequestTimeTooSkewed", _clock),
    Rule("machine.gpus-unseen", "NVIDIA devices that torch can't use", "torch.cuda", _gpus_unseen),
    Rule(
        "network.loopback",
        "several hosts, and this host's name resolves to 127.*",
        "gloo#223, aws-do-eks#69",
        _loopback,
    ),
    Rule(
        "network.host-name",
        "several hosts, and this host's name can't be resolved",
        "aws-do-eks#50",
        _unresolved,
    ),
    Rule(
        "network.interface",
        "a *_SOCKET_IFNAME that names an interface this host doesn't have",
        "NCCL user guide",
        _no_interface,
    ),
    Rule(
        "network.gloo-pattern", "NCCL's pattern syntax in GLOO_SOCKET_IFNAME", "aws-do-eks#51", _gloo_pattern
    ),
    Rule(
        "network.slow-interface",
        "several hosts with InfiniBand, and this host's name resolves to a different interface",
        "torchft#329",
        _slow_interface,
    ),
)


# ----------------------------------------------------------------------------------------------------
# Rules over the launch (the variables that torchrun, Accelerate, SLURM and MPI set) and over installed versions.

_GROUP = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _incomplete(facts: Facts) -> Iterator[Bite]:
    told = facts.environment
    given = [n for n in _GROUP if told.get(n)]
    lost = [n for n in _GROUP if not told.get(n)]
    ranked = {"RANK", "WORLD_SIZE"} & set(given)
    if ranked and lost:
        yield Bite(
            ", ".join(lost),
            f"init_process_group fails: {', '.join(given)} {'is' if len(given) == 1 else 'are'} set, "
            f"but {', '.join(lost)} {'is' if len(lost) == 1 else 'are'} not.",
            "env:// needs all four. If even one is left over from another launch, libraries treat this process as a rank.",
            f"Launch with torchrun, or unset {', '.join(given)}.",
        )


def _numbers(facts: Facts) -> Iterator[Bite]:
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
            yield Bite(
                f"{inner}, {outer}",
                f"The ranks will wait for one that can't exist: {inner}={told[inner]} and {outer}={told[outer]}.",
                "Ranks are numbered from 0, and a host can't have more ranks than there are. Most likely, two launchers set these variables.",
                "Use only one launcher, in a shell where neither variable is set.",
            )


def _port(facts: Facts) -> Iterator[Bite]:
    given = facts.environment.get("MASTER_PORT")
    found = number(given)
    if given and (found is None or not 0 < found < 65_536):
        yield Bite(
            "MASTER_PORT",
            f"init_process_group fails: {given!r} is not a port.",
            "A port is a number from 1 to 65535.",
            "Set a free one, for example MASTER_PORT=29500.",
        )


def _master(facts: Facts) -> Iterator[Bite]:
    address = facts.environment.get("MASTER_ADDR", "")
    if (address.startswith("127.") or address in ("localhost", "::1")) and nodes_of(facts) > 1:
        yield Bite(
            "MASTER_ADDR",
            f"Ranks on every host except the first will wait until the timeout: MASTER_ADDR={address}.",
            "On each host, that address means the host itself.",
            "Set it to a name for the first host that the other hosts can resolve.",
        )


def _many_torchruns(facts: Facts) -> Iterator[Bite]:
    told = facts.environment
    tasks = number(
        (told.get("SLURM_NTASKS_PER_NODE") or told.get("SLURM_TASKS_PER_NODE") or "").partition("(")[0]
    )
    if tasks and tasks > 1 and any(n.startswith("TORCHELASTIC_") for n in told):
        yield Bite(
            "SLURM_NTASKS_PER_NODE",
            f"Several ranks share each GPU: srun starts torchrun {tasks} times on every host.",
            "Each torchrun starts all of a host's ranks. NCCL then fails with 'Duplicate GPU detected', or the process group hangs.",
            "Use --ntasks-per-node=1 with torchrun, or let srun start the ranks without torchrun.",
        )


def _slurm_size(facts: Facts) -> Iterator[Bite]:
    told = facts.environment
    tasks, world = number(told.get("SLURM_NTASKS")), number(told.get("WORLD_SIZE"))
    elastic = any(n.startswith("TORCHELASTIC_") for n in told)
    if tasks and world and not elastic and "SLURM_PROCID" in told and tasks not in (1, world):
        yield Bite(
            "WORLD_SIZE, SLURM_NTASKS",
            f"The process group will wait for ranks that don't exist, or leave some out: WORLD_SIZE={world}, but srun started {tasks}.",
            "The script sets a fixed WORLD_SIZE, and the size of the job has changed.",
            "Set WORLD_SIZE=$SLURM_NTASKS and RANK=$SLURM_PROCID in the line that srun runs.",
        )
    task, rank = number(told.get("SLURM_PROCID")), number(told.get("RANK"))
    if not elastic and tasks == world and tasks and task is not None and rank is not None and task != rank:
        yield Bite(
            "RANK, SLURM_PROCID",
            f"Several tasks have the same rank: RANK={rank} in task {task}.",
            "RANK was set before srun, which passes the same value to every task.",
            "Set RANK=$SLURM_PROCID inside srun: srun bash -c 'RANK=$SLURM_PROCID …'.",
        )


def _mpi_size(facts: Facts) -> Iterator[Bite]:
    told = facts.environment
    size, world = number(told.get("OMPI_COMM_WORLD_SIZE")), number(told.get("WORLD_SIZE"))
    if size and world and size != world and not any(n.startswith("TORCHELASTIC_") for n in told):
        yield Bite(
            "WORLD_SIZE, OMPI_COMM_WORLD_SIZE",
            f"The process group will hang, or leave ranks out: WORLD_SIZE={world}, but mpirun started {size}.",
            "mpirun sets its own variables, and WORLD_SIZE is left over from elsewhere.",
            "Set RANK and WORLD_SIZE from OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE.",
        )


def _devices(facts: Facts) -> Iterator[Bite]:
    given = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if given is None or not given.strip() or given.strip() == "-1":
        return
    devices = [one.strip() for one in given.split(",") if one.strip()]
    local = number(facts.environment.get("LOCAL_WORLD_SIZE"))
    if len(set(devices)) < len(devices):
        yield Bite(
            "CUDA_VISIBLE_DEVICES",
            f"torch sees no GPUs, or too few: {given} lists one twice.",
            "CUDA stops at a device that is listed twice.",
            "List each device once.",
        )
    elif local and local > len(devices):
        yield Bite(
            "CUDA_VISIBLE_DEVICES, LOCAL_WORLD_SIZE",
            f"Rank {len(devices)} on this host won't find a GPU: {len(devices)} are visible for {local} ranks.",
            "Each rank uses the device whose number is its LOCAL_RANK.",
            f"Start {len(devices)} ranks here (--nproc-per-node), or make more devices visible.",
        )


def _ram_efficient_off(facts: Facts) -> Iterator[Bite]:
    told = facts.environment
    if is_on(told.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "")) and not is_on(
        told.get("ACCELERATE_USE_FSDP", "")
    ):
        yield Bite(
            "FSDP_CPU_RAM_EFFICIENT_LOADING",
            "Every rank loads the full model into host memory, even though this variable is meant to prevent that.",
            "transformers and Accelerate respect it only with ACCELERATE_USE_FSDP=true, which accelerate launch sets.",
            "Use accelerate launch, set ACCELERATE_USE_FSDP=true, or load with sw.load_pretrained.",
        )


def _fsdp1(facts: Facts) -> Iterator[Bite]:
    told = facts.environment
    if is_on(told.get("ACCELERATE_USE_FSDP", "")) and told.get("FSDP_VERSION", "1") != "2":
        yield Bite(
            "FSDP_VERSION",
            "shardwise will reject the model: this launch uses FSDP1, and shardwise can't load or save its flat parameters.",
            "Accelerate uses FSDP1 unless FSDP_VERSION is 2.",
            "Set fsdp_version: 2 in the YAML, or FSDP_VERSION=2.",
        )


def _no_watchdog(facts: Facts) -> Iterator[Bite]:
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if facts.environment.get(name) == "0":
            yield Bite(
                name,
                "If a rank dies, the other ranks wait forever in a collective.",
                "With 0, NCCL's watchdog doesn't stop a process whose collective timed out.",
                f"Unset {name}: torch then stops the process, and the launcher notices.",
            )


def _needs(facts: Facts) -> Iterator[Bite]:
    for text in facts.requirements:
        required = Requirement(text)
        if required.marker is None and not is_version(facts, required.name, str(required.specifier)):
            yield Bite(
                required.name,
                f"shardwise will fail at some point: {required.name} is {facts.software[required.name]}.",
                f"It needs {required.name}{required.specifier}; older releases lack features that it uses, or describe shards incorrectly.",
                f"pip install '{required.name}{required.specifier}'",
            )


def _gates(facts: Facts) -> Iterator[Bite]:
    for gate in GATES.values():
        installed = facts.software.get(gate.package)
        if installed is not None and not is_version(facts, gate.package, gate.needs):
            yield Bite(
                gate.package, gate.missing(installed), gate.why, f"{gate.instead} Or update: {gate.update}"
            )


def _peft(facts: Facts) -> Iterator[Bite]:
    software = facts.software
    if not {"peft", "transformers"} <= software.keys():
        return
    if is_version(facts, "transformers", ">=5.6") and is_version(facts, "peft", "==0.19.*"):
        yield Bite(
            "peft",
            f"PeftModel.from_pretrained raises a TypeError for a model with experts: peft {software['peft']} with transformers "
            f"{software['transformers']}.",
            "It passes conversions an argument that transformers 5.6 and later don't accept. shardwise can open adapters that don't need a conversion.",
            "pip install 'peft>=0.20'",
        )
    if (
        "torchao" in software
        and is_version(facts, "torchao", ">=0.18")
        and is_version(facts, "peft", "<0.19")
    ):
        yield Bite(
            "peft",
            f"No LoRA can be created or opened: peft {software['peft']} with torchao {software['torchao']}.",
            "It imports a name that torchao 0.18 no longer has.",
            "pip install 'peft>=0.20', or remove torchao",
        )


def _vision(facts: Facts) -> Iterator[Bite]:
    for name, offset in (("torchvision", 15), ("torchaudio", None)):
        torch, other = _release(facts, "torch"), _release(facts, name)
        if torch is None or other is None or torch[0] != 2:
            continue
        wanted = (0, torch[1] + offset) if offset is not None else torch
        # torchaudio ended its pairing with torch at 2.9
        if other != wanted and (offset is not None or torch < (2, 9)):
            yield Bite(
                name,
                f"import {name} fails, and so do parts of transformers: {name} {facts.software[name]} "
                f"with torch {facts.software['torch']}.",
                "It registers its operators with the torch version that it was built for ('operator torchvision::nms does not exist').",
                f"pip install '{name}=={wanted[0]}.{wanted[1]}.*', or remove it.",
            )


def _release(facts: Facts, name: str) -> tuple[int, int] | None:
    try:
        found = Version(facts.software[name])
    except (KeyError, InvalidVersion):
        return None
    return found.major, found.minor


LAUNCH = (
    Rule(
        "launch.incomplete",
        "RANK or WORLD_SIZE without the other variables that env:// needs",
        "torch.distributed, environment variable initialization",
        _incomplete,
    ),
    Rule(
        "launch.numbers",
        "a rank outside the world size, or more local ranks than ranks in total",
        "torch.distributed",
        _numbers,
    ),
    Rule("launch.port", "an invalid MASTER_PORT", "torch.distributed", _port),
    Rule(
        "launch.master-loopback",
        "several hosts, and MASTER_ADDR is a loopback address",
        "torch.distributed",
        _master,
    ),
    Rule(
        "launch.torchrun-per-task",
        "torchrun in a job with several tasks per node",
        "prismatic-vlms#39, pytorch#73656",
        _many_torchruns,
    ),
    Rule(
        "launch.slurm-world",
        "a WORLD_SIZE or RANK that conflicts with SLURM",
        "pytorch-lightning#4389",
        _slurm_size,
    ),
    Rule("launch.mpi-world", "a WORLD_SIZE that conflicts with Open MPI", "mpirun(1)", _mpi_size),
    Rule(
        "launch.devices",
        "fewer visible GPUs than local ranks, or a GPU listed twice",
        "CUDA C++ programming guide, environment variables",
        _devices,
    ),
    Rule(
        "launch.ram-efficient-off",
        "FSDP_CPU_RAM_EFFICIENT_LOADING without ACCELERATE_USE_FSDP",
        "ms-swift#9980",
        _ram_efficient_off,
    ),
    Rule("launch.fsdp1", "ACCELERATE_USE_FSDP without FSDP_VERSION=2", "docs/howto/accelerate.md", _fsdp1),
    Rule("launch.no-watchdog", "TORCH_NCCL_ASYNC_ERROR_HANDLING=0", "pytorch#155916", _no_watchdog),
)
SOFTWARE = (
    Rule("software.requires", "a package that's too old for shardwise", "pyproject.toml", _needs),
    Rule(
        "software.gates",
        "a package that's too old for some features",
        "src/shardwise/gates.py",
        _gates,
        kind="note",
    ),
    Rule(
        "software.peft",
        "peft 0.19 with transformers ≥ 5.6, or an older peft with torchao ≥ 0.18",
        "peft, torchao",
        _peft,
    ),
    Rule(
        "software.torchvision",
        "torchvision or torchaudio built for a different torch version",
        "pytorch#157648",
        _vision,
    ),
)


# ----------------------------------------------------------------------------------------------------
# Rules over given models.

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: Architectures whose conversion chunks, splits, concatenates, transposes or permutes dim 0: docs/supported-models.md.
CUT_ON_DIM_0 = frozenset(
    [
        "bailing_hybrid",
        "ernie4_5_vl_moe",
        "glm5_next",
        "glm5_next_text",
        "gradium_phonon_tts",
        "gte",
        "hrm_text",
        "jina_embeddings_v3",
        "kimi_k25",
        "kimi_linear",
        "minimax_m3_vl",
        "molmo2",
        "molmo2_text",
        "nemo_speechlm",
        "nemotron_h_omni",
        "nomic_bert",
        "olmo_hybrid",
        "qianfan_ocr",
        "radio",
        "rf_detr",
        "step3p7",
        "tipsv2",
        "tipsv2_dpt",
        "tipsv2_text_model",
        "tipsv2_vision_model",
        "unlimited_ocr",
    ]
)


def some(names: tuple[str, ...] | list[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _models(facts: Facts) -> Iterator[Model]:
    return iter(facts.models)


def _damaged(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        for name, how in model.damaged.items():
            yield Bite(
                f"{model.path}/{name}",
                f"The model can't be loaded: {name} is corrupted or truncated ({how}).",
                "Its header doesn't match its size: a download was cut short, or the file was replaced by a different one.",
                "Delete the file, and download it again.",
            )


def _experts(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        count = next((found for n in _EXPERTS if (found := number(model.text_config.get(n)))), None)
        if count is not None and 1 < count < facts.ranks:
            yield Bite(
                model.path,
                f"Other loaders crash or hang on empty shards: {count} experts across {facts.ranks} ranks.",
                "FSDP2 splits stacked experts along dim 0, and some ranks get none.",
                "Load and save with shardwise, which supports empty shards, or use expert or tensor parallelism.",
            )


def _quant_storage(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        quantized = model.config.get("quantization_config")
        if not isinstance(quantized, Mapping) or not quantized.get("load_in_4bit") or facts.ranks < 2:
            continue
        if str(quantized.get("bnb_4bit_quant_storage", "uint8")) in ("uint8", "torch.uint8"):
            yield Bite(
                model.path,
                "QLoRA under FSDP crashes or doesn't train (loss 0.0): the 4-bit codes are stored as uint8.",
                "FSDP2 only creates parameters with floating-point dtypes, and drops the quantization state of all others.",
                "Load with sw.load_pretrained(quantized='keep'), which shards the codes (docs/howto/qlora.md), or set "
                "bnb_4bit_quant_storage to bfloat16.",
            )


def _unified(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    if memory is None or not memory.is_unified:
        return
    for model in facts.models:
        if model.nbytes <= memory.free_bytes < 2 * model.nbytes:
            yield Bite(
                model.path,
                f"Loading will freeze the machine: host and device share {gib(memory.free_bytes)}, and the model takes "
                f"{gib(model.nbytes)}.",
                "A copy on the host and the files' pages stay in memory in addition to the copy on the device.",
                "Load with sw.load_pretrained, which frees the pages as it reads (docs/cases/4-unified-memory.md).",
            )


def _too_large(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    if memory is None or (facts.machine.gpus and not memory.is_unified):
        return
    for model in facts.models:
        if model.nbytes > memory.limit_bytes:
            yield Bite(
                model.path,
                f"The model doesn't fit on this host: {gib(model.nbytes)} of weights, {gib(memory.limit_bytes)} of memory.",
                f"The limit is {memory.limit_from}; all ranks on the host share it, no matter how the model is sharded.",
                "Use more hosts, or a quantized model; shardwise plan PATH --ranks N shows how much each rank needs.",
            )


MODELS = (
    each(
        _models,
        ("model.missing-file", "the index lists a file that doesn't exist", "case 20"),
        when=lambda m: m.lost,
        bites=lambda m: (
            f"The model can't be loaded: {some(m.lost)} {'is' if len(m.lost) == 1 else 'are'} missing."
        ),
        why="The index maps tensors to files that the directory lacks: a download or a copy was interrupted.",
        do="Download the directory again (hf download picks up where it left off), or copy it with shardwise copy.",
    ),
    Rule("model.damaged-file", "a header that doesn't match its file", "case 20; vllm#53537", _damaged),
    each(
        _models,
        ("model.outside", "the index points outside the directory", "case 20"),
        when=lambda m: m.outside,
        bites=lambda m: f"Don't load this model: its index points outside the directory ({some(m.outside)}).",
        why="A program that trusts the index would open any file that the user can read. Only a corrupted or malicious index does this.",
        do="Delete the directory, and download it from a source that you trust.",
    ),
    each(
        _models,
        ("model.lfs-pointer", "a Git LFS pointer instead of weights", "git-lfs-pointer(5)"),
        when=lambda m: m.pointers,
        bites=lambda m: (
            f"The model can't be loaded: {some(m.pointers)} {'contains' if len(m.pointers) == 1 else 'contain'} no weights."
        ),
        why="It's a Git LFS pointer: the repository was cloned without git-lfs.",
        do="Run git lfs pull in it, or fetch it with hf download.",
    ),
    each(
        _models,
        ("model.pickle", "weights only as pickles", "case 20"),
        kind="note",
        when=lambda m: m.pickles,
        bites=lambda m: f"torch.load can run any code that the author put into {some(m.pickles)}.",
        why="The weights are pickles, and there is no safetensors file next to them.",
        do="Load with shardwise, which doesn't execute pickles, or convert once: shardwise export PATH OUT.",
    ),
    each(
        _models,
        ("model.index", "the index and the files don't match", "case 12"),
        when=lambda m: m.problem,
        bites=lambda m: f"The model can't be loaded: {(m.problem or '').partition(chr(10))[0]}.",
        why="The index and the files don't belong together.",
        do="Run shardwise inspect PATH to see what's there, and download the directory again.",
    ),
    each(
        _models,
        (
            "model.two-formats",
            "a model that is partly safetensors, partly pickled",
            "from_pretrained in transformers 5.23",
        ),
        when=lambda m: m.only_pickled,
        bites=lambda m: (
            f"A load will miss {len(m.only_pickled)} tensors, which are only in pickles: {some(m.only_pickled)}."
        ),
        why="from_pretrained reads only one format: safetensors, if there are any. The pickles contain other tensors.",
        do="Download the directory again, or convert all tensors to one format.",
    ),
    each(
        _models,
        ("model.missing-base", "an adapter whose base model doesn't exist", "PeftModel in peft 0.21"),
        when=lambda m: m.base,
        bites=lambda m: (
            f"The adapter can't be loaded from its config: its base model {m.base} doesn't exist."
        ),
        why="adapter_config.json names it as base_model_name_or_path: the base was moved, or the adapter was trained on another machine.",
        do="Load the base from where it is now, and pass the adapter to sw.load_pretrained(BASE, adapter=PATH).",
    ),
    each(
        _models,
        (
            "model.internal-names",
            "tensor names with a wrapper's prefix (_orig_mod, base_model.model, …)",
            "case 16; case 10",
        ),
        when=lambda m: m.wrapped,
        bites=lambda m: (
            f"from_pretrained leaves the weights random: it doesn't look for names like {some(m.wrapped)}."
        ),
        why="The model was saved through a wrapper (torch.compile, DDP, FSDP, PEFT), whose names ended up in the files.",
        do="Export it from the checkpoint with shardwise export PATH OUT, which writes the original Hugging Face names.",
    ),
    each(
        _models,
        ("model.adapter-slice", "LoRA matrices whose rank differs from adapter_config.json", "case 10"),
        when=lambda m: m.slices,
        bites=lambda m: f"The adapter can't be loaded, or is incomplete: {some(m.slices)}.",
        why="One rank saved its own slice of each sharded matrix.",
        do="Save it again from all ranks: sw.export_hf writes PEFT's files (docs/howto/peft.md).",
    ),
    each(
        _models,
        (
            "model.conversion",
            "an architecture whose conversion splits dim 0",
            "case 6; docs/supported-models.md",
        ),
        kind="note",
        applies={"transformers": ">=5.0"},
        when=lambda m: str(m.config.get("model_type")) in CUT_ON_DIM_0,
        bites=lambda m: (
            f"transformers' own sharded load (tp_plan, DistributedConfig) can give wrong weights without an error: "
            f"{m.config['model_type']}."
        ),
        why="It slices stored tensors first and then splits or joins them on the sharded dim.",
        do="Load with sw.load_pretrained, which converts before it shards; every architecture is compared bit for bit.",
    ),
    Rule("model.few-experts", "fewer experts than ranks", "case 7", _experts),
    Rule(
        "model.quant-storage", "4-bit bitsandbytes weights stored as uint8", "accelerate#3983", _quant_storage
    ),
    Rule(
        "model.unified-memory",
        "twice the model's size exceeds the memory that host and device share",
        "case 4; Automodel#3532",
        _unified,
    ),
    Rule(
        "model.too-large", "no device, and a model larger than the host's memory limit", "case 3", _too_large
    ),
)
