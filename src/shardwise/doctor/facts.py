"""What was seen, as plain records: of the machine, a place for files, the software, the launch, and files that were given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ..objects import frozen

__all__ = [
    "Bucket",
    "Checkpoint",
    "Cores",
    "Facts",
    "Limits",
    "Log",
    "Machine",
    "Meeting",
    "Memory",
    "Model",
    "Mount",
    "Network",
    "Place",
    "Seen",
    "Settings",
    "Speeds",
]


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
    """What a resume of the HF Trainer or Accelerate looks for and doesn't find: ``optimizer``, ``scheduler``, ``random states``."""
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
