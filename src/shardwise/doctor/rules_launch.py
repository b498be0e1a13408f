"""Rules over the launch (the variables that torchrun, Accelerate, SLURM and MPI set) and over installed versions."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from ..gates import GATES
from .facts import Facts
from .rule import Bite, Rule, is_on, is_version, number
from .rules_machine import nodes_of

__all__ = ["LAUNCH", "SOFTWARE"]

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
            f"and {', '.join(lost)} {'is' if len(lost) == 1 else 'are'} not.",
            "env:// needs all four; one left over from another launch is enough for libraries to treat this process as a rank.",
            f"Start with torchrun, or unset {', '.join(given)}.",
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
                f"The ranks wait for one that can't come: {inner}={told[inner]} and {outer}={told[outer]}.",
                "Ranks count from 0, and a host has at most all of them; two launchers have set them.",
                "Use one launcher, in a shell where neither is set.",
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
            f"Ranks of every host but the first wait until the timeout: MASTER_ADDR={address}.",
            "On each host that address is the host itself.",
            "Set it to the name of the first host that the other hosts can resolve.",
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
            "torchrun starts the ranks of a host itself; NCCL then ends with 'Duplicate GPU detected', or the group waits.",
            "Ask for --ntasks-per-node=1 with torchrun, or let srun start the ranks without it.",
        )


def _slurm_size(facts: Facts) -> Iterator[Bite]:
    told = facts.environment
    tasks, world = number(told.get("SLURM_NTASKS")), number(told.get("WORLD_SIZE"))
    elastic = any(n.startswith("TORCHELASTIC_") for n in told)
    if tasks and world and not elastic and "SLURM_PROCID" in told and tasks not in (1, world):
        yield Bite(
            "WORLD_SIZE, SLURM_NTASKS",
            f"The group waits for ranks that do not exist, or leaves some out: WORLD_SIZE={world}, and srun started {tasks}.",
            "The script sets WORLD_SIZE by hand, and the job was changed.",
            "Set WORLD_SIZE=$SLURM_NTASKS and RANK=$SLURM_PROCID in the line that srun runs.",
        )
    task, rank = number(told.get("SLURM_PROCID")), number(told.get("RANK"))
    if not elastic and tasks == world and tasks and task is not None and rank is not None and task != rank:
        yield Bite(
            "RANK, SLURM_PROCID",
            f"Two ranks have one number: RANK={rank} in task {task}.",
            "RANK was set before srun, which hands the same value to every task.",
            "Set RANK=$SLURM_PROCID inside of srun: srun bash -c 'RANK=$SLURM_PROCID …'.",
        )


def _mpi_size(facts: Facts) -> Iterator[Bite]:
    told = facts.environment
    size, world = number(told.get("OMPI_COMM_WORLD_SIZE")), number(told.get("WORLD_SIZE"))
    if size and world and size != world and not any(n.startswith("TORCHELASTIC_") for n in told):
        yield Bite(
            "WORLD_SIZE, OMPI_COMM_WORLD_SIZE",
            f"The group waits, or leaves ranks out: WORLD_SIZE={world}, and mpirun started {size}.",
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
            f"torch sees no GPU, or fewer: {given} names one twice.",
            "CUDA stops at a device that is listed twice.",
            "List each device once.",
        )
    elif local and local > len(devices):
        yield Bite(
            "CUDA_VISIBLE_DEVICES, LOCAL_WORLD_SIZE",
            f"Rank {len(devices)} of this host finds no GPU: {len(devices)} are visible for {local} ranks.",
            "Each rank takes the device of its LOCAL_RANK.",
            f"Start {len(devices)} ranks here (--nproc-per-node), or make more devices visible.",
        )


def _ram_efficient_off(facts: Facts) -> Iterator[Bite]:
    told = facts.environment
    if is_on(told.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "")) and not is_on(
        told.get("ACCELERATE_USE_FSDP", "")
    ):
        yield Bite(
            "FSDP_CPU_RAM_EFFICIENT_LOADING",
            "Every rank loads the whole model into host memory, although this variable asks for the opposite.",
            "transformers and Accelerate respect it only with ACCELERATE_USE_FSDP=true, which accelerate launch sets.",
            "Start with accelerate launch, set ACCELERATE_USE_FSDP=true, or load with sw.load_pretrained.",
        )


def _fsdp1(facts: Facts) -> Iterator[Bite]:
    told = facts.environment
    if is_on(told.get("ACCELERATE_USE_FSDP", "")) and told.get("FSDP_VERSION", "1") != "2":
        yield Bite(
            "FSDP_VERSION",
            "shardwise rejects the model: this launch asks for FSDP1, whose flat parameters nothing here can fill or save.",
            "Accelerate takes version 1 unless FSDP_VERSION says 2.",
            "Set fsdp_version: 2 in the YAML, or FSDP_VERSION=2.",
        )


def _no_watchdog(facts: Facts) -> Iterator[Bite]:
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if facts.environment.get(name) == "0":
            yield Bite(
                name,
                "If a rank dies, the other ranks wait forever in their collective.",
                "With 0 the watchdog of NCCL does not end a process whose collective timed out.",
                f"Unset {name}: torch then tears down, and the launcher sees it.",
            )


def _needs(facts: Facts) -> Iterator[Bite]:
    for text in facts.requirements:
        required = Requirement(text)
        if required.marker is None and not is_version(facts, required.name, str(required.specifier)):
            yield Bite(
                required.name,
                f"shardwise fails somewhere later: {required.name} is {facts.software[required.name]}.",
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
            "It passes conversions an argument that transformers hasn't accepted since 5.6; shardwise opens adapters that need none.",
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
                f"import {name} fails, and with it parts of transformers: {name} {facts.software[name]} "
                f"with torch {facts.software['torch']}.",
                "It registers operators with the torch that it was built against ('operator torchvision::nms does not exist').",
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
        "a rank outside its world size, or more local ranks than ranks",
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
        "WORLD_SIZE or RANK that contradicts SLURM",
        "pytorch-lightning#4389",
        _slurm_size,
    ),
    Rule("launch.mpi-world", "WORLD_SIZE that contradicts Open MPI", "mpirun(1)", _mpi_size),
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
    Rule("software.requires", "a package that is too old for shardwise", "pyproject.toml", _needs),
    Rule(
        "software.gates",
        "a package that is too old for some feature",
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
