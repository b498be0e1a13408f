"""``plan``: the cost of a load on every rank, and of a training run by phases, in one process without any ranks."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import torch
import torch.distributed as dist

from ..catalog.quantized import method_of_config
from ..catalog.records import Catalog, Chunk, StoredFile, StoredTensor
from ..dtypes import code_of, named_dtype
from ..errors import FormatError, ShardError
from ..internals.torch import fake_store
from ..limits import MAX_MODULES
from ..loading.load import open_for_all, plan_load
from ..loading.pretrained import Prepared, build_meta, choice_of, locate, prepare
from ..models.build import forget_quantization
from ..models.classes import config_and_class
from ..models.hub import Arguments, FromPretrained, Pretrained
from ..models.meta import at_most
from ..objects import frozen, gc_paused
from ..operations.operation import size
from ..operations.printed import Printed, some
from ..planning.match import Converted, Declaration, Grown, GrowRule
from ..planning.plan import IOOptions
from ..planning.proof import Cast, casts_of
from ..quantized.open import Dequantized, described
from ..ranks.ranks import Ranks
from ..sharding.fsdp import Group, ShardPolicy, describe_groups, largest_group
from ..storage.records import Requests, counting, is_url
from ..tensors.boxes import whole
from ..tensors.live import LiveModel, describe
from .network import Measurements, Spread, flows_of, step_of
from .records import (
    Flow,
    RunPlan,
    StagingTally,
    StoreRequests,
    StoreTally,
    TrainingSpec,
    Variant,
    files_of,
    held_by_first,
)
from .verdict import RANKS_PER_HOST, Limits, Search, Verdict, run_plan, smallest_ranks, verdict_of


@frozen
class RankCost:
    """The cost of one rank's plan."""

    rank: int
    shard_bytes: int
    """Bytes of this rank's part of parameters and persistent buffers."""
    bytes_read: int
    """Bytes that the load reads from the source."""
    staging_bytes: int
    """Host memory besides the shards during the load, for a CPU target; of memory that ranks of a host share, this rank's part."""
    reads: int
    """Strided copies in the plan."""


@frozen(kw_only=True)
class PlanReport(Printed):
    """The cost of loading (and training) a model with ``ranks`` ranks, computed from the plans that a real load would run."""

    path: str
    model_class: str
    """Class of the model; with adapters, that of the base."""
    dtypes: tuple[str, ...]
    """Dtypes of the model's tensors, by the number of bytes in each, largest first."""
    ranks: int
    replicas: int
    """Copies of the model across all ranks: 1 with FSDP, more with HSDP."""
    tp: int
    """Tensor-parallel ranks; 1 without tensor parallelism."""
    ep: int
    """Expert-parallel ranks; 1 without expert parallelism."""
    tensors: int
    model_bytes: int
    """Bytes of all parameters and persistent buffers, counting tied tensors once."""
    source_bytes: int
    per_rank: tuple[RankCost, ...]
    """Every rank, up to 64 ranks. Above that, only the rank with the most bytes (rank 0) and the one with the fewest (the last)."""
    total_shard_bytes: int
    """Sum over all ranks."""
    total_bytes_read: int | None
    """Sum over all ranks. None if not every rank was planned."""
    groups: int
    """Number of FSDP2 groups of the model."""
    largest_group: Group
    """The group that takes the most memory while it is gathered."""
    replicated_bytes: int
    """Bytes on each rank of parameters that FSDP2 can't shard and that are therefore replicated."""
    unused: tuple[Declaration, ...]
    initialized: tuple[Declaration, ...]
    grown: tuple[Grown, ...]
    """Tensors with more rows than are stored, and the rule that makes the other rows."""
    converted: tuple[Converted, ...]
    """Conversions that can't be compiled to byte ranges. Each rank that needs a part of a result runs them in full."""
    dequantized: tuple[Dequantized, ...]
    """Quantized formats in the source whose tensors will be dequantized."""
    casts: tuple[Cast, ...]
    """Casts that round stored values."""
    ignored_files: tuple[str, ...]
    store: StoreRequests | None
    """Requests to object stores during the load. None for local files."""
    from_config: bool = False
    """Planned from a config alone, assuming that the source contains the model's tensors in the config's dtype."""
    run: RunPlan | None = None
    """The phases of the run. None without ``training=``."""
    verdict: Verdict | None = None
    """Whether the run fits. None without a limit."""
    search: Search | None = None
    """How many ranks the run needs. None if you passed a number."""

    def rows(self) -> Mapping[str, str]:
        """The rows of the printed table. ``shardwise plan`` also shows each rank and each phase."""
        largest, shards = self.largest_group, self.ranks // self.replicas // self.tp
        axes = [f"{self.replicas} replicas"] * (self.replicas > 1) + [f"{shards} shards"]
        axes += [f"{self.tp} of tensor parallelism"] * (self.tp > 1)
        experts = f"; experts in {self.ep} parts" if self.ep > 1 else ""
        shape = f" ({' x '.join(axes)}{experts})" if len(axes) > 1 or experts else ""
        from_config = "; from its config alone, as if stored in its dtype" if self.from_config else ""
        kept = [one for one in self.dequantized if one.format.endswith(", kept")]
        rows = {
            "path": self.path,
            "model": f"{self.model_class}, {', '.join(self.dtypes)}{from_config}",
            "tensors": f"{self.tensors}, {size(self.model_bytes)} ({size(self.source_bytes)} stored)",
            "ranks": f"{self.ranks}{shape}",
            "a rank holds": f"at most {size(self.max_shard_bytes)}",
            "total held": size(self.total_shard_bytes),
            "total read": "not counted" if self.total_bytes_read is None else size(self.total_bytes_read),
            "FSDP groups": f"{self.groups}; the largest takes {size(largest.gathered_bytes)} when gathered "
            f"({largest.name or 'root'}, {largest.kind})",
            "store": "" if self.store is None else self.store.in_words(),
            "read strategy": "" if self.store is None else self.store.strategy,
            "replicated": f"{size(self.replicated_bytes)} on every rank, because it can't be sharded"
            if self.replicated_bytes
            else "",
            "left unused": some(map(str, self.unused)),
            "initialized": some(map(str, self.initialized)),
            "grown": some(map(str, self.grown)),
            "converted in full": some(map(str, self.converted)),
            "dequantized": some(format_text(one) for one in self.dequantized if one not in kept),
            "held in codes": some(map(format_text, kept)),
            "rounded": some(map(str, self.casts)),
            "ignored files": some(self.ignored_files),
            "verdict": "" if self.verdict is None else self.verdict.outcome,
        }
        return {label: text for label, text in rows.items() if text}

    @property
    def is_every_rank(self) -> bool:
        """Whether ``per_rank`` lists all ranks."""
        return len(self.per_rank) == self.ranks

    def host_bytes(self, ranks: int, *, shards: bool) -> int:
        """Host memory that ``ranks`` ranks on one host need at the peak of a load: staging, and ``shards`` on the CPU.

        Computed for the ranks that need the most. The memory that their processes use even without a model isn't included.
        """
        needs = sorted((c.staging_bytes + shards * c.shard_bytes for c in self.per_rank), reverse=True)
        return sum(needs[:ranks]) if self.is_every_rank else ranks * needs[0]

    @property
    def max_shard_bytes(self) -> int:
        """Shard bytes on the rank with the most."""
        return max(cost.shard_bytes for cost in self.per_rank)

    @property
    def min_shard_bytes(self) -> int:
        """Shard bytes on the rank with the fewest."""
        return min(cost.shard_bytes for cost in self.per_rank)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            **Printed.to_json(self),
            "run": None if self.run is None else self.run.to_json(),
            "max_shard_bytes": self.max_shard_bytes,
            "min_shard_bytes": self.min_shard_bytes,
        }


def format_text(one: Dequantized) -> str:
    """A format of quantized tensors in words."""
    held = f"{size(one.nbytes)} {'held' if one.format.endswith(', kept') else 'decoded'}"
    return f"{one.tensors} tensors from {one.format}, {size(one.stored_bytes)} stored, {held}"


# ----------------------------------------------------------------------------------------------------
# What a plan is made of: a model directory with its weights, the outline of one on the hub, or a config alone.

#: Files that may hold weights, by their ends.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".index.json")
#: Modules, parameters and buffers that a config alone may ask for.
_MOST_PARTS = 50 * MAX_MODULES


@frozen
class Source:
    """The model of a plan. :meth:`prepared` builds it on meta, each time anew."""

    request: Pretrained
    asked: Arguments
    directory: str
    catalog: Catalog
    is_config_alone: bool
    looks: Requests
    """What looking at the source asked of an object store."""
    shown: str
    """The path in a report."""

    def prepared(self, adapter: Any) -> Prepared:
        """The model on meta, unsharded, with ``adapter``, its source and the rules of its load."""
        request = replace(self.request, adapter=adapter)
        if not self.is_config_alone:
            return prepare(request, self.asked, self.directory, catalog=self.catalog)
        base = _from_config(request, self.asked, self.directory, self.shown, self.asked.dtype)
        return prepare(request, self.asked, self.directory, (base.config, type(base)), self.catalog, base)


@contextmanager
def source_of(request: Pretrained) -> Iterator[Source]:
    """The source of a request, while the context lasts: a config file gets a directory. Raises :class:`SourceError` if there is none."""
    path, asked = os.fspath(request.path), request.understood()
    with ExitStack() as stack:
        if not is_url(path) and _is_config_alone(path):
            directory = path
            if os.path.isfile(path):  # of any name
                directory = stack.enter_context(TemporaryDirectory(prefix="shardwise-plan-"))
                shutil.copyfile(path, os.path.join(directory, "config.json"))
            catalog = _as_saved(_from_config(request, asked, directory, path, "auto"), path)
            yield Source(request, asked, directory, catalog, True, Requests(), path)
            return
        made: list[str] = []

        def outlines() -> str:  # of a model on the hub: other plans write nothing
            if not made:
                made.append(stack.enter_context(TemporaryDirectory(prefix="shardwise-plan-")))
            return made[0]

        asked = replace(asked, hub=replace(asked.hub, outlines=outlines))
        with counting() as looks:  # those of rank 0 of a load
            located = locate(request, asked, Ranks())
            request, directory = located.request, located.found.directory
            is_alone = located.found.lent is None and _is_config_alone(directory)
            if is_alone:
                catalog = _as_saved(_from_config(request, asked, directory, path, "auto"), path)
            else:
                choice = choice_of(request, asked, directory)
                catalog = open_for_all(located.found.lent or directory, Ranks(), choice=choice)
        shown = path if any(map(directory.startswith, made)) else catalog.root
        yield Source(request, asked, directory, catalog, is_alone, looks, shown)


def _is_config_alone(path: str) -> bool:
    """Whether a path is a JSON file, or a directory with config.json and no weights."""
    if os.path.isfile(path):
        return path.endswith(".json")
    if not os.path.isfile(os.path.join(path, "config.json")):
        return False
    return not any(name.endswith(_WEIGHTS) for name in os.listdir(path))


def _from_config(request: Pretrained, asked: Arguments, directory: str, shown: str, dtype: Any) -> Any:
    """The model of a config on meta, in ``dtype``; ``"auto"``: that of its files, which the config names."""
    given, trusted = (request.config, request.auto_class), request.trust_remote_code
    config, model_class = config_and_class(directory, *given, trust_remote_code=trusted)
    dtype = _dtype_of(config) if dtype == "auto" else dtype
    forget_quantization(config)
    for field, value in asked.implementations.items() if not isinstance(config, dict) else ():
        setattr(config, field, value)
    refusal = FormatError(
        f"describes a model with more than {_MOST_PARTS} modules, parameters, and buffers; check the number of layers",
        path=shown,
    )
    with at_most(_MOST_PARTS, refusal):
        return build_meta(directory, dtype=dtype, auto_class=model_class, config=config)


def _dtype_of(config: Any) -> Any:
    """The dtype that a config declares, or its text part; codes are dequantized to bfloat16; else its library's default."""
    for part in () if isinstance(config, dict) else (config, config.get_text_config()):
        if getattr(part, "dtype", None) is not None:
            return part.dtype
    return torch.bfloat16 if method_of_config(config) else torch.float32


def _as_saved(model: Any, path: str) -> Catalog:
    """A catalog as if ``model`` were saved under its own names and dtypes, in one file that does not exist."""
    tensors, end = {}, 0
    for entry in describe(model).stored:
        shape = tuple(entry.tensor.shape)
        chunk = Chunk(whole(shape), path, end)
        tensors[entry.name] = StoredTensor(entry.name, code_of(entry.tensor.dtype), shape, (chunk,))
        end += tensors[entry.name].nbytes
    return Catalog("slices", path, tensors, (StoredFile(path, end),))


# ----------------------------------------------------------------------------------------------------

#: Up to this number every rank is planned; above it, only the rank that holds most and the one that holds least.
EVERY_RANK_UP_TO = 64
#: Mistyped rank counts would fill the memory with meshes.
MAX_RANKS = 16_384


def plan(
    path: str | os.PathLike[str],
    *,
    ranks: int | None = None,
    nodes: int = 1,
    replicas: int = 1,
    tp: int = 1,
    ep: int = 1,
    dtype: torch.dtype | str = "auto",
    policy: ShardPolicy | None = None,
    training: TrainingSpec | None = None,
    device_limit_bytes: int | None = None,
    host_limit_bytes: int | None = None,
    auto_class: Any = None,
    config: Any = None,
    trust_remote_code: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    allow_unused: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    vocab_size: int | None = None,
    grow: Mapping[str, GrowRule] | None = None,
    adapter: Any = None,
    quantized: Any = "dequantize",
    io: IOOptions | None = None,
    **options: Unpack[FromPretrained],
) -> PlanReport:
    """Calculate what it takes to load the model at ``path`` with ``load_pretrained`` on ``ranks`` ranks, without loading anything.

    Builds the model on meta, shards it over a fake process group (1-D, or 2-D with ``replicas`` rows), and creates the plan that each rank
    would create. With ``tp`` or ``ep``, the model class's own plans split the model first, as transformers'
    ``DistributedConfig(tp_size=…, ep_size=…)`` does. FSDP2 then shards each slice across the groups, if there are several. :func:`load` can load
    such models.
    Memory: the model's buffers and the plans. Call it in one process without a process group; it leaves none behind. Not thread-safe.

    With ``training``, the report also says what a rank holds in each phase of a run (build, load, steps, saves, resume, export), with
    formulas and error bars: ``report.run``. If you also pass a limit, it says whether the run fits, and if not, which changes would make it
    fit, cheapest first, each of them planned as well: ``report.verdict``.

    Args:
        path: a local directory with ``config.json`` and safetensors files, or a checkpoint of such a model, or the id of a model on the
            Hugging Face hub. If the model isn't in the cache, its config and the headers of its weights are downloaded, but not the
            weights. A config alone is enough: a JSON file, or a directory or hub model with config.json and no weights.
        ranks: number of ranks, at most 16,384. None: the smallest number with which the run fits into ``device_limit_bytes``, on hosts with
            8 devices; ``report.search`` lists the numbers that were tried.
        nodes: number of hosts. Each has the same number of consecutive ranks, except that the last may have fewer. The ranks of a host
            share its memory, and the requests to a store.
        replicas: number of ranks that hold the same shard; must divide ``ranks``.
        tp: ranks for tensor parallelism, which process the same batch; must divide the ranks of a replica.
        ep: ranks for expert parallelism; a multiple of ``tp`` that divides the ranks of a replica.
        dtype: as for ``load_pretrained``.
        policy: how to wrap the model, including the run's mixed precision and offload.
        training: batch, optimizer and device of the run. None: plan the load only.
        device_limit_bytes, host_limit_bytes: memory of one device and of one host; only with ``training``.
        auto_class, config, trust_remote_code, key_mapping, allow_unused, allow_missing, adapter, quantized, io, options: as for
            ``load_pretrained``.
        vocab_size, grow: as for ``load_pretrained``.

    Raises :class:`ValueError` for invalid counts or an invalid dtype, :class:`PlanError` if the load wouldn't be complete,
    :class:`SourceError`, :class:`ShardError` or :class:`LayoutError`.
    """
    if ranks is None:
        if device_limit_bytes is None:
            raise ValueError(
                "ranks=None finds out how many ranks fit: pass device_limit_bytes, or pass a number of ranks"
            )
        training = training or TrainingSpec()
    else:
        _check_counts(ranks, nodes)
    _check_limits(training, device_limit_bytes, host_limit_bytes)
    first, per_host = (
        (ranks, -(-ranks // nodes)) if ranks is not None else (replicas * max(tp, ep), RANKS_PER_HOST)
    )
    this = Variant(
        first, replicas, per_host, policy or ShardPolicy(), training or TrainingSpec(), adapter, tp, ep
    )
    this.check()
    dtype = _floating_dtype(dtype)
    request = Pretrained.of(locals())
    io = io or IOOptions()
    _floating_dtype(request.understood().dtype)
    with source_of(request) as source:
        this = replace(this, adapter=source.request.adapter)  # maybe one in the model's directory

        measurements: Measurements = {}
        known: list[tuple[Variant, RunPlan]] = []

        def other_run(variant: Variant) -> RunPlan:
            for one, run in known:
                if one == variant:
                    return run
            is_alike = variant.adapter is this.adapter and not variant.is_parallel
            found = _report_of(source, variant, io, measurements if is_alike else {}, every_rank=False)[1]
            assert found is not None
            known.append((variant, found))
            return found

        limits, search = Limits(device_limit_bytes, host_limit_bytes), None
        if ranks is None:
            search = smallest_ranks(lambda n: other_run(replace(this, ranks=n)), limits, unit=first)
            if search.ranks is None and search.below is not None and not this.training.checkpointing:
                leaner = replace(this, training=replace(this.training, checkpointing=True))
                again = smallest_ranks(lambda n: other_run(replace(leaner, ranks=n)), limits, unit=first)
                if again.ranks is not None:
                    need = search.below.binds[0]
                    this, search = leaner, replace(again, change="activation checkpointing", unchanged=need)
            this = replace(this, ranks=search.ranks or search.tried[-1].ranks)
        report, run = _report_of(source, this, io, None if training is None else measurements)
        report = replace(report, run=run, search=search)
        if run is None or (device_limit_bytes is None and host_limit_bytes is None):
            return report
        return replace(report, verdict=verdict_of(run, limits, this, other_run))


@gc_paused()
def _report_of(
    source: Source,
    variant: Variant,
    io: IOOptions,
    measurements: Measurements | None,
    *,
    every_rank: bool = True,
) -> tuple[PlanReport, RunPlan | None]:
    """The load of a variant and, with ``measurements`` of other variants, the phases of its run.

    ``every_rank``: False plans the load of the first and the last rank alone, for a run whose load nobody looks at.
    """
    prepared = source.prepared(variant.adapter)
    model_class = type(prepared.base).__name__  # before FSDP2 swaps it
    step, network, compute = None, tuple[Flow, ...](), _compute_dtype(prepared.model, variant.policy)
    with _fake_ranks(variant.ranks):
        spread = Spread.cut(prepared.model, variant)
        whole = spread.whole_gradients()
        with spread.as_one_rank() as exchange:
            groups = describe_groups(prepared.model, variant.policy)
            if measurements is not None:
                shards = variant.shards, variant.training, variant.expert_shards
                step = step_of(
                    prepared.model,
                    variant.policy,
                    *shards,
                    replicas=variant.replicas,
                    is_wrapped=variant.is_wrapped,
                    whole_gradients=whole,
                    known=measurements,
                )
                step = exchange.counted(step, is_wrapped=variant.is_wrapped)
                network = flows_of(step, variant, exchange.sent, compute.itemsize)
        spread.shard()
        live = describe(prepared.model)
        # torch.chunk never gives a later shard more than an earlier one: the first and the last are the extremes.
        is_small = every_rank and variant.ranks <= EVERY_RANK_UP_TO
        ranks = list(range(variant.ranks)) if is_small else sorted({0, variant.ranks - 1})
        report = _plan_ranks(live, prepared, io, source, variant, ranks, groups, model_class)
        if step is None:
            return report, None
        held = held_by_first(live, variant.training, step.reached, {} if variant.is_wrapped else whole)
    files = files_of(held, variant, [cost.bytes_read for cost in report.per_rank])
    staging = report.per_rank[0].staging_bytes
    return report, run_plan(
        held, step, variant, io, network, files, compute_dtype=compute, load_staging_bytes=staging
    )


def _compute_dtype(model: Any, policy: ShardPolicy) -> torch.dtype:
    """The dtype of the forward."""
    precision = policy.mixed_precision
    given: torch.dtype | None = precision.param_dtype if precision is not None else None
    return given or next(
        (p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype()
    )


# ----------------------------------------------------------------------------------------------------
# Arguments


def _check_counts(ranks: int, nodes: int) -> None:
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks must be from 1 to {MAX_RANKS}, got {ranks}")
    if not 1 <= nodes <= ranks:
        raise ValueError(f"nodes must be from 1 to the {ranks} ranks, got {nodes}")


def _check_limits(training: TrainingSpec | None, *limits: int | None) -> None:
    for limit in limits:
        if limit is not None and training is None:
            raise ValueError("a limit needs training=sw.TrainingSpec(…), the run that has to fit")
        if limit is not None and limit < 1:
            raise ValueError(f"a limit must be at least 1 byte, got {limit}")


def _floating_dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    """``"auto"`` or a floating dtype."""
    if dtype == "auto":
        return dtype
    found = named_dtype(dtype)
    if found is None or not found.is_floating_point:
        raise ValueError(f"dtype must be 'auto', a floating-point torch dtype, or its name, got {dtype!r}")
    return found


# ----------------------------------------------------------------------------------------------------
# Fake ranks


@contextmanager
def _fake_ranks(ranks: int) -> Iterator[None]:
    """A process group of ``ranks`` ranks. This process is rank 0; the other ranks do not exist."""
    if dist.is_initialized():
        raise ShardError(
            "plan creates its own process group, but this process already has one; plan in a process "
            "without one (`shardwise plan`), or before init_process_group"
        )
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------
# Plans and what they cost


def _plan_ranks(
    live: LiveModel,
    prepared: Prepared,
    io: IOOptions,
    source: Source,
    variant: Variant,
    to_plan: Sequence[int],
    groups: tuple[Group, ...],
    model_class: str,
) -> PlanReport:
    """Make each rank's plan as ``load_pretrained`` makes it there, and report the load. Keeps rank 0's plan alone."""
    catalog, ranks = prepared.catalog, variant.ranks
    in_store = any(is_url(file.path) for file in catalog.files)
    costs, first, tally = list[RankCost](), None, None
    staging = StagingTally(ranks=ranks, ranks_per_host=variant.ranks_per_host)
    for rank in to_plan:
        # None for the rank that this process plays: its boxes are also checked against what torch allocated.
        planned = plan_load(live, catalog, prepared.rules, io=io, rank=rank or None)
        plan, copies = planned.plan, len(planned.plan.transfers) + len(planned.plan.checks)
        first = first or plan
        costs.append(RankCost(rank, plan.local_nbytes, plan.bytes_to_read, 0, copies))
        staging.add(rank, planned)
        if in_store:
            tally = tally or StoreTally(planned, ranks=ranks, ranks_per_host=variant.ranks_per_host)
            tally.add(rank, planned)
    assert first is not None
    dtypes: dict[str, int] = {}
    for wanted in first.wanted:
        dtypes[wanted.dtype] = dtypes.get(wanted.dtype, 0) + wanted.nbytes
    is_complete = len(costs) == ranks
    total_shard_bytes = _over_all_ranks(live, ranks)
    assert not is_complete or total_shard_bytes == sum(cost.shard_bytes for cost in costs)
    return PlanReport(
        path=source.shown,
        model_class=model_class,
        dtypes=tuple(sorted(dtypes, key=lambda code: -dtypes[code])),
        ranks=ranks,
        replicas=variant.replicas,
        tp=variant.tp,
        ep=variant.ep,
        tensors=len(first.wanted),
        model_bytes=sum(w.nbytes for w in first.wanted),
        source_bytes=first.source_bytes,
        per_rank=tuple(
            replace(cost, staging_bytes=nbytes) for cost, nbytes in zip(costs, staging.result(), strict=True)
        ),
        total_shard_bytes=total_shard_bytes,
        total_bytes_read=sum(cost.bytes_read for cost in costs) if is_complete else None,
        groups=len(groups),
        largest_group=largest_group(groups),
        replicated_bytes=sum(g.replicated_bytes for g in groups),
        unused=first.unused,
        initialized=first.initialized,
        grown=first.grown,
        converted=tuple(host.describe() for host in dict.fromkeys(first.conversions.values())),
        dequantized=described(first.coded.values(), first.kept),
        casts=casts_of(first.rounded),
        ignored_files=first.ignored_files,
        store=None if tally is None else tally.result(source.looks),
        from_config=source.is_config_alone,
    )


def _over_all_ranks(live: LiveModel, ranks: int) -> int:
    """Bytes that all ranks hold together: a tensor counts once for each set of ranks that share its shards."""
    total = 0
    for entry in live.stored:
        geometry = live.geometries[entry.name]
        cuts = zip(geometry.axis_sizes, geometry.cuts, strict=True)
        shards = math.prod(size for size, cut in cuts if cut.kind != "replicate")
        total += entry.tensor.numel() * entry.tensor.dtype.itemsize * (ranks // shards)
    return total
