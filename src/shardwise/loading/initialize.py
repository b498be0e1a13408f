"""Initial values by the model's own rule, the same at every world size and sharding; and ``clone``, a second model with the same
values.
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor

from ..digests import local_boxes as boxes_of
from ..dtypes import torch_dtype
from ..errors import LayoutError, PlanError, ShardError, StateError
from ..format.slices import replicas
from ..internals.fsdp import fsdp_parameter_ids
from ..internals.peft import has_adapters, places
from ..internals.torch import local_tensor
from ..internals.transformers import build_from_config, copy_conversions, is_transformers_model, tie_map
from ..models.classes import Rule, Template, build_template, copy_template, rules_of, run_rules
from ..models.layers import blocks_in, kept_in, put_into
from ..models.meta import default_device, forget_meta_buffers, materialize, meta_init
from ..names import NamedTensor, canonical_name, exchange_parameter, named_tensors, own_parameter, patterns_of
from ..objects import frozen
from ..operations.operation import phase
from ..planning.match import Grown, inherit
from ..ranks.ranks import Ranks
from ..rng import preserve_rng
from ..sharding.fsdp import shard_alike
from ..tensors.boxes import Box, LocalBox, whole
from ..tensors.live import LiveModel, describe, is_declared, is_elsewhere
from ..tensors.placements import local_boxes
from .adapters import adapter_rules, magnitudes, without_rule

# ----------------------------------------------------------------------------------------------------
# Initial values by the model's own rule, the same at every world size and sharding.


@frozen
class _Job:
    """One module's wanted parameters: their place in the template, and the calls that fill them."""

    name: str
    """Canonical name of the module; it determines the values, together with the seed."""
    module: nn.Module
    """The template's module."""
    wanted: tuple[tuple[str, NamedTensor], ...]
    """(attribute, live tensor)."""
    rules: tuple[Rule, ...]


@frozen
class _Held:
    """A live parameter, and what this rank holds of it."""

    tensor: torch.Tensor
    boxes: tuple[LocalBox, ...]


def init_weights(
    model: nn.Module,
    seed: int = 0,
    *,
    only: Collection[str] | None = None,
    device: torch.device | str | None = None,
) -> tuple[str, ...]:
    """Initialize parameters with the model's own rule. The values are the same for every world size and sharding.

    The rule is ``_init_weights`` of a transformers model (or any model that has it), otherwise ``reset_parameters``. For PEFT's LoRA layers it is
    ``reset_lora_parameters``, and DoRA's magnitudes are the norms of the current base weights. Each module draws from generators
    seeded by ``seed`` and its name, so its values don't depend on which other modules are initialized. All other parameters,
    the buffers and the global RNG state are unchanged. If any tensor is on meta, the complete model is first allocated on ``device`` (None:
    the device of its mesh, otherwise the CPU).

    Every rank that has a part of the model must call it, with the same arguments. Ranks communicate only for magnitudes whose norms span several ranks:
    such a weight is gathered over its mesh. Host memory in addition to the parameters: the full size of one module's own parameters
    among those requested (or of such a weight) at a time.

    Args:
        seed: any integer.
        only: ``fnmatch`` patterns of parameter names, as in ``state_dict``, without wrapper prefixes. None: every parameter.

    Returns:
        The names of the parameters that were initialized, in module order.

    Raises:
        PlanError: a pattern matches nothing, or no rule initializes some parameters (the error lists them all). Nothing is written then.
    """
    patterns = None if only is None else patterns_of("only", only)
    live = describe(model)
    if is_declared(model):  # ranks have other parameters, and may fail alone
        with Ranks.current().agree("initialize"):
            _plan(live, _wanted(live, patterns))
    return fill_by_rule(live, seed, patterns, device)


def fill_by_rule(
    live: LiveModel,
    seed: int,
    names: Iterable[str] | None,
    device: torch.device | str | None = None,
    *,
    within: Mapping[str, Box] | None = None,
) -> tuple[str, ...]:
    """:func:`init_weights` of a model that is described already. ``within``: by name, the only box of a parameter that is written."""
    wanted = _wanted(live, None if names is None else tuple(names))
    jobs, norms = _plan(live, wanted)
    if any(t.tensor.is_meta for t in wanted):
        materialize(live, default_device(live.parameters) if device is None else device)
        wanted = tuple(t.refreshed() for t in wanted)
    managed = fsdp_parameter_ids(live.fsdp_modules)
    held: dict[str, _Held] = {}
    for t in wanted:
        boxes = local_boxes(t.tensor, name=t.name, fsdp_order=id(t.tensor) in managed)
        if within is not None and t.name in within:
            boxes = tuple(part for one in boxes if (part := one.intersect(within[t.name])))
        held[t.name] = _Held(t.tensor, boxes)
    with preserve_rng():
        for job in jobs:
            _run(job, seed, held)
    by_parameter = magnitudes(live.root) if norms else {}
    for norm in (held[name] for name in norms):
        by_parameter[id(norm.tensor)].fill(norm.boxes)
    return tuple(t.name for t in wanted)


def check_rules(live: LiveModel, names: Iterable[str]) -> None:
    """Raise the :class:`PlanError` that :func:`init_weights` would raise for these names. Writes nothing."""
    _plan(live, _wanted(live, tuple(names)))


def _wanted(live: LiveModel, patterns: tuple[str, ...] | None) -> tuple[NamedTensor, ...]:
    parameters, here = live.parameters, tuple(t for t in live.parameters if not is_elsewhere(t))
    if patterns is None:
        return here
    # A load gives exact names, thousands of them for adapters: only the rest are patterns.
    exact = set(patterns).intersection(n for t in parameters for n in t.names)
    globs = [p for p in patterns if p not in exact]
    without_match = [p for p in globs if not any(fnmatchcase(n, p) for t in parameters for n in t.names)]
    if without_match:
        raise PlanError(
            "init_weights(only=…): patterns that match no parameter (names are module paths without wrapper prefixes)",
            tuple(without_match),
        )
    return tuple(t for t in here if any(n in exact or any(fnmatchcase(n, p) for p in globs) for n in t.names))


# ----------------------------------------------------------------------------------------------------
# Rows that a source lacks, of tensors whose other rows it holds. The same at every world size and sharding.
#
# Their mean is a mean of integers: sums of integers don't depend on the order in which rows and ranks are added. Each column is scaled by
# a power of two, so that the sum just fits into 64 bits, and rounded. Of 100,000 rows, these have 45 bits.

#: Elements that are added at a time.
_ADDED_AT_ONCE = 1024 * 1024


def fill_new_rows(live: LiveModel, grown: Sequence[Grown], seed: int, ranks: Ranks) -> None:
    """Fill the rows of ``grown`` tensors that weren't stored. The stored ones are loaded already. Every rank must call it.

    For means, ranks agree twice, and send 8 bytes for each column.
    """
    drawn = {one.name: one.new for one in grown if one.rule == "init"}
    by_mean = [one for one in grown if one.rule == "mean"]
    means = _Columns(live, by_mean, ranks).means() if by_mean else []
    with ranks.agree("fill new rows"), torch.no_grad():
        for one, mean in zip(by_mean, means, strict=True):
            for part, box in _parts_in(live, one, one.new, ranks.rank):
                part.copy_(mean[_columns(box, one.dim)].expand(part.shape))
        for one in (one for one in grown if one.rule == "zeros"):
            for part, _ in _parts_in(live, one, one.new, ranks.rank):
                part.zero_()
        if drawn:  # last: DoRA's magnitudes are norms of rows
            fill_by_rule(live, seed, drawn, within=drawn)


class _Columns:
    """The stored rows of tensors, column by column. Every rank must make one, and call what is public."""

    def __init__(self, live: LiveModel, grown: Sequence[Grown], ranks: Ranks) -> None:
        self._live, self._grown, self._ranks = live, grown, ranks
        self._shapes = [tuple(1 if d == one.dim else n for d, n in enumerate(one.stored)) for one in grown]

    def means(self) -> list[torch.Tensor]:
        """The mean of each tensor's stored rows, in float64, as one row. NaN in a column that isn't finite."""
        # Numbers that aren't negative are in the order of their bits; NaN is the last.
        most = self._of_all(self._largest, np.max, torch.float64)
        counts = [one.stored[one.dim] for one in self._grown]
        exponents = [
            (62 - count.bit_length() - torch.frexp(top.nan_to_num(0, 0)).exponent).clamp(max=1000)
            for count, top in zip(counts, most, strict=True)
        ]
        scales = [torch.from_numpy(np.ldexp(1.0, one.numpy())) for one in exponents]
        totals = self._of_all(lambda: self._sums(scales), np.sum, torch.int64)
        return [
            torch.where(top.isfinite(), total.double() / scale / count, torch.nan)
            for total, scale, count, top in zip(totals, scales, counts, most, strict=True)
        ]

    def _of_all(
        self, own: Callable[[], list[torch.Tensor]], merge: Callable[..., Any], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """``own`` of all ranks, merged. It has 8 bytes per column."""

        def told() -> NDArray[np.uint64]:
            return torch.cat([one.view(torch.int64).flatten() for one in own()]).numpy().view(np.uint64)

        found = self._ranks.reduce(
            "add new rows", told, lambda parts: merge(parts, axis=0), lambda merged: merged
        )
        parts = (
            torch.from_numpy(found.view(np.int64).copy()).view(dtype).split([*map(math.prod, self._shapes)])
        )
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _largest(self) -> list[torch.Tensor]:
        found = [torch.zeros(shape, dtype=torch.float64) for shape in self._shapes]
        for one, most in zip(self._grown, found, strict=True):
            for numbers, at in self._numbers(one):
                most[at] = torch.maximum(most[at], numbers.abs().amax(one.dim, keepdim=True))
        return found

    def _sums(self, scales: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = [torch.zeros(shape, dtype=torch.int64) for shape in self._shapes]
        for one, scale, total in zip(self._grown, scales, found, strict=True):
            if self._ranks.rank in replicas(self._live.geometries[one.name])[0]:
                for numbers, at in self._numbers(one):
                    scaled = (numbers * scale[at]).round_().nan_to_num_(0, 0, 0)
                    total[at] += scaled.long().sum(one.dim, keepdim=True)
        return found

    def _numbers(self, one: Grown) -> Iterator[tuple[torch.Tensor, tuple[slice, ...]]]:
        """The stored rows that this rank holds, a few at a time, in float64 on the host, and the columns that they are of."""
        for part, box in _parts_in(self._live, one, whole(one.stored), self._ranks.rank):
            for some in part.split(max(1, _ADDED_AT_ONCE * part.shape[one.dim] // part.numel()), one.dim):
                yield some.cpu().double(), _columns(box, one.dim)
            self._ranks.tick()


def _parts_in(live: LiveModel, one: Grown, within: Box, rank: int) -> Iterator[tuple[torch.Tensor, Box]]:
    """What a rank holds of a tensor within a box: views of its local tensor, each with its box."""
    tensor = next(t.tensor for t in live.stored if t.name == one.name)
    for piece, start in boxes_of(tensor, one.shape, live.geometries[one.name], rank):
        box = whole(piece.shape).moved(start)
        if common := box.intersect(within):
            yield piece[common.slices_in(box)], common


def _columns(box: Box, dim: int) -> tuple[slice, ...]:
    return tuple(slice(0, 1) if d == dim else one for d, one in enumerate(box.slices))


# ----------------------------------------------------------------------------------------------------
# Calls and the parameters that they fill


class _Slots:
    """A template with the rules that run on it, and its modules by canonical name in the live model."""

    def __init__(
        self,
        template: Template,
        calls: Iterable[Rule] | None = None,
        unwrapped: Mapping[str, str] | None = None,
    ) -> None:
        self.prefix = canonical_name(template.path)
        self.rules = rules_of(template, calls)
        self._unwrapped = unwrapped or {}
        self.writing: dict[int, list[int]] = {}
        for index, rule in enumerate(self.rules):
            for key in rule.written:
                self.writing.setdefault(key, []).append(index)
        self.failures = [rule for rule in self.rules if rule.failure is not None]
        self._targets = frozenset(self._full(name) for name in tie_map(template.root))
        self._by_path: dict[str, nn.Module] = {}
        for path, module in template.root.named_modules(remove_duplicate=False):
            self._by_path.setdefault(self._full(canonical_name(path)), module)

    def _full(self, name: str) -> str:
        return ".".join(part for part in (self.prefix, name) if part)

    def find(self, tensor: NamedTensor) -> tuple[str, nn.Module, str] | None:
        """Name, module and attribute of ``tensor``; for a tied one those of the tie's source, else the first."""
        found = []
        for name in tensor.names:
            module_name, _, attribute = name.rpartition(".")
            for place in (module_name, self._unwrapped.get(module_name, module_name)):
                module = self._by_path.get(place)
                if module is not None and own_parameter(module, attribute) is not None:
                    found.append((name, place, module, attribute))
                    break
        if not found:
            return None
        _, place, module, attribute = next((f for f in found if f[0] not in self._targets), found[0])
        return place, module, attribute


def _plan(live: LiveModel, wanted: tuple[NamedTensor, ...]) -> tuple[list[_Job], list[str]]:
    """One job per module that owns wanted parameters, and the magnitudes to compute. Writes nothing to the model."""
    model = live.root
    unwrapped = _without_peft(model)
    own = {id(t.tensor) for t in wanted if unwrapped and _is_adapters(t, unwrapped)}
    others = [t for t in wanted if id(t.tensor) not in own]
    models = _transformers_models(model) if others else ()
    slots = [_Slots(build_template(m, path), None, unwrapped) for path, m in models]
    if any(all(s.find(t) is None for s in slots) for t in others):
        slots.append(_Slots(copy_template(model)))
    adapters = copy_template(model) if own else None
    of_adapters = [_Slots(adapters, adapter_rules(adapters.root))] if adapters is not None else []
    norms = magnitudes(model) if own else {}
    refused = without_rule(model) if own else {}
    jobs: dict[str, tuple[nn.Module, _Slots, list[tuple[str, NamedTensor]], set[int]]] = {}
    problems: list[str] = []
    filled = {id(t.tensor) for t in wanted}
    for tensor in wanted:
        key = id(tensor.tensor)
        if key in norms and key not in refused:
            if id(norms[key].drawn_with) not in filled:
                problems.append(f"{tensor.name}: follows from lora_B, which is not initialized along with it")
            continue
        if (
            is_declared(live.root) and live.geometries[tensor.name].parts
        ):  # the rules draw the module's own shape, not the whole one
            problems.append(f"{tensor.name}: is declared with boxes=")
            continue
        slot = next((s for s in (of_adapters if key in own else slots) if s.find(tensor) is not None), None)
        if slot is None:
            problems.append(f"{tensor.name}: no module has this name; it is declared with rename=")
            continue
        name, module, attribute = slot.find(tensor) or ("", model, "")
        rules = _rules_for(module, attribute, slot)
        problem = refused.get(key) or _problem(module, attribute, slot, rules)
        if problem is not None:
            problems.append(f"{tensor.name}: {problem}")
            continue
        # One layer's call fills several adapters' tensors: draw each separately.
        job = jobs.setdefault(tensor.name if key in own else name, (module, slot, [], set()))
        job[2].append((attribute, tensor))
        job[3].update(rules)
    if problems:
        raise PlanError(
            "parameters that can't be initialized by any of the model's rules. Give the module that owns them a "
            "reset_parameters(), or the model an _init_weights(module). Or load these parameters "
            "from files that contain them, and make sure that the patterns in init_weights(only=…) or load(allow_missing=…) don't match them",
            tuple(problems),
        )
    planned = [
        _Job(name, module, tuple(mine), tuple(slot.rules[index] for index in sorted(indices)))
        for name, (module, slot, mine, indices) in jobs.items()
    ]
    return planned, [t.name for t in wanted if id(t.tensor) in norms]


def _without_peft(model: nn.Module) -> dict[str, str]:
    """Module path → path without PEFT's parts, for all modules of the base; empty for models without adapters."""
    if not has_adapters(model):
        return {}
    found = {path: place.base for path, place in places(model).items() if place.base is not None}
    root = next(path for path, base in found.items() if not base)
    return {path: ".".join(part for part in (root, base) if part) for path, base in found.items()}


def _is_adapters(tensor: NamedTensor, unwrapped: Mapping[str, str]) -> bool:
    """Whether a parameter belongs to an adapter."""
    return all(name.rpartition(".")[0] not in unwrapped for name in tensor.names)


def _transformers_models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost transformers models, with their paths."""
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) not in inside and is_transformers_model(module):
            inside |= {id(m) for m in module.modules()}
            yield path, module


def _rules_for(module: nn.Module, attribute: str, slot: _Slots) -> list[int]:
    """Indices of the rules that write this parameter, from the last one that starts by overwriting it all."""
    key = id(own_parameter(module, attribute))
    writing = slot.writing.get(key, [])
    starts = [place for place, index in enumerate(writing) if key in slot.rules[index].overwrites]
    return writing[starts[-1] if starts else 0 :]


def _problem(module: nn.Module, attribute: str, slot: _Slots, rules: list[int]) -> str | None:
    parameter = own_parameter(module, attribute)
    assert parameter is not None
    for rule in slot.failures:
        if any(m is module for m in rule.module.modules()):
            return f"the rule of {type(rule.module).__name__} can't be run on meta ({rule.failure})"
    if not rules and parameter.numel():
        return f"no rule of {type(module).__name__}, nor of a model around it, writes it"
    written = sum(slot.rules[index].written[id(parameter)] for index in rules)
    if written < parameter.numel():
        return f"rules write {written} of its {parameter.numel()} elements only"
    return None


# ----------------------------------------------------------------------------------------------------
# Execution


def _run(job: _Job, seed: int, held: Mapping[str, _Held]) -> None:
    """Draw one module's wanted parameters in full, and copy this rank's parts of them."""
    targets = [(attribute, held[tensor.name]) for attribute, tensor in job.wanted]
    if not any(target.boxes for _, target in targets):
        return  # other ranks hold all of it, and their values do not depend on this rank's draws
    on_meta = {attribute: own_parameter(job.module, attribute) for attribute, _ in targets}
    try:
        if not _draw(job, seed, targets, None):
            _draw(job, seed, targets, torch.float32)
        with torch.no_grad():
            for attribute, target in targets:
                drawn = own_parameter(job.module, attribute)
                assert drawn is not None
                for local in target.boxes:
                    local_tensor(target.tensor)[local.slices].copy_(drawn[local.box.slices])
    finally:
        for attribute, parameter in on_meta.items():
            exchange_parameter(job.module, attribute, parameter)


def _draw(job: _Job, seed: int, targets: Iterable[tuple[str, _Held]], dtype: torch.dtype | None) -> bool:
    """Draw parameters in full, in their own dtype or another. Returns whether the rules wrote to each.

    Some rules write to ``weight.float()`` (transformers 5.8), which is a copy of a weight in any dtype but fp32.
    """
    made = []
    for attribute, target in targets:
        own = target.tensor.dtype
        full = torch.empty(
            target.tensor.shape, dtype=dtype if dtype and own.is_floating_point else own, device="cpu"
        )
        made.append(nn.Parameter(full, target.tensor.requires_grad))
        exchange_parameter(job.module, attribute, made[-1])
    _seed_generators(seed, job.name)
    return run_rules(job.rules, made)


def _seed_generators(seed: int, name: str) -> None:
    """Seed every generator that a rule could draw from on the CPU; the caller restores them."""
    value = int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "little") >> 1
    torch.default_generator.manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


# ----------------------------------------------------------------------------------------------------
# ``clone``: a frozen copy of a live model, shard by shard on the device, without reads, gathers or messages.


def clone(model: nn.Module, *, build: Callable[[], nn.Module] | None = None, timeout_s: float = 300.0) -> Any:
    """Copy ``model`` with its current values into a second model that is sharded the same way, frozen and in eval mode.

    Use it for a reference model, for example. Parameters and all buffers, including non-persistent ones, are copied on their own
    device; ties are kept. ``export_hf`` and ``iter_full_tensors`` treat the clone like ``model``.

    Args:
        build: function that creates the second model, on meta (inside :func:`meta_init`) and wrapped like the first. Default: a
            transformers model of the same class and config, sharded like the first by :func:`shard`, :func:`load_pretrained` or
            ``integrations.accelerate`` (including through ``integrations.trainer``).
        timeout_s: as in :class:`IOOptions`; nothing is read here.

    Every rank of the default process group must call it. Ranks coordinate through the group's store, without collectives. Memory: this
    rank's shards once more, with no full tensors and no staging. Raises, on every rank, :class:`StateError` if the model
    can't be built again or the second one differs, :class:`ShardError`, :class:`LayoutError` or :class:`RankError`.
    """
    with phase("clone"), Ranks.current(timeout_s=timeout_s).agree("clone model"):
        live = describe(model)
        second = build() if build is not None else _built_again(live)
        copied = describe(second)
        pairs = _paired(live, copied)
        device = next((local_tensor(t.tensor).device for t, _ in pairs if t.kind == "parameter"), None)
        materialize(copied, device or "cpu")
        with torch.no_grad():
            for given, own in pairs:
                _copy(given, own.refreshed())
        forget_meta_buffers(second)
        inherit(second, model)
        second.requires_grad_(False)
        return second.eval()


def _built_again(live: LiveModel) -> Any:
    """A model on meta of the same class, wrapped in the same way."""
    if has_adapters(live.root):
        raise StateError(
            "a model with PEFT adapters needs no second copy as a reference: use its base, inside "
            "`with model.disable_adapter()`. Else give build="
        )
    inner: Any = live.unwrapped
    if not is_transformers_model(inner):
        raise StateError(
            f"{type(inner).__name__} is not a transformers model, so shardwise can't build a second one. Give build=, a "
            f"function that builds it in shardwise.meta_init() and shards it as the first"
        )
    model_class: Any = live.kind
    try:
        with meta_init():
            second: Any = build_from_config(model_class, copy.deepcopy(inner.config), inner.dtype)
    except MemoryError:
        raise
    except Exception as error:  # the class may need more than a config
        raise StateError(
            f"a second {model_class.__name__} can't be built, because {model_class.__name__}(config) fails "
            f"({type(error).__name__}: {error}); give build="
        ) from error
    layers = blocks_in(inner)
    if layers:
        dtype = torch_dtype(next(iter(layers.values())).blocks.dtype)
        put_into(second, inner.config.quantization_config, dtype)
    given = {t.name: t.tensor for t in live.tensors}
    if kept := kept_in(inner):
        put_into(second, inner.config.quantization_config, next(iter(kept.values())).plain_dtype)
        for path, layer in kept_in(second).items():
            for name in layer.stored_dtypes:
                first = given[canonical_name(f"{path}.{name}")]
                layer.take_shape(name, first.dtype, first.shape)
    for t in named_tensors(second):
        if t.kind == "parameter" and t.name in given:  # some classes keep some in fp32
            t.tensor.data = t.tensor.data.to(given[t.name].dtype)
            t.tensor.requires_grad_(given[t.name].requires_grad)  # shard() groups by it; frozen afterwards
    if not shard_alike(second, inner) and any(isinstance(p, DTensor) for p in given.values()):
        raise ShardError(
            "the model was not sharded by shardwise.shard(), load_pretrained() or shardwise.integrations.accelerate, so "
            "shardwise can't tell how to shard the copy. Give build=, a function that builds it in shardwise.meta_init() and "
            "shards it as the first"
        )
    if hasattr(inner, "generation_config"):
        second.generation_config = copy.copy(inner.generation_config)
    copy_conversions(inner, second)
    second.name_or_path = inner.name_or_path
    return second


def _paired(live: LiveModel, second: LiveModel) -> list[tuple[NamedTensor, NamedTensor]]:
    """The tensors of both, each beside its like. Raises :class:`LayoutError` naming those that are not alike."""
    given, own = ({t.name: t for t in m.tensors} for m in (live, second))
    problems = [f"{name}: in one of the two only" for name in sorted(given.keys() ^ own.keys())]
    pairs = [(t, own[name]) for name, t in given.items() if name in own]
    for t, other in pairs:
        for what, a, b in (
            ("names", t.names, other.names),
            ("shape", tuple(t.tensor.shape), tuple(other.tensor.shape)),
            ("dtype", t.tensor.dtype, other.tensor.dtype),
            ("shards", live.geometries.get(t.name), second.geometries.get(t.name)),
        ):
            if a != b and (t.kind == "parameter" or what == "names"):
                problems.append(f"{t.name}: {what} {a} in the first, {b} in the second")
        if t.tensor.is_meta:
            problems.append(f"{t.name}: on meta in the first; load it before")
    if problems:
        shown = "\n".join(f"  - {p}" for p in problems[:20])
        raise LayoutError(f"{len(problems)} differences between the model and its second:\n{shown}")
    return pairs


def _copy(given: NamedTensor, own: NamedTensor) -> None:
    """Parameters in place: FSDP2 holds on to their memory. Buffers as new tensors: some change their shape as they live."""
    if own.kind == "parameter":
        local_tensor(own.tensor).copy_(local_tensor(given.tensor))
        return
    content = given.tensor.clone()
    for module, attribute in own.owners:
        setattr(module, attribute, content)
