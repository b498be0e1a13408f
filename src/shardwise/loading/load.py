"""``load``: fills an already sharded model from stored tensors, and reports what it did."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..catalog.megatron import without_padding
from ..catalog.open import open_catalog
from ..catalog.records import Catalog, Coded, packed_catalog, unpacked_catalog
from ..catalog.weights import Choice as WeightsChoice
from ..engine.engine import ConvertingReader, Destination, Staging, compare, execute, execute_own
from ..engine.files import page_cache_for
from ..engine.objects import SourceReader
from ..engine.shared import (
    DecodingReader,
    NotShared,
    SharedReader,
    boxes_of_conversions,
    boxes_of_spans,
    boxes_of_transfers,
)
from ..errors import IntegrityError, PlanError, ShardError, StateError
from ..internals.peft import has_adapters
from ..internals.torch import local_tensor, version_of
from ..internals.transformers import kept_in_fp32_of_class
from ..models.build import forget_quantization
from ..models.homes import remember_source
from ..models.meta import default_device, forget_meta_buffers, is_unknown, materialize
from ..names import NamedTensor, patterns_of
from ..objects import frozen, gc_paused
from ..operations.host_budget import HostBudget, host_budget, refuse_too_large
from ..operations.operation import Operation, announced, phase, this_operation
from ..operations.printed import Printed
from ..planning.hub_rules import (
    Converter,
    HubRules,
    automatic_rules,
    by_converter,
    embedding_names,
    note_conversions,
    wrapped,
)
from ..planning.match import (
    Converted,
    Declaration,
    Grown,
    GrowRule,
    Recipe,
    Resolve,
    Rules,
    by_key_mapping,
    growth,
    match_rules,
    matches_any,
    remember,
    renamed,
    same_names,
)
from ..planning.plan import LEAST_STAGING_BYTES, IOOptions, Plan, build_plan
from ..planning.proof import Cast, adapters_of_one, casts_of
from ..quantized.open import Dequantized, dequantized, described
from ..ranks.ranks import Ranks
from ..storage.records import Requests, counting, is_url
from ..tensors.boxes import Box
from ..tensors.live import HostMemory, LiveModel, describe, is_declared, reduced_parameters
from ..tensors.tiles import is_identity
from .strategies import Choice, Planned, choose, facts_of, payload_bytes, shared_reader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# ----------------------------------------------------------------------------------------------------
# The report of a load: counts, bytes, seconds, and everything that was skipped, with its declaration.

#: The last report of each model that a load has filled.
_reports: WeakKeyDictionary[nn.Module, LoadReport] = WeakKeyDictionary()


@frozen(kw_only=True)
class ReadCost:
    """The cost of carrying out a plan on this rank; for the fields see :class:`LoadReport`."""

    bytes_read: int
    requests: int
    bytes_sent: int
    staging_peak_bytes: int
    page_cache: str
    pages: str
    reads: str
    strategy: str


@frozen
class LoadReport(Printed):
    """The result of a load on this rank."""

    source: str
    tensors: int
    """Number of the model's tensors that were filled from the source."""
    model_bytes: int
    """Bytes of the complete model, counting tied tensors once."""
    local_bytes: int
    """Bytes of this rank's shards."""
    bytes_read: int
    """Bytes that this rank requested from storage."""
    requests: int
    """Requests that this rank made to object stores, including rank 0's requests to inspect the source. 0 for local files."""
    staging_peak_bytes: int
    """Peak host memory in addition to the destination."""
    seconds_plan: float
    seconds_read: float
    unused: tuple[Declaration, ...]
    """Stored tensors that were skipped, and who declared that they may be."""
    initialized: tuple[Declaration, ...]
    """Tensors that were initialized by the model's own rule, and who declared that they may be."""
    grown: tuple[Grown, ...]
    """Tensors with more rows than are stored, and the rule that made the other rows."""
    converted: tuple[Converted, ...]
    """Conversions that couldn't be compiled to byte ranges. Each rank that needs a part of a result ran them in full."""
    dequantized: tuple[Dequantized, ...]
    """Quantized formats in the source whose tensors were dequantized."""
    ignored_files: tuple[str, ...]
    verified: str
    """How the load was checked: "digest" if every tensor's content was compared, otherwise "cover"."""
    digests_compared: int
    """Number of tensors whose digest was compared with the recorded one."""
    page_cache: str
    """Whether the files stayed in the kernel's page cache: "keep" or "release". See ``IOOptions.page_cache``."""
    pages: str
    """Page size of the memory that was allocated on the CPU, and why. See ``IOOptions.pages``."""
    reads: str
    """How this rank read files, and why: "plain: …" or "ahead …: …". See ``IOOptions.reads``."""
    strategy: str
    """Who read the source, and why: "own: …", "node: …" or "once: …". See ``IOOptions.strategy``."""
    bytes_sent: int
    """Bytes of the source that this rank sent to other ranks, if each range is read by one rank ("once")."""
    casts: tuple[Cast, ...]
    """Casts that round stored values (fp32 to bf16, bf16 to fp16), whether or not you asked for the dtype. For dequantized tensors, the
    dtype before the cast is that of the dequantized values."""
    host: HostBudget | None
    """Memory limit and free memory of this rank's host before the load. None if the system doesn't report them."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        cost: ReadCost,
        *,
        source: str,
        seconds_plan: float,
        seconds_read: float,
        digests_compared: int,
        host: HostBudget | None,
        is_kept: Callable[[str], bool],
    ) -> LoadReport:
        """Create the report of a load that ran ``plan``. ``is_kept``: whether the model's class keeps a tensor in fp32. The other arguments are
        fields.
        """
        return cls(
            source=source,
            tensors=len(plan.recipes),
            model_bytes=sum(w.nbytes for w in plan.wanted),
            local_bytes=plan.local_nbytes,
            seconds_plan=seconds_plan,
            seconds_read=seconds_read,
            unused=plan.unused,
            initialized=plan.initialized,
            grown=plan.grown,
            converted=tuple(host.describe() for host in dict.fromkeys(plan.conversions.values())),
            dequantized=described(plan.coded.values(), plan.kept),
            ignored_files=plan.ignored_files,
            verified="digest" if digests_compared and digests_compared == len(plan.recipes) else "cover",
            digests_compared=digests_compared,
            **asdict(cost),
            casts=casts_of(plan.rounded, is_kept),
            host=host,
        )

    def after(self, looks: Requests) -> LoadReport:
        """A copy of the report that includes the requests made before planning."""
        return replace(self, requests=self.requests + looks.total)


def noted(model: nn.Module, report: LoadReport) -> LoadReport:
    """``report``, after it was noted as the model's last one."""
    _reports[model] = report
    return report


def load_report(model: nn.Module) -> LoadReport:
    """Return the report of the last load into ``model`` in this process.

    Also works for a model that was wrapped after the load: compiled, in DDP, or in a ``PeftModel``. It needs no communication,
    so a single rank may call it. Raises :class:`ValueError` for a model that neither :func:`load` nor
    ``load_pretrained`` filled.
    """
    for module in model.modules():
        if (report := _reports.get(module)) is not None:
            return report
    raise ValueError(
        f"load_report: this {type(model).__name__} was not filled by sw.load or load_pretrained in this process; a copy of a model "
        "(copy.deepcopy, sw.clone) has no report, so pass the one that was loaded"
    )


# ----------------------------------------------------------------------------------------------------
# Carries a plan out on this rank: reads by the chosen strategy, copies into live tensors, compares second copies.


def carry_out(
    planned: Planned, choice: Choice, live: LiveModel, ranks: Ranks, memory: HostMemory, operation: Operation
) -> ReadCost:
    """Read into the shards of ``live``, and check second copies of ties.

    Rank-local if each rank reads its own ranges; else every rank must call it. ``memory``: where the shards lie. ``operation``
    counts the bytes.
    """
    plan, io = planned.plan, planned.io
    local = live.local_tensors()
    page_cache = page_cache_for(io, (t.device for t in local.values()))
    destination = Destination(local)
    fills: SharedReader | None = None
    checks: SharedReader | None = None
    with (
        counting() as asked,
        SourceReader(
            operation.counting(ranks.tick), files=planned.catalog.files, io=io, page_cache=page_cache
        ) as files,
    ):
        decoded = DecodingReader(files, planned.catalog.coded, io)
        reader = ConvertingReader(decoded, plan.conversions, planned.catalog.tensors)
        share = partial(shared_reader, planned, choice, reader, ranks, default_device(live.stored))
        if choice.strategy != "own":
            try:
                fills = share(copies=False)
            except NotShared as error:
                if choice.asked:
                    raise
                choice = replace(choice, strategy="own", reason=f"ranks can't share memory ({error})")
        operation.expect(partial(payload_bytes, planned, choice, ranks.rank))
        if planned.catalog.coded:
            with ranks.agree("check scales"):
                decoded.check_scales(_scaled(planned, choice, fills))
                decoded.announce(_shared(planned, fills))
        staging = Staging(_beside(planned, _held_by(fills)), plan.staging_bytes)
        if choice.strategy == "own":
            execute_own(plan.transfers, files, reader, destination, staging, memory)
        elif fills is not None:
            execute(fills, fills, destination, staging, memory)
            fills.close()
        memory.settle()
        if choice.strategy != "once":
            compare(plan.checks, reader, destination, staging)
        elif (checks := share(copies=True)) is not None:
            decoded.announce(_shared(planned, checks))
            compare(checks, checks, destination, staging)
            checks.close()
    shared = [one for one in (fills, checks) if one is not None]
    return ReadCost(
        bytes_read=files.bytes_read,
        requests=asked.total,
        bytes_sent=sum(one.bytes_sent for one in shared),
        staging_peak_bytes=staging.peak_bytes
        + reader.peak_bytes
        + decoded.peak_bytes
        + max(map(_held_by, shared), default=0),
        page_cache=page_cache,
        pages=memory.describe(),
        reads=files.describe_reads(),
        strategy=choice.describe(),
    )


def _scaled(planned: Planned, choice: Choice, fills: SharedReader | None) -> Iterator[tuple[Coded, Box]]:
    """The boxes of tensors in parts that this rank is going to read."""
    plan, catalog = planned.plan, planned.catalog
    transfers = [
        *(plan.transfers if choice.strategy == "own" else ()),
        *(plan.checks if choice.strategy != "once" else ()),
    ]
    spans = [] if fills is None else list(fills.spans())
    paths = {t.path for t in transfers} | {path for path, _, _ in spans}
    hosts = [host for path, host in plan.conversions.items() if path in paths]
    yield from boxes_of_transfers(transfers, catalog.coded)
    yield from boxes_of_spans(spans, catalog.coded, planned.io.parts_bytes)
    yield from boxes_of_conversions(hosts, catalog.coded, catalog.tensors)


def _shared(planned: Planned, reader: SharedReader | None) -> Iterator[tuple[Coded, Box]]:
    """The boxes of tensors in parts that this rank reads for others, too."""
    spans = reader.spans() if reader is not None else ()
    return boxes_of_spans(spans, planned.catalog.coded, planned.io.parts_bytes)


def _held_by(shared: SharedReader | None) -> int:
    return 0 if shared is None else shared.memory_bytes


def _beside(planned: Planned, held_bytes: int) -> IOOptions:
    """The staging budget without the largest host conversion, and without what is held for buckets."""
    largest = max((host.staging_bytes for host in planned.plan.conversions.values()), default=0)
    left = planned.io.staging_bytes - largest - held_bytes
    return replace(planned.io, staging_bytes=max(left, LEAST_STAGING_BYTES))


# ----------------------------------------------------------------------------------------------------
# What must be equal in the plans of all ranks: a hash of it, and words for ranks that disagree.


def fingerprint(plan: Plan, recorded: Mapping[str, int]) -> str:
    """What must be equal on all ranks: of the plan names, shapes, dtypes and recipes of the whole model, not boxes; and the digests that
    the source records of its tensors, which ranks compare together."""
    digest = hashlib.blake2b(digest_size=16)
    known: dict[int, str] = {}
    grown = {one.name: one.rule for one in plan.grown}
    for w in plan.wanted:
        recipe = plan.recipes.get(w.name)
        short = None if recipe is None else _short_form(recipe, w.shape, known)
        kind = w.name, w.aliases, w.shape, grown.get(w.name)
        digest.update(repr((*kind, w.dtype, short, recorded.get(w.name))).encode())
    return digest.hexdigest()


def _short_form(recipe: Recipe, shape: tuple[int, ...], known: dict[int, str]) -> object:
    """A recipe in what ``repr`` is quick with; of a tensor stored as it is wanted, its stored name.

    ``known``: loops in words by their id. Thousands of experts share them.
    """
    if len(recipe.tiles) == 1 and not recipe.copies and is_identity(recipe.tiles[0], shape):
        return recipe.tiles[0].source
    parts = []
    for tiles in (recipe.tiles, *recipe.copies):
        for t in tiles:
            loops = known.get(id(t.loops))
            if loops is None:
                loops = known[id(t.loops)] = repr(t.loops)
            parts.append((t.source, t.source_start, t.target_start, loops))
        parts.append(("", (), (), "end"))
    return parts, recipe.empty


def in_words(plan: Plan, recorded: Mapping[str, int]) -> str:
    """A plan in words, for ranks that disagree: number of tensors, bytes, dtypes, and a hash of the digests that the source records."""
    counts = Counter(w.dtype for w in plan.wanted)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(counts.items()))
    nbytes = sum(w.nbytes for w in plan.wanted)
    content = ""
    if recorded:
        content = (
            "; content " + hashlib.blake2b(repr(sorted(recorded.items())).encode(), digest_size=4).hexdigest()
        )
    return f"a model of {len(plan.wanted)} tensors ({kinds}; {nbytes} bytes{content})"


# ----------------------------------------------------------------------------------------------------
# Opens a source on every rank, also where only some ranks see its files.

_ANY = WeightsChoice()


def open_for_all(
    source: str | os.PathLike[str] | Catalog, ranks: Ranks, *, choice: WeightsChoice = _ANY
) -> Catalog:
    """The catalog of a source. A rank on which the path does not exist gets it from the first rank that has the path; a
    URL is opened by rank 0 alone.

    Every rank must call it; one agreement if every rank has the path. Raises :class:`SourceError`, or :class:`RankError`.
    """
    opened: list[Catalog] = []

    def look() -> bool:
        if isinstance(source, Catalog):
            opened.append(source)
        elif ranks.world_size == 1 or (
            ranks.rank == 0 if is_url(os.fspath(source)) else os.path.lexists(source)
        ):
            opened.append(open_catalog(source, choice=choice))
        return bool(opened)

    seen = ranks.combine("open source", look, list)
    if not any(seen):
        with ranks.agree("open source"):
            assert not isinstance(source, Catalog)
            opened.append(open_catalog(source, choice=choice))  # raises: the path exists on no rank
    elif not all(seen):
        first = seen.index(True)
        content = ranks.combine(
            "send the catalog",
            lambda: packed_catalog(opened[0]) if ranks.rank == first else b"",
            lambda contents: contents[first],
        )
        opened.append(unpacked_catalog(content))
    return opened[0]


# ----------------------------------------------------------------------------------------------------
# ``load``: fills an already sharded model from stored tensors.

Names = Mapping[str, str] | Callable[[str], str]


@announced("load", "source")
@gc_paused()
def load(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    names: Names | None = None,
    converter: Converter | None = None,
    key_mapping: Mapping[str, str] | None = None,
    allow_unused: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    grow: Mapping[str, GrowRule] | None = None,
    adapter: Any = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    io: IOOptions | None = None,
    verify: Literal["cover", "digest"] | None = None,
    allow_plain: Sequence[str] = (),
) -> LoadReport:
    """Load the weights in ``source`` into ``model`` in place: every tensor, or one error that lists all problems.

    Loads every parameter and persistent buffer: DTensors with any FSDP2, HSDP, TP or EP placements, plain tensors, scalars, integers and
    tied tensors. Each rank reads only the bytes of its own shards. Parameters keep their identity, dtype, wrapping, padding and
    ``requires_grad``. The random number generators and torch's settings aren't touched.

    Args:
        model: any module; tensors on meta are allocated on ``device`` first.
        source: a safetensors file or directory, or a shardwise checkpoint; a local path, or a URL in an object store.
        names: stored name → module name, as a mapping (names that aren't in it stay unchanged) or a function. Default: the transformers
            renames of the model's class (for a model wrapped by PEFT, those of the base), or none for other modules.
        converter: a function that turns the stored state dict into the module's, such as another library's own function for models from the
            Hub. It's called once, with tensors that have shapes but no data, so each rank still reads only its own bytes. It may rename, split,
            join, reorder, and drop tensors. Only one of ``names``, ``converter``, and ``key_mapping`` can be given.
        key_mapping: regex → replacement, applied before the renames of the model's class, as in ``from_pretrained``. No effect on a
            checkpoint, which stores the module's names.
        allow_unused: ``fnmatch`` patterns of stored names that may be left over.
        allow_missing: ``fnmatch`` patterns of module names that ``source`` may lack. They are initialized by the model's own rule.
        grow: ``fnmatch`` pattern of module names → the rule that makes rows that ``source`` lacks, for tensors that have more rows in the
            model (new tokens, more labels); the first pattern that matches counts. The stored rows are loaded bit for bit, and come
            first. ``"mean"``: the mean of the stored rows, as loaded, in each column. It is summed in integers, so it has the same bits
            at every world size; ranks exchange 16 bytes per column and read nothing more. ``"init"``: the model's own rule, with
            ``seed``; each rank that holds new rows draws the module in full, as for ``allow_missing``. New elements of a buffer keep
            the values that it was built with.
        adapter: for a ``PeftModel`` whose base is in ``source``: the directory of an adapter, or a PEFT config (such as
            ``model.peft_config["default"]``) for PEFT's own initial values, or a mapping of adapter names to either. Base and
            adapters are planned and checked together; an adapter's stored names start with its own name
            (``default:base_model.model.…``). DoRA's magnitudes are computed from the loaded weights, and ``modules_to_save`` without
            files are copied from the base. None: ``source`` contains the adapters, too.
        seed: seed for initialized parameters, whose values are the same at every world size.
        device: where tensors on meta are allocated. Default: the mesh's device, otherwise the CPU.
        io: staging memory and time limits.
        verify: ``"cover"`` checks the plan only. ``"digest"`` also compares the digest of every tensor for which the source records one, unless
            the load changes its dtype or grows it. None: ``"digest"`` if the source records digests (a checkpoint does), otherwise ``"cover"``.
        allow_plain: ``fnmatch`` patterns of trainable parameters that may stay plain tensors among sharded ones. FSDP2 doesn't reduce their
            gradients, so you must. Parameters whose gradients ``shard`` reduces don't need a pattern.

    Every rank of the default process group must call it. Memory: this rank's shards plus ``io.staging_bytes``, or ``io.ring_bytes`` for a device. Raises
    :class:`PlanError` before any weights are read (including for adapters without a sharded form: a method other than LoRA, an
    initialization that needs weights or data, a quantized base, or settings that differ from the model's),
    :class:`SourceError`, :class:`LayoutError`, :class:`ShardError` (trainable plain parameters that aren't in ``allow_plain``), or
    :class:`RankError` on every surviving rank. Raises :class:`TypeError` for a string or a mapping where a tuple of patterns is expected.
    """
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    with counting() as looks:
        opened = open_for_all(source, ranks)
    hub: HubRules | None = None
    live: LiveModel
    base: Collection[str] = ()
    if opened.referred:
        with ranks.agree("describe the model"):
            live = describe(model)
        base = compare_referred(opened, live, ranks)

    def prepare() -> Filling:
        nonlocal hub, live
        unused = patterns_of("allow_unused", allow_unused)
        missing = patterns_of("allow_missing", allow_missing)
        plain = patterns_of("allow_plain", allow_plain)
        rule_of = growth(grow or {})
        given = {"names": names, "converter": converter, "key_mapping": key_mapping}
        if len(several := [f"{name}=" for name, value in given.items() if value is not None]) > 1:
            raise ValueError(f"{' and '.join(several)} all rename stored tensors: give one of them")
        live = describe(model).without(base)
        catalog = dequantized(opened, lambda: live.tensors)
        if catalog.coded and hasattr(getattr(live.base, "config", None), "to_diff_dict"):
            forget_quantization(live.base.config)  # of a model that was built from the config of the source

        def declared(stored: str, name: str) -> str | None:
            if matches_any(stored, unused):
                return "caller"
            return "converter" if converter is not None and not name else None

        # The names of a checkpoint are the module's.
        if names is None and converter is None and not catalog.has_module_names:
            hub = automatic_rules(live, key_mapping)
        rules = Rules(
            resolve_names(live, catalog, names, key_mapping, hub, converter),
            allow_unused=declared,
            allow_missing=lambda name: "caller" if matches_any(name, missing) else None,
            grow=rule_of,
            caller_declares=True,
            embeddings=partial(embedding_names, live.base),
        )
        options = FillOptions(io=io, device=device, seed=seed, verify=verify, allow_plain=plain)
        if adapter is None:
            return Filling(live, catalog, rules, options)
        from .adapters import combine, open_adapters

        adapters = open_adapters(model, adapter)
        return Filling(live, *combine(live, catalog, rules, adapters, key_mapping=key_mapping), options)

    report = fill(prepare, ranks)
    if hub is not None:
        note_conversions(live.base, hub.used())
    note_base(model, opened, report, ranks)
    return noted(model, report.after(looks))


def note_base(model: nn.Module, catalog: Catalog, report: LoadReport, ranks: Ranks) -> None:
    """Sum up a base under adapters that a load read from files, so that checkpoints needn't hold it. Collective.

    Not one that it read from a checkpoint, which may be the only file that has it.
    """
    if is_declared(model):  # only some ranks may have adapters
        return
    if catalog.has_module_names or not has_adapters(model):
        return
    from ..digests import remember_base

    made = {new.name for new in report.initialized} | {grown.name for grown in report.grown}
    with phase("sum digests"), ranks.agree("sum the base"):
        remember_base(describe(model), made, ranks)


@frozen(kw_only=True)
class FillOptions:
    """The options that all loaders share. See :func:`load` for the fields."""

    io: IOOptions
    device: torch.device | str | None = None
    seed: int = 0
    verify: Literal["cover", "digest"] | None = None
    allow_plain: Sequence[str] | None = None
    """None lets any parameter be plain."""


@frozen
class Filling:
    """A model, or an optimizer's states (:meth:`.LiveModel.of_states`), to be filled, and from what."""

    live: LiveModel
    catalog: Catalog
    rules: Rules
    options: FillOptions
    memory: HostMemory | None = None
    """Where the tensors were allocated, if none is on meta anymore."""


def fill(prepare: Callable[[], Filling], ranks: Ranks) -> LoadReport:
    """The pipeline behind :func:`load`, ``load_pretrained`` and ``restore``: plan, prove, read, place, verify.

    ``prepare`` is rank-local; ranks hear of its failure as of one in planning.
    """
    label = "plan the load"
    given: Filling
    planned: Planned
    recorded: dict[str, int]
    new: list[str] = []
    started = 0.0
    host = host_budget()

    def told() -> dict[str, Any]:
        nonlocal given, planned, recorded, started
        given = prepare()
        started = time.perf_counter()
        if given.live.fsdp1_problem is not None:
            raise ShardError(given.live.fsdp1_problem)
        if given.options.allow_plain is not None:
            _refuse_unsharded(given.live, given.options.allow_plain)
        planned = plan_load(given.live, given.catalog, given.rules, io=given.options.io)
        parameters = {
            w.name for w in planned.plan.wanted if w.kind == "parameter"
        }  # buffers get values from construction
        new.extend(d.name for d in planned.plan.initialized if d.name in parameters)
        drawn = [*new, *(one.name for one in planned.plan.grown if one.rule == "init")]
        if drawn:
            from .initialize import check_rules

            check_rules(given.live, drawn)
        if torch.device(given.options.device or default_device(given.live.stored)).type == "cpu":
            new_bytes = sum(local_tensor(t.tensor).nbytes for t in given.live.stored if t.tensor.is_meta)
            refuse_too_large(new_bytes, host)
        recorded = {} if given.options.verify == "cover" else recorded_digests(given.catalog, planned.plan)
        words = in_words(planned.plan, recorded)
        return asdict(facts_of(planned, fingerprint(planned.plan, recorded), words))

    def chosen(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return choose(label, given.options.io.strategy, given.catalog.nbytes, facts)

    with phase("plan"):
        choice = Choice(**ranks.combine(label, told, chosen))
    plan, live, catalog, options = planned.plan, given.live, given.catalog, given.options
    sums = None
    read = time.perf_counter()
    with phase("read"), ranks.agree("read"):
        memory = given.memory or HostMemory(options.io.pages)
        materialize(live, options.device or default_device(live.stored), memory)
        live = live.refreshed()
        cost = carry_out(planned, choice, live, ranks, memory, this_operation(catalog.root))
        if recorded and not new:  # before the ranks meet: another rank may still read
            from ..digests import own_sums_of_model

            with phase("sum digests"):
                sums = own_sums_of_model(live, ranks)
    if plan.grown:  # first: DoRA's magnitudes are norms of rows
        from .initialize import fill_new_rows

        fill_new_rows(live, plan.grown, options.seed, ranks)
    if new:
        # A separate round: DoRA's magnitudes may be gathered, and no rank may wait there for one that failed.
        from .initialize import fill_by_rule

        with ranks.agree("initialize"):
            fill_by_rule(live, options.seed, new)
    forget_meta_buffers(live.root)
    if recorded:
        with phase("compare digests"):
            check_digests(live, catalog, recorded, ranks, sums)
    if not catalog.has_module_names:
        remember(live.root, plan.recipes, catalog.tensors, plan.grown)
        remember_source((live.root, live.base), catalog)
    return LoadReport.of(
        plan,
        cost,
        source=catalog.root,
        seconds_plan=read - started,
        seconds_read=time.perf_counter() - read,
        digests_compared=len(recorded),
        host=host,
        is_kept=kept_in_fp32_of_class(live.base) if plan.rounded else lambda _: False,
    )


def plan_load(
    live: LiveModel, catalog: Catalog, rules: Rules, *, io: IOOptions, rank: int | None = None
) -> Planned:
    """The plan that a load would run, for this rank or any other. Pure: nothing is read or allocated."""
    layout = live.layout(rank=rank)
    rows = ((name, w.shape[0]) for w in layout.wanted if w.shape for name in (w.name, *w.aliases))
    catalog = without_padding(catalog, rows)
    matched = match_rules(catalog, layout.wanted, rules)
    matched.problems += _unfilled_buffers(live, {d.name for d in matched.initialized} | matched.grown.keys())
    return Planned(build_plan(catalog, layout, matched, io), live, catalog, matched, io)


def _unfilled_buffers(live: LiveModel, initialized: set[str]) -> list[str]:
    """Buffers without content that nothing stored fills: construction alone gives their values.

    A buffer that construction left on meta, and that got memory but was never written since, holds garbage.
    """
    problems = []
    for t in live.tensors:
        if t.kind != "buffer" or not is_unknown(t) or (t.persistent and t.name not in initialized):
            continue
        if not t.tensor.is_meta and not t.tensor.is_inference() and version_of(t.tensor):
            continue
        state = "is on meta" if t.tensor.is_meta else "was left on meta by construction and only given memory"
        problems.append(
            f"no value: {'' if t.persistent else 'non-persistent '}buffer {t.name!r} of shape "
            f"{list(t.tensor.shape)} {state}, and no source holds it; build the model in shardwise.meta_init(), "
            f"or give the buffer memory and fill it in place before the load"
        )
    return problems


def _refuse_unsharded(live: LiveModel, allow_plain: Sequence[str]) -> None:
    """Trainable plain parameters beside FSDP's drift apart, unless the caller or ``shard`` reduces their gradients.

    Under tensor parallelism alone every rank computes the same gradients for them, which is fine.
    """
    parameters = live.parameters
    if not live.fsdp_modules or not any(isinstance(t.tensor, DTensor) for t in parameters):
        return
    reduced = reduced_parameters(live.fsdp_modules)
    plain = [
        t.name
        for t in parameters
        if not isinstance(t.tensor, DTensor)
        and id(t.tensor) not in reduced
        and t.tensor.requires_grad
        and t.tensor.numel()
        and not (is_declared(live.root) and live.geometries[t.name].copies == 1)
        and not any(matches_any(name, allow_plain) for name in t.names)
    ]
    if plain:
        raise ShardError(
            f"{len(plain)} trainable parameters are plain tensors among sharded ones, and their gradients are not "
            f"reduced: {', '.join(plain)}. Shard them too (a module that is not wrapped itself leaves its "
            f"parameters plain), freeze them, or name them in allow_plain=(…) and reduce their gradients yourself"
        )


def resolve_names(
    live: LiveModel,
    catalog: Catalog,
    names: Names | None,
    key_mapping: Mapping[str, str] | None,
    hub: HubRules | None,
    converter: Converter | None = None,
) -> Resolve:
    """From stored tensors to module names, as the caller says, or as the model's class does."""
    if converter is not None:
        return by_converter(converter)
    if callable(names):
        return renamed(lambda stored: {n: names(n) for n in stored})
    if names is not None:
        given = dict(names)
        lost = sorted(set(given) - set(catalog.tensors))
        if lost:
            raise PlanError(f"names= maps stored tensors that {catalog.root} doesn't contain", tuple(lost))
        return renamed(lambda stored: {n: given.get(n, n) for n in stored})
    if hub is not None:
        return wrapped(live, hub.resolve)
    if key_mapping is None or catalog.has_module_names:
        return wrapped(live, same_names)
    return wrapped(live, by_key_mapping(key_mapping))


def recorded_digests(catalog: Catalog, plan: Plan) -> dict[str, int]:
    """The digests that a source records of the tensors that a plan fills, where these were stored whole in their own dtype."""
    recorded = {}
    for w in plan.wanted if catalog.digests else ():
        source = _stored_whole(plan.recipes.get(w.name))
        if source is not None and source in catalog.digests:
            stored = catalog.tensors[source]
            if (stored.dtype, stored.shape) == (w.dtype, w.shape):
                recorded[w.name] = catalog.digests[source]
    return recorded


def check_digests(
    live: LiveModel,
    catalog: Catalog,
    recorded: Mapping[str, int],
    ranks: Ranks,
    sums: NDArray[np.uint64] | None,
) -> None:
    """Compare the digests of what was loaded with those that the source records. Every rank must call it.

    ``sums``: this rank's, if it has made them. Raises :class:`RankError`/:class:`IntegrityError` naming every tensor that differs.
    """
    from ..digests import differing_from

    if found := differing_from(recorded, live, ranks, sums):  # on every rank
        with ranks.agree("compare digests"):
            wrong = [f"{n}: loaded {digest:016x}, recorded {recorded[n]:016x}" for n, digest in found.items()]
            raise IntegrityError(
                "content differs from what was saved: " + "; ".join(wrong[:20]), path=catalog.root
            )


def _stored_whole(recipe: Recipe | None) -> str | None:
    """The stored tensor that equals a wanted one, element by element in order; None if there is none."""
    if recipe is None:
        return None
    if not recipe.tiles:
        return recipe.empty[0] if len(recipe.empty) == 1 else None
    (tile, *more) = recipe.tiles
    straight = all((v.source_dim, v.source_step) == (v.target_dim, v.target_step) for v in tile.loops)
    return tile.source if straight and not more and tile.source_start == tile.target_start else None


# ----------------------------------------------------------------------------------------------------
# Frozen tensors of which a checkpoint holds only digests: the live ones must be those that were saved.


def compare_referred(catalog: Catalog, live: LiveModel, ranks: Ranks) -> Collection[str]:
    """Prove that the live tensors are those of the base that the run was saved with, and name them.

    Collective; changes nothing, and does nothing for a source that holds all of its tensors. Raises :class:`StateError`, naming the
    tensors: the checkpoint is whole, but this is not its base.
    """
    if not catalog.referred:
        return ()
    path = catalog.root
    expected = {live.first_names.get(name, name): entry for name, entry in catalog.referred.items()}
    named = {t.name: t for t in live.stored}
    with ranks.agree("look for the base"):
        unlike = [
            f"{name}: {entry.dtype} {list(entry.shape)} when saved, {_held(named.get(name), live)} now"
            for name, entry in expected.items()
            if _held(named.get(name), live) != f"{entry.dtype} {list(entry.shape)}"
        ]
        _refuse(unlike, path, adapters_of_one(expected, named))
    from ..digests import differing_digests

    digests = {name: entry.digest for name, entry in expected.items()}
    try:
        held = {name: named[name].tensor for name in expected}
        found = differing_digests(held, live.geometries, ranks, digests)
    except IntegrityError as error:  # the replicas differ: the checkpoint is not at fault
        raise StateError(f"{path}: refers to frozen tensors of a base, but here {error}") from error
    with ranks.agree("compare the base"):
        _refuse(
            [
                f"{name}: digest {digests[name]:016x} when saved, {digest:016x} now"
                for name, digest in found.items()
            ],
            path,
        )
    return expected


def _held(named: NamedTensor | None, live: LiveModel) -> str:
    if named is None:
        return "nothing"
    if named.tensor.is_meta:
        return "no content (it is on meta)"
    dtype, shape = live.spec(named)
    return f"{dtype} {list(shape)}"


def _refuse(unlike: list[str], path: str, adapters: str = "") -> None:
    if unlike:
        advice = adapters or ". Load the base that the saved run began with, quantized the same way, first"
        raise StateError(
            f"{path}: holds only digests of its base, which is not the one of this run: {'; '.join(unlike[:5])}"
            f"{f'; and {len(unlike) - 5} more' if len(unlike) > 5 else ''}{advice}"
        )
