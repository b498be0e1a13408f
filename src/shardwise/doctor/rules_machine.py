"""Rules over the machine: memory, limits, cores, names, clock."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Facts
from .rule import Bite, Rule, gib, number

__all__ = ["MACHINE", "nodes_of"]

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
            f"{gib(memory.free_bytes)} of {gib(memory.limit_bytes)} are free.",
            "Each process takes 0.5 to 1 GiB for torch and transformers, and the limit is that of the cgroup or the machine.",
            "Raise the limit of the container or job, end other processes, or start fewer ranks on this host.",
        )


def _shm(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    if memory is not None and memory.shm_bytes is not None and memory.shm_bytes < _SHM_BYTES:
        yield Bite(
            "/dev/shm",
            f"Data loaders with workers will end in a bus error: /dev/shm has {gib(memory.shm_bytes)}.",
            "Workers hand batches over in shared memory, and NCCL uses it between GPUs; containers get 64 MiB by default.",
            "Start the container with --ipc=host or --shm-size=16g, or mount an emptyDir with medium Memory there.",
        )


def _open_files(facts: Facts) -> Iterator[Bite]:
    limit = facts.machine.limits.open_files
    if limit is not None and limit < _OPEN_FILES:
        yield Bite(
            "RLIMIT_NOFILE",
            f"A rank will run out of open files: its limit is {limit}.",
            "Each file of weights, socket and shared tensor takes one.",
            "Raise it before the start: ulimit -n 65536 (or LimitNOFILE= of the service).",
        )


def _file_size(facts: Facts) -> Iterator[Bite]:
    limit = facts.machine.limits.file_bytes
    if limit is not None and limit < _FILE_BYTES:
        yield Bite(
            "RLIMIT_FSIZE",
            f"A save or an export fails as soon as one file has more than {gib(limit)}.",
            "The process may not write larger files, no matter how much space the disk has.",
            "Raise it before the start: ulimit -f unlimited.",
        )


def _locked(facts: Facts) -> Iterator[Bite]:
    limit = facts.machine.limits.locked_bytes
    if limit is not None and limit < _LOCKED_BYTES and facts.machine.has_rdma and nodes_of(facts) > 1:
        yield Bite(
            "RLIMIT_MEMLOCK",
            f"NCCL can't register its buffers with the InfiniBand or RoCE adapter: {gib(limit)} may be locked.",
            "RDMA needs pinned pages, and these count against the limit of locked memory.",
            "Start with ulimit -l unlimited (docker run --ulimit memlock=-1).",
        )


def _threads(facts: Facts) -> Iterator[Bite]:
    cores, told = facts.machine.cores, facts.environment.get("OMP_NUM_THREADS")
    threads = number((told or "").partition(",")[0])
    if threads is not None and threads > 1 and facts.ranks > 1 and facts.ranks * threads > 2 * cores.usable:
        yield Bite(
            "OMP_NUM_THREADS",
            f"{facts.ranks} ranks × {threads} threads share {cores.usable:g} cores and slow each other down.",
            "torch starts so many threads in every rank for each operator on the CPU.",
            f"Set OMP_NUM_THREADS={max(1, int(cores.usable) // facts.ranks)}.",
        )
    elif told is None and facts.ranks > 1 and "SLURM_PROCID" in facts.environment:
        yield Bite(
            "OMP_NUM_THREADS",
            f"Each of {facts.ranks} ranks will start a thread for every one of {cores.usable:g} cores.",
            "srun sets no OMP_NUM_THREADS; torchrun sets it to 1, and torch alone takes all cores.",
            f"Set OMP_NUM_THREADS={max(1, int(cores.usable) // facts.ranks)}.",
        )


def _cores(facts: Facts) -> Iterator[Bite]:
    cores = facts.machine.cores
    if facts.ranks > max(1.0, 2 * cores.usable):
        what = (
            f"the quota in {cores.quota_from}"
            if cores.quota_from
            else "the process's affinity or the machine"
        )
        yield Bite(
            cores.quota_from or "cores",
            f"{facts.ranks} ranks share {cores.usable:g} cores: each load, save and step waits for the CPU.",
            f"This is what {what} allows; the machine has {cores.machine}.",
            "Give the container or job at least a core for each rank (cpus, --cpus-per-task), or start fewer ranks.",
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
            "gloo then takes the loopback address, with a warning that is easily missed.",
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
                f"Set {name} to one of them, on each host separately.",
            )


def _gloo_pattern(facts: Facts) -> Iterator[Bite]:
    given = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    if given.startswith(("^", "=")):
        yield Bite(
            "GLOO_SOCKET_IFNAME",
            f"gloo won't start: it looks for an interface called {given!r}.",
            "Patterns with ^ and = are NCCL's; gloo takes plain names.",
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
            "The host's name resolves to the slower interface; recovery from a peer took 800 s instead of 20 s that way.",
            f"Set GLOO_SOCKET_IFNAME={fast[0]} and NCCL_SOCKET_IFNAME={fast[0]}, or make the name resolve to its address.",
        )


def _clock(facts: Facts) -> Iterator[Bite]:
    if facts.machine.clock_s < _EARLIEST_S:
        yield Bite(
            "clock",
            "Requests to the hub and to object stores will be refused: this machine's clock is before 2024.",
            "Certificates aren't valid yet at that time, and request signatures have expired.",
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
            f"Training runs on the CPU, or not at all: torch sees none of {facts.machine.gpu_files} GPUs.",
            f"torch {facts.software.get('torch', '')} is built without CUDA, or needs a newer driver.",
            "See python -c 'import torch; torch.cuda.init()', and install the torch that matches the driver.",
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
        "torch.distributed.run, which sets it to 1",
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
