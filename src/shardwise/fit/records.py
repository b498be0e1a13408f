"""The records of a plan by phases, and what a load stages and requests. Bytes are those of the rank that holds most, rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from ..dtypes import itemsize
from ..engine.engine import spans_of, spans_of_tensors
from ..engine.objects import LAST_BYTES, requests_for
from ..engine.shared import boxes_of_spans, held_bytes, spans_in_turn, spans_of_box
from ..internals.torch import local_tensor
from ..loading.strategies import Choice, Facts, Planned, bucket_bytes_of, buckets_for, choose, facts_of
from ..objects import frozen
from ..operations.operation import size
from ..planning.match import HostConversion
from ..planning.plan import IOOptions
from ..planning.proof import Buckets, Span
from ..sharding.fsdp import ShardPolicy
from ..storage.records import Requests
from ..tensors.live import LiveModel

Where = Literal["device", "host", "page cache"]


@frozen
class Amount:
    """One part of the memory of a phase, at its peak."""

    what: str
    where: Where
    nbytes: int
    upper_bytes: int
    """The upper end of the error bar."""
    formula: str
    """How the number comes about."""


@frozen
class Phase:
    """One phase of a run: what a rank holds at its peak."""

    name: str
    amounts: tuple[Amount, ...]

    def nbytes(self, where: Where) -> int:
        """Bytes of all amounts at one place."""
        return sum(a.nbytes for a in self.amounts if a.where == where)

    def upper_bytes(self, where: Where) -> int:
        """The same at the upper ends of the error bars."""
        return sum(a.upper_bytes for a in self.amounts if a.where == where)


@frozen(kw_only=True)
class Checkpoint:
    """What one save stores."""

    nbytes: int
    """Payload over all ranks: parameters, buffers, optimizer state; replicas once."""
    files: int
    seconds: float
    """At the bandwidth of :class:`TrainingSpec`."""
    requests: int
    """Writes of parts to an object store: each file's parts, and one that begins and one that ends it."""
    kept: int
    """``keep_last`` of the ``Checkpointer``."""

    @property
    def run_bytes(self) -> int:
        """Storage of all steps of the run at its peak: a new step is written before the oldest is deleted."""
        return (self.kept + 1) * self.nbytes


@frozen
class Flow:
    """Bytes over the network in one step, for one purpose."""

    what: str
    rank_bytes: int
    """What each rank receives from other ranks."""
    node_bytes: int
    """What each node receives from other nodes."""
    formula: str


@frozen
class Files:
    """What a phase reads from the storage of models and checkpoints, or writes to it."""

    phase: str
    verb: Literal["reads", "writes"]
    rank_bytes: int
    """Of the rank with most."""
    node_bytes: int
    """Of all ranks of a node."""
    total_bytes: int
    seconds: float
    """Of all ranks together, at the bandwidth of :class:`TrainingSpec`."""


@frozen(kw_only=True)
class Setup:
    """What was planned: the assumptions that change the numbers most. Dtypes are torch's names."""

    optimizer: str
    parameters: tuple[str, ...]
    """Dtypes of the parameters, the one with most bytes first."""
    trained: tuple[str, ...]
    """Dtypes of the parameters that are trained."""
    compute: str
    """Dtype of forward and backward."""
    reductions: str
    """Dtype in which gradients are reduced."""
    optimizer_states: tuple[str, ...]
    """Empty for an optimizer without states."""
    batch_size: int
    sequence_length: int | None
    """None with :attr:`TrainingSpec.loss`."""
    bytes_per_s: float
    """Bandwidth of the storage of models and checkpoints, for all ranks together. Network traffic is counted, not timed."""


@frozen(kw_only=True)
class RunPlan:
    """What a training run takes on each rank, by phases."""

    setup: Setup
    phases: tuple[Phase, ...]
    nodes: int
    """Hosts of the run."""
    ranks_per_host: int
    is_unified: bool
    """Whether device and host are one pool of memory."""
    largest_gather_bytes: int
    """Buffer of FSDP2's largest all-gather, with its padding, in the forward pass's dtype."""
    largest_reduce_bytes: int
    """Input of FSDP2's largest reduce-scatter, in the dtype of the reduction."""
    network: tuple[Flow, ...]
    """Bytes sent over the network in one step, by purpose."""
    files: tuple[Files, ...]
    """Bytes of files, by phase."""
    checkpoint: Checkpoint
    assumptions: tuple[str, ...]
    """Assumptions behind the numbers, which a plan can't check."""

    def phase(self, name: str) -> Phase:
        """The phase of this name. Raises :class:`KeyError`."""
        return {p.name: p for p in self.phases}[name]

    @property
    def network_bytes_per_step(self) -> int:
        """Bytes that a rank receives from other ranks in one step."""
        return sum(flow.rank_bytes for flow in self.network)

    @property
    def node_bytes_per_step(self) -> int:
        """Bytes that a node receives from other nodes in one step."""
        return sum(flow.node_bytes for flow in self.network)

    @property
    def device_bytes(self) -> int:
        """Device memory of a rank at the upper end of the error bar, in the phase that needs most."""
        return max(self.needed(p)[0] for p in self.phases)

    @property
    def host_bytes(self) -> int:
        """Host memory of all ranks of a host at the upper end of the error bar, in the phase that needs most."""
        return max(self.needed(p)[1] for p in self.phases)

    def needed(self, phase: Phase) -> tuple[int, int]:
        """Upper bounds of a phase: of the device of a rank, and of the host of ``ranks_per_host`` ranks, without page cache.

        One pool of memory counts as the host's; each rank's share of it is then the first number, too.
        """
        device, host = phase.upper_bytes("device"), phase.upper_bytes("host")
        if self.is_unified:
            return device + host, (device + host) * self.ranks_per_host
        return device, host * self.ranks_per_host

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        document = asdict(self)
        for phase, entry in zip(self.phases, document["phases"], strict=True):
            entry["device_upper_bytes"], entry["host_upper_bytes"] = self.needed(phase)
        return document | {
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "run_storage_bytes": self.checkpoint.run_bytes,
            "network_bytes_per_step": self.network_bytes_per_step,
            "node_bytes_per_step": self.node_bytes_per_step,
        }


# ----------------------------------------------------------------------------------------------------
# What the ranks of a load will stage, foreseen without them: it depends on the strategy that they choose together.


@frozen
class _Staged:
    """What one rank stages beside buckets."""

    alone: int
    """If it reads its own ranges."""
    beside_buckets: int
    initialized: int
    """For a module that is initialized, after the reads."""


class StagingTally:
    """Host memory that a load over ``ranks`` ranks stages, rank by rank; rank 0 comes first. Looks at the sizes of the files.

    Ranks that are not added count as rank 0. Network file systems are those that this process sees.
    """

    def __init__(self, *, ranks: int, ranks_per_host: int) -> None:
        self._ranks, self._per_host = ranks, ranks_per_host
        self._first: Planned | None = None
        self._facts: dict[int, Facts] = {}
        self._found: dict[int, _Staged] = {}

    def add(self, rank: int, planned: Planned) -> None:
        """Note a rank's plan: it tells the other ranks of it, and stages memory for it."""
        plan = planned.plan
        self._first = self._first or planned
        self._facts[rank] = facts_of(planned, "", "")
        compared = max((t.span_numel * itemsize(t.source_dtype) for t in plan.checks), default=0)
        converted = max((host.staging_bytes for host in plan.conversions.values()), default=0)
        self._found[rank] = _Staged(plan.staging_bytes, converted + compared, plan.init_staging_bytes)

    def result(self) -> Sequence[int]:
        """Bytes of each rank that was added, in that order. Of buckets that ranks of a host share, each counts its own."""
        first = self._first
        assert first is not None
        choice = _choice(first, self._facts, self._ranks, self._per_host)
        if choice.strategy == "own":
            return [max(one.alone, one.initialized) for one in self._found.values()]
        readers = len(choice.readers or choice.peers_of(0))
        buckets = held_bytes(choice.strategy, bucket_bytes_of(first, choice), readers=readers)
        if choice.hosts:  # no more than its part of the source, where it reads in turns with others
            buckets = min(buckets, -(-first.catalog.nbytes // max(1, readers)))
        most = first.io.staging_bytes
        return [max(min(buckets + one.beside_buckets, most), one.initialized) for one in self._found.values()]


def _choice(first: Planned, facts: Mapping[int, Facts], ranks: int, per_host: int) -> Choice:
    """The strategy that the ranks will choose. ``facts``: of some ranks; the others are like rank 0."""
    told = [asdict(replace(facts.get(rank, facts[0]), host=str(rank // per_host))) for rank in range(ranks)]
    return Choice(**choose("plan", first.io.strategy, first.catalog.nbytes, told))


# ----------------------------------------------------------------------------------------------------
# What a load asks object stores for: counted from its plan, request by request, before any is made.


@frozen
class RankRequests:
    """The requests for payload of one rank."""

    rank: int
    requests: int
    nbytes: int
    """Bytes that it asks for, gaps between ranges included."""


@frozen(kw_only=True)
class StoreRequests:
    """The requests that a load makes to object stores, if none has to be made again.

    A load whose ranks can't share memory, which only the load finds out, makes those of ``strategy="own"``.
    """

    strategy: str
    """Who reads, and why, as in :class:`LoadReport`."""
    part_bytes: int
    """The most bytes of a request for payload."""
    looks: int
    """Requests that rank 0 makes before: lists, documents, headers. The plan has made the same ones."""
    look_bytes: int
    per_rank: tuple[RankRequests, ...]
    """For payload; the ranks of :attr:`PlanReport.per_rank`."""
    requests: int | None
    """For payload, of all ranks. None if ranks need different requests and not every rank was planned."""
    nbytes: int | None
    """Of these requests."""

    @property
    def total(self) -> int | None:
        """All requests of all ranks, with ``looks``."""
        return None if self.requests is None else self.requests + self.looks

    def in_words(self) -> str:
        """All requests and their bytes."""
        if self.total is None or self.nbytes is None:
            return "not counted: ranks differ, and not every rank was planned"
        return (
            f"{self.total} requests ({self.looks} by rank 0 to inspect the source), {size(self.nbytes + self.look_bytes)}, "
            f"in parts of at most {round(self.part_bytes / 2**20)} MiB"
        )


class StoreTally:
    """Counts the requests of a load over ``ranks`` ranks, rank by rank; rank 0 comes first. Keeps rank 0's plan. Pure."""

    def __init__(self, first: Planned, *, ranks: int, ranks_per_host: int) -> None:
        self._first, self._ranks = first, ranks
        self._choice = _choice(first, {0: facts_of(first, "", "")}, ranks, ranks_per_host)
        self._buckets: dict[str, list[Buckets]] = {}  # by host
        self._readers: dict[str, Sequence[int]] = {}
        self._found: list[RankRequests] = []

    def add(self, rank: int, planned: Planned) -> None:
        """Count the requests of a rank, which has this plan."""
        plan = planned.plan
        reads = {"own": (plan.transfers, plan.checks), "node": (plan.checks,), "once": ()}
        alone = [spans_of(transfers) for transfers in reads[self._choice.strategy]]
        self._found.append(RankRequests(rank, *_count(planned, [*self._shared(rank), *alone])))

    def result(self, looks: Requests) -> StoreRequests:
        """The requests of the load. ``looks``: those that the plan has made."""
        found = self._of_all_ranks()
        return StoreRequests(
            strategy=self._choice.describe(),
            part_bytes=LAST_BYTES,
            looks=looks.total,
            look_bytes=looks.bytes_read,
            per_rank=tuple(self._found),
            requests=None if found is None else sum(one.requests for one in found),
            nbytes=None if found is None else sum(one.nbytes for one in found),
        )

    def _of_all_ranks(self) -> list[RankRequests] | None:
        """None if that would take a plan for each of them."""
        if len(self._found) == self._ranks:
            return self._found
        differ = len(set(self._choice.hosts)) > 1  # hosts read different bytes
        if self._choice.strategy == "own" or differ or self._first.plan.checks:
            return None
        return [RankRequests(k, *_count(self._first, self._shared(k))) for k in range(self._ranks)]

    def _shared(self, rank: int) -> list[Iterator[Span]]:
        """The spans that a rank reads for all: of the fill, and of second copies where these are shared too."""
        choice = self._choice
        if choice.strategy == "own":
            return []
        host = choice.hosts[rank] if choice.hosts else ""
        if host not in self._buckets:
            kinds = (False, True) if choice.strategy == "once" else (False,)
            made = [buckets_for(self._first, choice, rank, copies=copies) for copies in kinds]
            self._buckets[host] = [one for one in made if one is not None]
            self._readers[host] = choice.readers or choice.peers_of(rank)
        return [spans_in_turn(one.buckets, self._readers[host], rank) for one in self._buckets[host]]


def _count(planned: Planned, announced: Iterable[Iterable[Span]]) -> tuple[int, int]:
    """The requests for spans, and for the sources of the conversions whose results are among them; and their bytes."""
    conversions, stored = planned.plan.conversions, planned.catalog.tensors
    run: list[HostConversion] = []
    coded = planned.plan.coded

    def files(spans: Iterable[Span]) -> Iterator[Span]:
        in_parts: list[Span] = []
        for span in spans:
            host = conversions.get(span[0])
            if host is None and span[0] in coded:
                in_parts.append(span)
            elif host is None:
                yield span
            elif not run or run[-1] is not host:  # the reader keeps the results of the last one
                run.append(host)
        for one, box in boxes_of_spans(in_parts, coded, planned.io.parts_bytes):
            yield from spans_of_box(one, box)

    asked = [span for spans in announced for span in requests_for(files(spans))]
    for host in run:
        asked += requests_for(spans_of_tensors(stored[name] for name in host.sources))
    return len(asked), sum(stop - start for _, start, stop in asked)


# ----------------------------------------------------------------------------------------------------
# The training that a plan is made for: :class:`TrainingSpec`.

Optimizer = Literal["adamw", "adamw8bit", "sgd", "momentum"]
Device = Literal["cuda", "unified", "cpu"]

#: States of an optimizer, each of the parameter's shape: how many, and bytes of each element (None: the parameter's dtype).
OPTIMIZERS: dict[str, tuple[int, float | None]] = {
    "adamw": (2, None),
    "adamw8bit": (2, 1 + 4 / 256),
    "sgd": (0, None),
    "momentum": (1, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """Describe how a run trains the model, for :func:`shardwise.plan`. Set dtypes and offload with ``policy=`` and ``dtype=``."""

    batch_size: int = 1
    """Samples per rank in one forward pass."""
    sequence_length: int = 2048
    """Tokens per sample. With ``loss``, only counted for the matrix products of experts on CPUs."""
    loss: Callable[[Any, int], torch.Tensor] | None = None
    """The forward pass of your loop, for models that don't read text: a function of the model and the batch size that makes the inputs, on the
    CPU, and returns the loss. It runs with tensors that have shapes but no data, maybe several times. None: tokens through the model's own loss."""
    optimizer: Optimizer = "adamw"
    """``adamw``: two moments in the parameter's dtype. ``adamw8bit``: torchao's, with one byte per element and a scale per block of 256.
    ``sgd``: no state. ``momentum``: SGD with one state."""
    checkpointing: bool = False
    """Activation checkpointing of each block, by the model's own method (``gradient_checkpointing_enable`` in transformers)."""
    device: Device = "cuda"
    """Where the shards are. ``unified``: a device that shares the host's memory (GB10, Grace). ``cpu``: no device."""
    max_staging_bytes: int | None = None
    """Staging limit of an async ``Checkpointer``. None: the rank's complete state."""
    bytes_per_s: float = 1e9
    """Total bandwidth of the checkpoint storage for all ranks, in bytes per second."""
    keep_last: int = 3
    """``keep_last`` of the ``Checkpointer``. At its peak, the run stores one more step, because each is written before the oldest is deleted."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "bytes_per_s", "keep_last"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_staging_bytes is not None and self.max_staging_bytes < 1:
            raise ValueError(f"max_staging_bytes must be at least 1 or None, got {self.max_staging_bytes}")
        if self.loss is not None and not callable(self.loss):
            raise TypeError(f"loss must be a function of the model and the batch size, got {self.loss!r}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.device not in ("cuda", "unified", "cpu"):
            raise ValueError(f"device must be 'cuda', 'unified', or 'cpu', got {self.device!r}")


# ----------------------------------------------------------------------------------------------------
# What a rank holds through all phases: its parameters, buffers, gradients and optimizer state.

#: torchao quantizes states of tensors with at least this many elements, in blocks of this many (0.15-0.18).
_LEAST_8BIT, _BLOCK = 4096, 256


@frozen(kw_only=True)
class Held:
    """Bytes of rank 0, which holds most; and over all ranks with replicas once."""

    parameters: int
    pinned_parameters: int
    """The parameters in pinned memory: torch rounds each tensor up to a power of two."""
    buffers: int
    gradients: int
    optimizer: int
    unreached_gradients: int
    """Of gradients, and below of optimizer state: what belongs to parameters that the forward pass doesn't reach."""
    unreached_optimizer: int
    largest_trained: int
    """The largest trained parameter."""
    trained: int
    """Elements that are trained."""
    count: int
    """Parameters."""
    stored_model: int
    """Over all ranks: parameters and persistent buffers."""
    stored_optimizer: int
    dtypes: tuple[str, ...]
    """Of all parameters, by falling bytes; torch's names."""
    trained_dtypes: tuple[str, ...]


def held_by_first(
    live: LiveModel,
    training: TrainingSpec,
    reached: AbstractSet[str] | None = None,
    whole_gradients: Mapping[str, int] = MappingProxyType({}),
) -> Held:
    """What rank 0 of a sharded model on meta holds. FSDP2 pads shards to the size of those of rank 0.

    ``reached``: names of the parameters that get a gradient; None: all that are trained. ``whole_gradients``: how many times as
    large as a parameter its gradient stays, by name.
    """
    parameters = [t.tensor for t in live.parameters]
    missed = [
        local_tensor(t.tensor)
        for t in live.parameters
        if t.tensor.requires_grad and reached is not None and reached.isdisjoint(t.names)
    ]
    trained = [p for p in parameters if p.requires_grad]
    local = [local_tensor(p) for p in parameters]
    own = [local_tensor(p) for p in trained]
    return Held(
        parameters=sum(t.nbytes for t in local),
        pinned_parameters=sum(1 << (t.nbytes - 1).bit_length() for t in local if t.nbytes),
        buffers=sum(t.tensor.nbytes for t in live.tensors if t.kind != "parameter"),
        gradients=sum(
            local_tensor(t.tensor).nbytes * whole_gradients.get(t.name, 1)
            for t in live.parameters
            if t.tensor.requires_grad
        ),
        optimizer=sum(_states(t, training) for t in own),
        unreached_gradients=sum(t.nbytes for t in missed),
        unreached_optimizer=sum(_states(t, training) for t in missed),
        largest_trained=max((t.nbytes for t in own), default=0),
        trained=sum(t.numel() for t in own),
        count=len(parameters),
        stored_model=sum(t.tensor.numel() * t.tensor.dtype.itemsize for t in live.stored),
        stored_optimizer=sum(_states(p, training) for p in trained),
        dtypes=_dtypes(parameters),
        trained_dtypes=_dtypes(trained),
    )


def _dtypes(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    held: dict[str, int] = {}
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        held[name] = held.get(name, 0) + tensor.numel() * tensor.dtype.itemsize
    return tuple(sorted(held, key=lambda name: (-held[name], name)))


def _states(tensor: torch.Tensor, training: TrainingSpec) -> int:
    """Bytes of the optimizer's states of a tensor. AdamW's step is a number of 4 bytes."""
    count, bytes_each = OPTIMIZERS[training.optimizer]
    numel = tensor.numel()
    if bytes_each is None or numel < _LEAST_8BIT or numel % _BLOCK:
        bytes_each = tensor.dtype.itemsize
    steps = 4 if training.optimizer.startswith("adamw") else 0
    return int(count * numel * bytes_each) + steps


# ----------------------------------------------------------------------------------------------------
# A run that can be planned: its ranks, how they are arranged, and what they do.


@frozen
class Variant:
    """A run that can be planned.

    Ranks lie row-major on a mesh of replicas x shards x ``tp``, and the experts' on one of replicas x expert shards x ``ep``;
    a host has consecutive ranks. As transformers' ``DistributedConfig`` arranges them.
    """

    ranks: int
    replicas: int
    ranks_per_host: int
    policy: ShardPolicy
    training: TrainingSpec
    adapter: Any
    tp: int = 1
    ep: int = 1

    @property
    def shards(self) -> int:
        """Ranks over which FSDP2 cuts a parameter, beside what tensor parallelism cuts."""
        return self.ranks // self.replicas // self.tp

    @property
    def expert_shards(self) -> int:
        """The same of experts: expert parallelism leaves so many ranks with the same ones."""
        return self.ranks // self.replicas // self.ep if self.ep > 1 else self.shards

    @property
    def is_parallel(self) -> bool:
        """Whether tensor or expert parallelism cuts parameters."""
        return self.tp > 1 or self.ep > 1

    @property
    def is_wrapped(self) -> bool:
        """Whether FSDP2 wraps the model. transformers leaves it out where tensor parallelism takes all ranks."""
        needs = self.policy.mixed_precision is not None or self.policy.cpu_offload
        return not self.is_parallel or self.shards * self.replicas > 1 or needs

    @property
    def hosts(self) -> int:
        """Hosts over which the ranks are spread."""
        return -(-self.ranks // self.ranks_per_host)

    def check(self) -> None:
        """Raise :class:`ValueError` if the ranks can't be arranged so."""
        if self.replicas < 1 or self.ranks % self.replicas:
            raise ValueError(
                f"replicas must be at least 1 and divide the {self.ranks} ranks, got {self.replicas}"
            )
        of_replica = self.ranks // self.replicas
        if self.tp < 1 or of_replica % self.tp:
            raise ValueError(
                f"tp must be at least 1 and divide the {of_replica} ranks of a replica, got {self.tp}"
            )
        if self.ep < 1 or of_replica % self.ep or (self.ep > 1 and self.ep % self.tp):
            raise ValueError(
                f"ep must be at least 1, divide the {of_replica} ranks of a replica, and be a multiple of tp = {self.tp}, "
                f"got {self.ep}"
            )


# ----------------------------------------------------------------------------------------------------
# Bytes that the ranks of a run read from the storage of models and checkpoints, and write to it, by phase.


def files_of(held: Held, variant: Variant, read_bytes: Sequence[int]) -> tuple[Files, ...]:
    """The files of each phase. ``read_bytes``: what each rank reads in a load, or the first and the last of many."""
    ranks, per_host = variant.ranks, min(variant.ranks_per_host, variant.ranks)
    is_all = len(read_bytes) == ranks
    hosts = [sum(read_bytes[k : k + per_host]) for k in range(0, ranks, per_host)] if is_all else []
    resumed = held.parameters + held.optimizer
    stored = held.stored_model + held.stored_optimizer

    def files(phase: str, verb: str, rank: int, node: int, total: int) -> Files:
        return Files(phase, verb, rank, node, total, total / variant.training.bytes_per_s)  # type: ignore[arg-type]

    def written(phase: str, nbytes: int) -> Files:
        each = -(-nbytes // ranks)
        return files(phase, "writes", each, each * per_host, nbytes)

    most = max(read_bytes)
    return (
        files(
            "load",
            "reads",
            most,
            max(hosts) if is_all else most * per_host,
            sum(hosts) if is_all else most * ranks,
        ),
        written("save", stored),
        files("resume", "reads", resumed, resumed * per_host, resumed * ranks),
        written("export", held.stored_model),
    )


def with_cached_reads(
    phases: Iterable[Phase], files: Iterable[Files], variant: Variant, io: IOOptions
) -> tuple[Phase, ...]:
    """The phases, with what reads leave in the page cache where ``io.page_cache`` lets it stay."""
    keeps = io.page_cache == "keep" or (io.page_cache == "auto" and variant.training.device != "unified")
    if not keeps:
        return tuple(phases)
    read = {
        f.phase: f.node_bytes // min(variant.ranks_per_host, variant.ranks)
        for f in files
        if f.verb == "reads"
    }
    text = "at most what the rank reads; the system can reclaim it"

    def cached(phase: Phase) -> Phase:
        nbytes = read.get(phase.name, 0)
        if not nbytes:
            return phase
        return replace(phase, amounts=(*phase.amounts, Amount("files", "page cache", nbytes, nbytes, text)))

    return tuple(map(cached, phases))
