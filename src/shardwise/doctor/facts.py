"""What was seen, as plain records: the machine, storage, software, the launch, and given files."""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import field
from glob import escape, glob
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.specifiers import SpecifierSet  # transformers and huggingface_hub require it
from packaging.version import InvalidVersion, Version

from ..engine.files import shares_memory
from ..objects import frozen
from ..operations.host_budget import cgroups_with, host_budget, text_of


@frozen(kw_only=True)
class Memory:
    """The host's memory, as this process may use it."""

    limit_bytes: int
    """The lowest of the limits of the process's cgroups and the machine's memory."""
    limit_from: str
    """The file that says so."""
    free_bytes: int
    is_unified: bool
    """Whether the device uses the host's memory."""
    shm_bytes: int | None
    """Size of ``/dev/shm``; None if there is none."""


@frozen(kw_only=True)
class Limits:
    """Soft limits of this process; None is unlimited."""

    open_files: int | None
    locked_bytes: int | None
    file_bytes: int | None


@frozen(kw_only=True)
class Cores:
    """The cores that this process may use."""

    usable: float
    """By affinity and by the quota of its cgroups."""
    machine: int
    quota_from: str | None = None
    """The file of the quota, if that is what binds."""


@frozen(kw_only=True)
class Network:
    """The host's name, and where it leads."""

    host: str
    addresses: tuple[str, ...]
    """Of the host's name; empty if it can't be resolved."""
    interface: str | None
    """The interface of this host that has the first of them."""
    interfaces: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether the host's name leads to this host alone."""
        return bool(self.addresses) and all(a.startswith("127.") or a == "::1" for a in self.addresses)


@frozen(kw_only=True)
class Machine:
    """This machine, seen by this process."""

    memory: Memory | None
    """None if the system does not report it."""
    limits: Limits
    cores: Cores
    network: Network
    clock_s: float
    """Seconds since 1970."""
    gpu_files: int
    """NVIDIA devices in ``/dev``."""
    gpus: int
    """Devices that torch can use."""
    has_rdma: bool
    """Whether there is an InfiniBand or RoCE adapter."""


@frozen(kw_only=True)
class Mount:
    """The file system that holds a path."""

    kind: str
    """As the kernel calls it: ``ext4``, ``nfs4``, ``fuse.gcsfuse``, …"""
    point: str
    source: str
    options: tuple[str, ...]


@frozen(kw_only=True)
class Speeds:
    """What the probe measured. Small, short, of one process: a floor, not a benchmark."""

    write_bytes_s: float
    """Sequential, up to and with fsync."""
    read_bytes_s: float
    """Sequential, past the page cache where the system lets go of it."""
    random_bytes_s: float
    """8 MiB at random places."""
    fsync_s: float
    """Of 4 KiB."""


@frozen(kw_only=True)
class Place:
    """A directory in which files are to be written."""

    path: str
    mount: Mount | None
    free_bytes: int | None
    """None where the file system does not say (ramfs)."""
    free_inodes: int | None
    """None where the file system has no fixed number."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """What did not work, and the system's words: ``write``, ``fsync``, ``rename``, ``lock``, ``exclude``, ``direct``."""
    speeds: Speeds | None = None
    clock_ahead_s: float = 0.0
    """The file system's clock minus this machine's."""


@frozen(kw_only=True)
class Bucket:
    """A prefix in an object store, after a few small objects were written and deleted below it."""

    url: str
    failures: Mapping[str, str] = field(default_factory=dict)
    """What did not work, and the store's words: ``list``, ``write``, ``create``, ``replace``, ``delete``."""
    clock_ahead_s: float = 0.0
    """The store's clock minus this machine's."""


@frozen(kw_only=True)
class Settings:
    """A configuration that was given: Accelerate's YAML, or TrainingArguments as JSON."""

    path: str
    values: Mapping[str, Any]

    @property
    def fsdp(self) -> Mapping[str, Any]:
        """``fsdp_config``, without the prefix ``fsdp_`` of Accelerate's names; empty if FSDP is not used."""
        found = self.values.get("fsdp_config")
        found = found if isinstance(found, Mapping) else {}
        return {str(name).removeprefix("fsdp_"): value for name, value in found.items()}


@frozen(kw_only=True)
class Model:
    """A directory of weights, from names, sizes and headers."""

    path: str
    config: Mapping[str, Any]
    nbytes: int
    """Of all files of weights."""
    lost: tuple[str, ...] = ()
    """Files that the index names and the directory lacks."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Files whose header or size is wrong, and how."""
    outside: tuple[str, ...] = ()
    """Names in the index that lead out of the directory."""
    pointers: tuple[str, ...] = ()
    """Files that are pointers of Git LFS."""
    pickles: tuple[str, ...] = ()
    """Pickled weights that stand for weights which no safetensors file holds."""
    problem: str | None = None
    """Why its index can't be read."""
    wrapped: tuple[str, ...] = ()
    """Tensors under names that a wrapper gave them."""
    slices: tuple[str, ...] = ()
    """Matrices of an adapter that have not the rank of its config, and both."""
    only_pickled: tuple[str, ...] = ()
    """Tensors in pickles that are stored next to safetensors files with other tensors."""
    base: str | None = None
    """The base of an adapter, where it is not there."""
    classes: tuple[str, ...] = ()
    """Classes in transformers' code of the architecture; empty for any other code."""

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The config, with the text model's part where it has one of its own."""
        found = self.config.get("text_config")
        return {**found, **self.config} if isinstance(found, Mapping) else self.config


@frozen(kw_only=True)
class Checkpoint:
    """A checkpoint, or a directory of checkpoints."""

    path: str
    kind: str
    """``steps`` or ``step`` of shardwise; ``dcp``, ``per-rank`` or ``full`` of other programs."""
    steps: tuple[int, ...] = ()
    set_aside: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Steps or files that are damaged, and how."""
    per_rank: tuple[str, ...] = ()
    """Files that hold parts of single ranks."""
    pickles: tuple[str, ...] = ()
    nbytes: int = 0
    """Of all files; of other programs' checkpoints."""
    lacks_metadata: bool = False
    """Parts of DCP without the file that says what they hold."""
    lost: tuple[str, ...] = ()
    """What a resume of the HF Trainer or Accelerate looks for and doesn't find: ``optimizer``, ``scheduler``, ``RNG states``."""
    lost_files: tuple[str, ...] = ()
    """Other files that all checkpoints next to it have."""
    is_model_only: bool = False
    """Whether its TrainingArguments say ``save_only_model``."""


@frozen(kw_only=True)
class Foreign:
    """What another program wrote, of a kind that can't be read."""

    path: str
    name: str
    """What it is, with its article."""
    instead: str
    """The line to write."""


@frozen(kw_only=True)
class Log:
    """A log, by the lines that are known."""

    path: str
    lines: Mapping[str, str]
    """The first line of each kind, by the name of its pattern."""
    first_loss: float | None = None
    """Of training, as the first line that has one says."""
    losses: int = 0
    """Losses of training that it has."""
    jump: tuple[str, float, float] | None = None
    """The first resume after which the loss is higher than before: where it is or its checkpoint, the loss before and after."""
    rate_jump: tuple[str, float, float] | None = None
    """As ``jump``, of the learning rate: the first resume after which it goes back."""
    resumed: bool = False
    """Whether it shows that a run was resumed."""
    jump_is_certain: bool = True
    """Whether a run resumed there for certain: a log says so; of the Trainer's list of losses only the checkpoints are known."""
    not_a_number: str | None = None
    """The first line whose loss is NaN or infinite."""
    rise: tuple[float, float] | None = None
    """The lowest loss, over a tenth of the log, and the loss of its last tenth, where that is much higher."""


@frozen(kw_only=True)
class Seen:
    """What one rank tells the other ranks."""

    rank: int
    host: str
    versions: Mapping[str, str]
    limits: Mapping[str, float]
    """Numbers that should be alike on all ranks."""
    clock_s: float
    """When all ranks looked at their clocks."""
    files: Mapping[str, int] | None = None
    """Bytes of each file of the given paths; None on all ranks of a host but its first, which see the same."""
    unseen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By directory: ranks whose file this rank did not see there."""
    findings: tuple[Mapping[str, str], ...] = ()
    """What the rules found on this rank, as JSON values; of the first rank of each host."""


@frozen(kw_only=True)
class Meeting:
    """All ranks that could be reached."""

    world_size: int
    ranks: tuple[Seen, ...]
    missing: tuple[int, ...]
    """Ranks that did not come in time."""
    waited_s: float
    problem: str | None = None
    """Why rank 0 could not let the other ranks in."""


@frozen(kw_only=True)
class Facts:
    """All that was seen."""

    ranks: int
    """Ranks that are to run on this host."""
    machine: Machine
    software: Mapping[str, str]
    """Installed versions, by the name of the package, and ``python``."""
    environment: Mapping[str, str]
    """The variables by which launchers and libraries are told what to do."""
    requirements: tuple[str, ...] = ()
    """What shardwise requires, as its metadata say."""
    places: tuple[Place, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    accelerate: tuple[Settings, ...] = ()
    arguments: tuple[Settings, ...] = ()
    models: tuple[Model, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    logs: tuple[Log, ...] = ()
    meeting: Meeting | None = None
    foreign: tuple[Foreign, ...] = ()
    unknown: tuple[str, ...] = ()
    """Paths that are none of these."""
    absent: tuple[str, ...] = ()
    """Paths that do not exist."""
    taken_for: Mapping[str, str] = field(default_factory=dict)
    """What each path was taken for, in words."""
    silent: Mapping[str, float] = field(default_factory=dict)
    """Paths whose storage did not answer, and the seconds that it had."""


# ----------------------------------------------------------------------------------------------------
# Looks at this machine as this process sees it. Changes nothing.


def look_at_machine(root: Path = Path("/")) -> Machine:
    """The machine's limits and names. Rank-local; starts no CUDA context. ``root``: holds ``proc``, ``sys`` and ``dev``."""
    return Machine(
        memory=_memory(root),
        limits=Limits(
            open_files=_soft(resource.RLIMIT_NOFILE),
            locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
            file_bytes=_soft(resource.RLIMIT_FSIZE),
        ),
        cores=_cores(root),
        network=_network(),
        clock_s=time.time(),
        gpu_files=sum(p.name[6:].isdecimal() for p in (root / "dev").glob("nvidia*")),
        gpus=torch.accelerator.device_count() if _device() is not None else 0,
        has_rdma=any((root / "sys/class/infiniband").glob("*")),
    )


def _memory(root: Path) -> Memory | None:
    budget = host_budget(root)
    if budget is None:
        return None
    try:
        shm = os.statvfs(root / "dev/shm")
        shm_bytes: int | None = shm.f_blocks * shm.f_frsize
    except OSError:
        shm_bytes = None
    device = _device()
    return Memory(
        limit_bytes=budget.limit_bytes,
        limit_from=budget.limit_from,
        free_bytes=budget.free_bytes,
        is_unified=device is not None and shares_memory(device),
        shm_bytes=shm_bytes,
    )


def _device() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


def _soft(limit: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft


def _cores(root: Path) -> Cores:
    machine = os.cpu_count() or 1
    usable: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    quota_from = None
    for file, quota in _quotas(root):
        if quota < usable:
            usable, quota_from = quota, f"/{file.relative_to(root)}"
    return Cores(usable=usable, machine=machine, quota_from=quota_from)


def _quotas(root: Path) -> Iterator[tuple[Path, float]]:
    """Cores that the process's cgroups allow, each with its file. Source: cgroup-v2.rst, scheduler/sched-bwc.rst of Linux."""
    for version, level in cgroups_with("cpu", root):
        if version == 2:
            file = level / "cpu.max"
            quota, _, period = text_of(file).strip().partition(" ")
        else:
            file = level / "cpu.cfs_quota_us"
            quota, period = text_of(file).strip(), text_of(level / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield file, int(quota) / int(period)


def _network() -> Network:
    host = socket.gethostname()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = tuple(dict.fromkeys(str(one[4][0]) for one in found))
    except OSError:
        addresses = ()
    try:
        interfaces = tuple(name for _, name in socket.if_nameindex())
    except OSError:
        interfaces = ()
    owner = next((n for n in interfaces if addresses and _address_of(n) == addresses[0]), None)
    return Network(host=host, addresses=addresses, interface=owner, interfaces=interfaces)


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface, as ``netdevice(7)`` gives it; None if it has none, or not on Linux."""
    import fcntl
    import struct

    get_address = 0x8915  # SIOCGIFADDR
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            reply = fcntl.ioctl(one.fileno(), get_address, struct.pack("256s", interface.encode()[:15]))
    except OSError:  # it has none, or this process may open no more files
        return None
    return socket.inet_ntoa(reply[20:24])


# ----------------------------------------------------------------------------------------------------
# Which file system holds a path. Source: proc_pid_mountinfo(5).

_ESCAPED = re.compile(r"\\(\d{3})")


def mount_of(path: str, table: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """The mount of an absolute path; None where the system has no such table."""
    real = os.path.realpath(path)
    found = None
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:  # of two at one point the later one lies on top
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = _unescaped(fields[4])
        inside = point == "/" or real == point or real.startswith(f"{point}/")
        if inside and (found is None or len(point) >= len(found.point)):
            options = tuple(dict.fromkeys((*fields[5].split(","), *rest[2].split(","))))
            found = Mount(kind=rest[0], point=point, source=_unescaped(rest[1]), options=options)
    return found


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


# ----------------------------------------------------------------------------------------------------
# What a rule finds, and words and numbers for that.

#: ``bites``: the run will fail, or cost time, memory or data; the exit status is 1. ``note``: worth knowing, no more.
Kind = Literal["problem", "note"]


@frozen(kw_only=True)
class Finding:
    """What a rule says of one place: a sentence each."""

    rule: str
    kind: Kind
    where: str
    bites: str
    why: str
    do: str
    source: str


def is_version(facts: Facts, package: str, wanted: str) -> bool:
    """Whether an installed package is of the versions ``wanted``; True if it is not installed."""
    installed = facts.software.get(package)
    if installed is None:
        return True
    try:
        return SpecifierSet(wanted).contains(Version(installed), prereleases=True)
    except InvalidVersion:
        return True


def number(value: object) -> int | None:
    """A whole number, as a number or as text; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else None


def is_on(value: object) -> bool:
    """Whether a setting or variable says yes, as Accelerate reads it."""
    return str(value).strip().lower() in ("1", "true", "yes", "y", "on", "t")


def gib(nbytes: float) -> str:
    """Bytes for a sentence."""
    return f"{nbytes / 1024**3:.1f} GiB" if nbytes >= 0.1 * 1024**3 else f"{nbytes / 1024**2:.1f} MiB"


def count(number: int, one: str, many: str | None = None) -> str:
    """A number and its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


# ----------------------------------------------------------------------------------------------------
# Installed versions, and the variables by which launchers and libraries are told what to do. Imports no package.

_PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "diffusers",
    "huggingface_hub",
    "numpy",
    "obstore",
    "peft",
    "safetensors",
    "shardwise",
    "torch",
    "torchao",
    "torchaudio",
    "torchvision",
    "transformers",
    "trl",
)
_PREFIXES = ("ACCELERATE_", "FSDP_", "NCCL_", "GLOO_", "TP_", "SLURM_", "TORCH_NCCL_", "TORCHELASTIC_")
_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMP_NUM_THREADS",
    "RANK",
    "WORLD_SIZE",
)


def versions() -> dict[str, str]:
    """The version of each package that matters here and is installed, and Python's."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def requirements() -> tuple[str, ...]:
    """What shardwise itself requires, without its extras; nothing if it runs from a tree that is not installed."""
    try:
        return tuple(text for text in metadata.requires("shardwise") or () if "extra ==" not in text)
    except metadata.PackageNotFoundError:
        return ()


def launch_variables() -> dict[str, str]:
    """The variables of the launch alone: the rest may hold credentials, and ``--json`` prints what was seen."""
    return {n: v for n, v in os.environ.items() if n in _NAMES or n.startswith(_PREFIXES)}


_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def classes_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The classes in transformers' code of a config's architectures: its own, and those of its parts. Imports none.

    Empty where any of them is not transformers' own: code that comes with the model, or a backbone of another library.
    """
    found = set[str]()
    parts = [one for name, one in config.items() if name.endswith("_config") and isinstance(one, Mapping)]
    for part in (config, *(part for part in parts if "model_type" in part)):
        folder = None if "auto_map" in part else _folder_of(part.get("model_type"))
        if folder is None:
            return ()
        for file in glob(os.path.join(escape(folder), "modeling_*.py")):
            with open(file, encoding="utf-8") as code:
                found.update(_CLASS.findall(code.read()))
    return tuple(sorted(found))


def _folder_of(model_type: object) -> str | None:
    """The folder of transformers whose configuration has this ``model_type``."""
    spec = util.find_spec("transformers")
    if not isinstance(model_type, str) or not re.fullmatch(r"\w[\w-]*", model_type) or spec is None:
        return None
    name, says = model_type.replace("-", "_"), f'model_type = "{model_type}"'
    while name:
        folder = os.path.join((spec.submodule_search_locations or [""])[0], "models", name)
        for file in glob(os.path.join(escape(folder), "configuration_*.py")):
            with open(file, encoding="utf-8") as code:
                if says in code.read():
                    return folder
        name = name.rpartition("_")[0]
    return None
