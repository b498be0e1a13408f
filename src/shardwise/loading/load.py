"""``load``: fills an already sharded model from stored tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..adapters.names import wrapped
from ..catalog import Catalog
from ..errors import IntegrityError, PlanError, ShardError
from ..internals.torch import local_tensor, version_of
from ..internals.transformers import kept_in_fp32_of_class
from ..layout.live import LiveModel, describe
from ..models.homes import remember_source
from ..models.host_budget import HostBudget, host_budget, refuse_too_large
from ..models.memory import default_device, materialize
from ..models.meta_init import forget_meta_buffers, is_unknown
from ..models.unquantized import forget_quantization
from ..names import patterns_of
from ..objects import frozen, gc_paused
from ..operations.announced import announced
from ..operations.operation import this_operation
from ..operations.recorder import phase
from ..planning import IOOptions, Plan, build_plan
from ..quantized.dequantized import dequantized
from ..ranks.ranks import Ranks
from ..recipe.match import (
    Recipe,
    Resolve,
    Rules,
    by_key_mapping,
    match_rules,
    matches_any,
    renamed,
    same_names,
)
from ..recipe.origin import remember
from ..recipe.transformers import HubRules, automatic_rules, embedding_names, note_conversions
from ..sharding.replicated import reduced_parameters
from ..storage import counting
from .carry_out import carry_out
from .fingerprint import fingerprint, in_words
from .report import LoadReport, noted
from .source import open_for_all
from .strategy import Choice, Planned, choose, facts_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["FillOptions", "Filling", "Names", "fill", "load"]

Names = Mapping[str, str] | Callable[[str], str]


@announced("load", "source")
@gc_paused()
def load(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    names: Names | None = None,
    key_mapping: Mapping[str, str] | None = None,
    allow_unused: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
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
    ``requires_grad``. The random generators and torch's settings aren't touched.

    Args:
        model: any module; tensors on meta are allocated on ``device`` first.
        source: a safetensors file or directory, or a shardwise checkpoint; a local path, or a URL in an object store.
        names: stored name → module name, as a mapping (names that aren't in it stay unchanged) or a function. Default: the transformers
            renames of the model's class (for a model wrapped by PEFT, those of the base), or none for other modules. Can't be combined with
            ``key_mapping``.
        key_mapping: regex → replacement, applied before the renames of the model's class, as in ``from_pretrained``. No effect on a
            checkpoint, which stores the module's names.
        allow_unused: ``fnmatch`` patterns of stored names that may be left over.
        allow_missing: ``fnmatch`` patterns of module names that ``source`` may lack. They are initialized by the model's own rule.
        adapter: for a ``PeftModel`` whose base is in ``source``: the directory of an adapter, or a PEFT config (such as
            ``model.peft_config["default"]``) for PEFT's own initial values, or a mapping of adapter names to either. Base and
            adapters are planned and checked together; an adapter's stored names start with its own name
            (``default:base_model.model.…``). DoRA's magnitudes are computed from the loaded weights, and ``modules_to_save`` without
            files are copied from the base. None: ``source`` contains the adapters, too.
        seed: seed for initialized parameters, whose values are the same at every world size.
        device: where tensors on meta are allocated. Default: the mesh's device, otherwise the CPU.
        io: staging memory and time limits.
        verify: ``"cover"`` checks the plan only. ``"digest"`` also compares the digest of every tensor for which the source records one, unless
            the load changes its dtype. None: ``"digest"`` if the source records digests (a checkpoint does), otherwise ``"cover"``.
        allow_plain: ``fnmatch`` patterns of trainable parameters that may stay plain tensors among sharded ones. FSDP2 doesn't reduce their
            gradients, so you must. Parameters whose gradients ``shard`` reduces need no pattern.

    Every rank of the default process group must call it. Memory: this rank's shards plus ``io.staging_bytes``, or ``io.ring_bytes`` for a device. Raises
    :class:`PlanError` before payload is read (also for adapters without a sharded form: a method other than LoRA, an
    initialization that needs weights or data, a quantized base, or settings that differ from the model's),
    :class:`SourceError`, :class:`LayoutError`, :class:`ShardError` (trainable plain parameters that aren't in ``allow_plain``), or
    :class:`RankError` on every surviving rank. Raises :class:`TypeError` for a string or a mapping where a tuple of patterns is expected.
    """
    io = io or IOOptions()
    ranks = Ranks.current(timeout_s=io.timeout_s)
    with counting() as looks:
        opened = open_for_all(source, ranks)
    hub: HubRules | None = None

    def prepare() -> Filling:
        nonlocal hub
        unused = patterns_of("allow_unused", allow_unused)
        missing = patterns_of("allow_missing", allow_missing)
        plain = patterns_of("allow_plain", allow_plain)
        if names is not None and key_mapping is not None:
            raise ValueError("names= and key_mapping= both rename stored tensors: give one of them")
        live = describe(model)
        catalog = dequantized(opened, lambda: live.tensors)
        if catalog.coded and hasattr(getattr(live.base, "config", None), "to_diff_dict"):
            forget_quantization(live.base.config)  # of a model that was built from the config of the source
        hub = hub_rules_of(live, catalog, key_mapping) if names is None else None
        rules = Rules(
            _resolve(live, catalog, names, key_mapping, hub),
            allow_unused=lambda stored, _: "caller" if matches_any(stored, unused) else None,
            allow_missing=lambda name: "caller" if matches_any(name, missing) else None,
            caller_declares=True,
            embeddings=partial(embedding_names, live.base),
        )
        options = FillOptions(io=io, device=device, seed=seed, verify=verify, allow_plain=plain)
        if adapter is None:
            return Filling(live, catalog, rules, options)
        from ..adapters.files import combine, open_adapters

        adapters = open_adapters(model, adapter)
        return Filling(live, *combine(live, catalog, rules, adapters, key_mapping=key_mapping), options)

    filled = fill(prepare, ranks)
    if hub is not None:
        note_conversions(filled.live.base, hub.used())
    return noted(model, filled.report.after(looks))


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
    """A model to be filled, and from what."""

    live: LiveModel
    catalog: Catalog
    rules: Rules
    options: FillOptions


@frozen
class Filled:
    """A filled model, and how it was filled."""

    live: LiveModel
    report: LoadReport


def fill(prepare: Callable[[], Filling], ranks: Ranks) -> Filled:
    """The pipeline behind :func:`load` and ``load_pretrained``: plan, prove, read, place, verify.

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
        _refuse_unfillable(given.live, given.options.allow_plain)
        planned = plan_load(given.live, given.catalog, given.rules, io=given.options.io)
        new.extend(_parameters_of(planned.plan))
        if new:
            from .initialize import check_rules

            check_rules(given.live, new)
        _refuse_too_large(given.live, given.options.device, host)
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
        memory = materialize(live, options.device or default_device(live.parameters), options.io.pages)
        live = live.refreshed()
        cost = carry_out(planned, choice, live, ranks, memory, this_operation(catalog.root))
        if recorded and not new:  # before the ranks meet: another rank may still read
            from ..digests.live import own_sums_of_model

            with phase("sum digests"):
                sums = own_sums_of_model(live, ranks)
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
        remember(live.root, plan.recipes, catalog.tensors)
        remember_source((live.root, live.base), catalog)
    report = LoadReport.of(
        plan,
        cost,
        source=catalog.root,
        seconds_plan=read - started,
        seconds_read=time.perf_counter() - read,
        digests_compared=len(recorded),
        host=host,
        is_kept=kept_in_fp32_of_class(live.base) if plan.rounded else lambda _: False,
    )
    return Filled(live, report)


def plan_load(
    live: LiveModel, catalog: Catalog, rules: Rules, *, io: IOOptions, rank: int | None = None
) -> Planned:
    """The plan that a load would run, for this rank or any other. Pure: nothing is read or allocated."""
    layout = live.layout(rank=rank)
    matched = match_rules(catalog, layout.wanted, rules)
    matched.problems += _unfilled_buffers(live, {d.name for d in matched.initialized})
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


def _refuse_unfillable(live: LiveModel, allow_plain: Sequence[str] | None) -> None:
    """Raises :class:`ShardError` for a model of FSDP1, and for plain parameters that ``allow_plain`` doesn't name."""
    if live.fsdp1_problem is not None:
        raise ShardError(live.fsdp1_problem)
    if allow_plain is not None:
        _refuse_unsharded(live, allow_plain)


def _refuse_too_large(live: LiveModel, device: torch.device | str | None, host: HostBudget | None) -> None:
    """Raises :class:`PlanError` if the memory that meta tensors get on the CPU exceeds the host's limit."""
    if torch.device(device or default_device(live.parameters)).type == "cpu":
        refuse_too_large(sum(local_tensor(t.tensor).nbytes for t in live.stored if t.tensor.is_meta), host)


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
        and not any(matches_any(name, allow_plain) for name in t.names)
    ]
    if plain:
        raise ShardError(
            f"{len(plain)} trainable parameters are plain tensors among sharded ones, and their gradients are not "
            f"reduced: {', '.join(plain)}. Shard them too (a module that is not wrapped itself leaves its "
            f"parameters plain), freeze them, or name them in allow_plain=(…) and reduce their gradients yourself"
        )


def _parameters_of(plan: Plan) -> list[str]:
    """Names of the parameters that need initial values; buffers get theirs from construction."""
    kinds = {w.name: w.kind for w in plan.wanted}
    return [d.name for d in plan.initialized if kinds[d.name] == "parameter"]


def _resolve(
    live: LiveModel,
    catalog: Catalog,
    names: Names | None,
    key_mapping: Mapping[str, str] | None,
    hub: HubRules | None,
) -> Resolve:
    """From stored tensors to module names, as the caller says, or as the model's class does."""
    if callable(names):
        return renamed(lambda stored: {n: names(n) for n in stored})
    if names is not None:
        given = dict(names)
        lost = sorted(set(given) - set(catalog.tensors))
        if lost:
            raise PlanError(f"names= maps stored tensors that {catalog.root} does not hold", tuple(lost))
        return renamed(lambda stored: {n: given.get(n, n) for n in stored})
    if hub is not None:
        return wrapped(live, hub.resolve)
    if key_mapping is None or catalog.has_module_names:
        return wrapped(live, same_names)
    return wrapped(live, by_key_mapping(key_mapping))


def hub_rules_of(
    live: LiveModel, catalog: Catalog, key_mapping: Mapping[str, str] | None = None
) -> HubRules | None:
    """The rules of a model's class for hub files; None for other modules, and for a checkpoint's module names."""
    return None if catalog.has_module_names else automatic_rules(live.base, key_mapping)


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
    from ..digests.live import differing_from

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
