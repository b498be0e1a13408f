"""``load``: fill a model that is already sharded from stored tensors. The function below is the pipeline."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from .catalog import Catalog
from .catalog.open import open_catalog
from .dist import Ranks
from .errors import IntegrityError, PlanError
from .layout.model import layout_of, local_tensor, reshard
from .names import named_tensors
from .place.copy import Destination, Staging, compare, execute
from .place.initialize import check_rules, initialize
from .place.materialize import materialize
from .place.meta_init import forget_meta_buffers
from .plan import IOOptions, Plan, build_plan
from .proof.report import LoadReport
from .read import FileReader
from .recipe.match import Declaration, Resolve, Rules, match_rules, matches_any, renamed, same_names
from .recipe.record import remember

__all__ = ["fill", "load"]

Names = Mapping[str, str] | Callable[[str], str]


def load(
    model: nn.Module,
    source: str | os.PathLike[str] | Catalog,
    *,
    names: Names | None = None,
    unused: Sequence[str] = (),
    init: Mapping[str, str] | None = None,
    device: torch.device | str | None = None,
    io: IOOptions | None = None,
    verify: Literal["cover", "digest"] = "cover",
) -> LoadReport:
    """Fill ``model`` in place from ``source``; complete and proved, or one error that lists all of it.

    Every parameter and persistent buffer is filled: DTensors with any FSDP2/HSDP/TP/EP placements, plain
    tensors, scalars, integers, ties. Each rank reads only the bytes of its own shards. Parameters keep
    identity, dtype, wrapping, padding and ``requires_grad``; RNG and torch settings are untouched.

    Args:
        model: any module; what is on meta gets memory on ``device`` first.
        source: a safetensors file or directory, a shardwise checkpoint, or a catalog.
        names: stored name → module name, as a mapping (others stay as they are) or a function.
            Default: the transformers renames of the model's class, or none for other modules.
        unused: ``fnmatch`` patterns of stored names that may be left over.
        init: pattern of module names that may be missing → rule; ``"model"`` is the model's own rule.
        device: where meta tensors get memory. Default: the mesh's device, else CPU.
        io: staging and time limits.
        verify: ``"cover"`` proves the plan; ``"digest"`` also compares content digests, where the
            source records them.

    Every rank of the default process group must call it. Memory: this rank's shards plus
    ``io.staging_bytes``. Raises :class:`PlanError` before payload is read, :class:`SourceError`,
    :class:`LayoutError`, or :class:`RankError` alike on every living rank.
    """
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    with ranks.agree("open source"):
        catalog = source if isinstance(source, Catalog) else open_catalog(source)
        declared = _init_rules(init)
        rules = Rules(
            _resolve(model, catalog, names),
            unused=lambda stored, _: "caller" if matches_any(stored, unused) else None,
            init=lambda name: "caller" if matches_any(name, declared) else None,
        )
    return fill(model, catalog, rules, device=device, io=io, ranks=ranks, verify=verify)


def fill(
    model: nn.Module,
    catalog: Catalog,
    rules: Rules,
    *,
    device: torch.device | str | None = None,
    io: IOOptions,
    ranks: Ranks,
    verify: Literal["cover", "digest"] = "cover",
    seed: int = 0,
) -> LoadReport:
    """The pipeline behind :func:`load` and ``load_pretrained``: plan, prove, read, place, verify."""
    started = time.perf_counter()
    reshard(model)
    with ranks.agree("plan the load"):
        plan = plan_load(model, catalog, rules, io=io)
        new = _parameters_of(plan.initialized, plan)
        if new:
            check_rules(model, new)
    ranks.all_equal("plan the load", _fingerprint(plan), lambda _: _describe(plan))
    planned = time.perf_counter()
    with ranks.agree("read"), FileReader(ranks.tick) as reader:
        materialize(model, device or _device_of(model))
        destination = Destination(_local_tensors(model))
        staging = Staging(io, plan.staging_bytes)
        execute(plan.transfers, reader, destination, staging)
        compare(plan.checks, reader, destination, staging)
        if new:
            initialize(model, seed, names=new)
    forget_meta_buffers(model)
    if verify == "digest":
        check_digests(model, catalog, plan, ranks)
    if catalog.kind != "checkpoint":
        remember(model, plan.recipes, catalog.tensors)
    return LoadReport(
        source=catalog.root,
        tensors=len(plan.recipes),
        model_bytes=sum(w.nbytes for w in plan.wanted),
        local_bytes=plan.local_nbytes,
        bytes_read=reader.bytes_read,
        staging_peak_bytes=staging.peak_bytes,
        seconds_plan=planned - started,
        seconds_read=time.perf_counter() - planned,
        unused=plan.unused,
        initialized=plan.initialized,
        ignored_files=plan.ignored_files,
        verified=verify,
    )


def plan_load(
    model: nn.Module, catalog: Catalog, rules: Rules, *, io: IOOptions, rank: int | None = None
) -> Plan:
    """The plan that a load would run, for this rank or any other. Pure: nothing is read or allocated."""
    layout = layout_of(model, rank=rank)
    matched = match_rules(catalog, layout.wanted, rules)
    matched.problems += _unfilled_buffers(model, {d.name for d in matched.initialized})
    return build_plan(catalog, layout, matched, io)


def _unfilled_buffers(model: nn.Module, initialized: set[str]) -> list[str]:
    """Buffers without content that nothing stored fills: construction alone gives their values."""
    return [
        f"no value: {'' if t.persistent else 'non-persistent '}buffer {t.name!r} of shape {list(t.tensor.shape)} "
        f"is on meta, and no source holds it; build the model in shardwise.meta_init() or compute it before the load"
        for t in named_tensors(model)
        if t.kind == "buffer" and t.tensor.is_meta and (t.name in initialized or not t.persistent)
    ]


def _parameters_of(initialized: Sequence[Declaration], plan: Plan) -> list[str]:
    """Names of the parameters that need initial values; buffers have theirs from construction."""
    kinds = {w.name: w.kind for w in plan.wanted}
    return [d.name for d in initialized if kinds[d.name] == "parameter"]


def _init_rules(init: Mapping[str, str] | None) -> dict[str, str]:
    """The patterns that may be initialised; ``"model"`` is the only rule so far."""
    rules = dict(init or {})
    for pattern, rule in rules.items():
        if rule != "model":
            raise ValueError(f"init={{{pattern!r}: {rule!r}}}: the rule must be 'model' (the model's own)")
    return rules


def _resolve(model: nn.Module, catalog: Catalog, names: Names | None) -> Resolve:
    """From stored tensors to module names, as the caller says, or as the model's class does."""
    if callable(names):
        return renamed(lambda stored: {n: names(n) for n in stored})
    if names is not None:
        given = dict(names)
        lost = sorted(set(given) - set(catalog.tensors))
        if lost:
            raise PlanError(f"names= maps stored tensors that {catalog.root} does not hold", tuple(lost))
        return renamed(lambda stored: {n: given.get(n, n) for n in stored})
    if catalog.kind == "checkpoint":
        return same_names
    from .recipe.transformers import automatic_rules

    rules = automatic_rules(model)
    return rules.resolve if rules else same_names


def _device_of(model: nn.Module) -> torch.device:
    """Where meta tensors get memory by default: the mesh's device type, else CPU."""
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            kind = parameter.device_mesh.device_type
            if kind == "cpu":
                return torch.device("cpu")
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


def _local_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {t.name: local_tensor(t.tensor) for t in named_tensors(model) if t.persistent}


def _fingerprint(plan: Plan) -> bytes:
    """What every rank must agree on: names, shapes, dtypes and recipes of the whole model, not its own boxes."""
    digest = hashlib.blake2b(digest_size=16)
    for w in plan.wanted:
        digest.update(repr((w.name, w.aliases, w.shape, w.dtype, plan.recipes.get(w.name))).encode())
    return digest.digest()


def _describe(plan: Plan) -> str:
    """A plan in words for ranks that disagree: how many tensors and bytes, and of which dtypes."""
    counts = Counter(w.dtype for w in plan.wanted)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(counts.items()))
    nbytes = sum(w.nbytes for w in plan.wanted)
    return f"a model of {len(plan.wanted)} tensors ({kinds}; {nbytes} bytes)"


def check_digests(model: nn.Module, catalog: Catalog, plan: Plan, ranks: Ranks) -> None:
    """Compare the digests of what was loaded with those that the source records. Every rank must call it.

    Raises :class:`RankError`/:class:`IntegrityError` naming every tensor that differs.
    """
    from .proof.model import model_digests

    found = model_digests(model, ranks)
    with ranks.agree("compare digests"):
        wrong = [
            f"{w.name}: loaded {found[w.name]:016x}, recorded {catalog.digests[source]:016x}"
            for w in plan.wanted
            if (recipe := plan.recipes.get(w.name)) is not None
            and (source := recipe.tiles[0].source) in catalog.digests
            and catalog.tensors[source].dtype == w.dtype
            and found[w.name] != catalog.digests[source]
        ]
        if wrong:
            raise IntegrityError(
                "content differs from what was saved: " + "; ".join(wrong[:20]), path=catalog.root
            )
