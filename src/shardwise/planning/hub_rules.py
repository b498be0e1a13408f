"""The rules of a transformers model, or of one with adapters: renames and conversions, tensors declared unused or missing."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ..catalog.records import Chunk, StoredTensor
from ..dtypes import code_of, torch_dtype
from ..errors import PlanError, UnsupportedConversionError
from ..internals.diffusers import (
    converted_from_original,
    is_diffusers_model,
    renamed_on_load,
    unused_patterns,
)
from ..internals.peft import (
    adapted_model,
    adapter_configs,
    base_of,
    convert_adapter,
    has_adapters,
    is_adapted,
    places,
    select_adapter,
)
from ..internals.torch import (
    TorchDispatchMode,
    bare_tree,
    has_own_state_dict,
    original_class,
    storage_key,
    with_original_classes,
)
from ..internals.transformers import (
    HubGroup,
    build_from_config,
    hub_groups,
    ignored_on_load,
    is_transformers_model,
    revert_to_hub,
    set_conversions,
    transformers_conversions,
    used_conversions,
    without_initialization,
)
from ..names import (
    NamedTensor,
    canonical_name,
    modules_once,
    own_tensors,
    unwrap,
    without_numbers,
    without_wrappers,
)
from ..objects import frozen
from ..tensors.boxes import TensorSpec, whole
from ..tensors.live import LiveModel
from ..tensors.tiles import Tile, identity
from ..tensors.trace import Traced, is_untraceable, stored_tensor
from .match import HostConversion, Made, Resolve, Rules, as_stored, renaming

__all__ = [
    "Converter",
    "HubRules",
    "WrappedNames",
    "adapter_tensors",
    "automatic_rules",
    "by_converter",
    "embedding_names",
    "host_conversion",
    "hub_rules",
    "is_transformers_model",
    "meta_instance",
    "note_conversions",
    "resolve_adapter",
    "reverse_tiles",
    "wrapped",
    "wrapped_names",
    "wrapped_rules",
]


# ----------------------------------------------------------------------------------------------------
# The recipes of a transformers model: its renames and conversions, and the tensors that it declares unused or missing.
#
# Always taken from an unsharded, unwrapped copy or instance of the original class, on meta: ``fully_shard`` swaps the class,
# and the mapping of a wrapped model is silently empty.


@frozen
class HubRules:
    """The rules of a model's class for stored tensors."""

    resolve: Resolve
    conversions: list[Any]
    unexpected: tuple[str, ...]
    missing: tuple[str, ...]
    non_persistent: frozenset[str]

    def targets(self, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
        """Stored name → module name of the (first) tensor that uses it."""
        found: dict[str, str] = {}
        for made in self.resolve(stored):
            for source in made.sources:
                found.setdefault(source, made.target)
        return found

    def allow_unused(self, stored: str, target: str) -> str | None:
        """The author of a declaration that this stored tensor may be left over, or None."""
        if target in self.non_persistent:
            return "model (stored copy of a non-persistent buffer)"
        if any(re.search(p, target) or re.search(p, stored) for p in self.unexpected):
            return "model (_keys_to_ignore_on_load_unexpected)"
        return None

    def used(self) -> list[Any]:
        """The conversions that a ``resolve`` has used."""
        return used_conversions(self.conversions)

    def allow_missing(self, name: str) -> str | None:
        """The author of a declaration that this wanted tensor may be missing, or None."""
        if any(re.search(p, name) for p in self.missing):
            return "model (_keys_to_ignore_on_load_missing)"
        return None


def hub_rules(meta_model: Any, key_mapping: Mapping[str, str] | None = None) -> HubRules:
    """The rules of a class, from an instance of it whose modules have their original classes. Looks at no values."""
    if is_diffusers_model(meta_model):
        return _rules_of_diffusers(meta_model, key_mapping)
    persistent = meta_model.state_dict(keep_vars=True)  # else torch detaches each
    return _rules_of(meta_model, key_mapping, persistent, [name for name, _ in meta_model.named_buffers()])


def _rules_of(
    meta_model: Any,
    key_mapping: Mapping[str, str] | None,
    persistent: dict[str, torch.Tensor],
    buffers: Sequence[str],
) -> HubRules:
    """:func:`hub_rules`, given the state dict and the names of all buffers."""
    conversions = transformers_conversions(meta_model, key_mapping)
    unexpected, missing = ignored_on_load(meta_model)
    # transformers adds these two itself: buffers that old checkpoints stored (modeling_utils 5.17-5.23).
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.add(r"(^|\.)position_ids$")
    return HubRules(
        resolve=_resolver(meta_model, persistent, conversions),
        conversions=conversions,
        unexpected=tuple(sorted(unexpected)),
        missing=tuple(sorted(missing)),
        non_persistent=frozenset(name for name in buffers if name not in persistent),
    )


def _rules_of_diffusers(model: Any, key_mapping: Mapping[str, str] | None) -> HubRules:
    """The rules of a diffusers model, sharded or not: the names that its class changes on load; or, where these don't make the model,
    the conversion of its ``from_single_file``, if that does."""
    rename = renaming(key_mapping or {})

    def resolve(stored: Mapping[str, StoredTensor]) -> list[Made]:
        named = {name: rename(name) for name in stored}
        own = renamed_on_load(model, named.values())
        made = [as_stored(t, own.get(named[name], named[name])) for name, t in stored.items()]
        if persistent.keys() <= {one.target for one in made}:
            return made
        converted = _from_original_names(model, {named[name]: t for name, t in stored.items()})
        return converted if persistent.keys() <= {one.target for one in converted} else made

    persistent = model.state_dict(keep_vars=True)
    return HubRules(
        resolve=resolve,
        conversions=[],
        unexpected=tuple(sorted(unused_patterns(model))),
        missing=(),
        non_persistent=frozenset(name for name, _ in model.named_buffers() if name not in persistent),
    )


def _from_original_names(model: Any, stored: Mapping[str, StoredTensor]) -> list[Made]:
    """What diffusers makes of a file with the names of the model's authors; nothing if it makes nothing of it."""
    try:
        return _made_by(partial(converted_from_original, model), stored)[0]
    except Exception:  # not the tensors that it expects
        return []


#: Makes one state dict of another.
Converter = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def _made_by(converter: Converter, stored: Mapping[str, StoredTensor]) -> tuple[list[Made], list[str]]:
    """What a converter makes of stored tensors, and the names of what it makes of nothing that is stored. Runs it once, on symbols."""
    found = converter({n: stored_tensor(t.name, t.shape, torch_dtype(t.dtype)) for n, t in stored.items()})
    traced = {name: t for name, t in found.items() if isinstance(t, Traced)}
    made = [
        Made(name, code_of(t.dtype), tuple(t.shape), t.tiles, tuple(dict.fromkeys(v.source for v in t.tiles)))
        for name, t in traced.items()
    ]
    return made, sorted(found.keys() - traced.keys())


def by_converter(converter: Converter) -> Resolve:
    """The resolve that another library's function from stored to own tensors makes. What it drops has no name."""

    def resolve(stored: Mapping[str, StoredTensor]) -> list[Made]:
        try:
            made, others = _made_by(converter, stored)
        except Exception as error:  # a caller's own code may raise anything
            raise UnsupportedConversionError(
                f"converter= failed with {type(error).__name__}: {error}. It gets tensors that have shapes but no data, and may only rename, "
                "split, join, reorder, and drop them"
            ) from error
        if others:
            raise UnsupportedConversionError(
                "converter= returns values that it didn't make from stored tensors: "
                f"{', '.join(others[:5])}{', …' if len(others) > 5 else ''}. Leave them out, and list them in allow_missing="
            )
        used = {source for one in made for source in one.sources}
        return made + [as_stored(t, "") for name, t in stored.items() if name not in used]

    return resolve


def _resolver(meta_model: Any, wanted: dict[str, torch.Tensor], conversions: list[Any]) -> Resolve:
    """A resolve that runs the class's renames and conversions once, on symbols, over all stored tensors."""

    def resolve(stored: Mapping[str, StoredTensor]) -> list[Made]:
        plain, groups = hub_groups(stored, conversions, meta_model, wanted)
        made = [as_stored(stored[name], target) for target, name in plain]
        problems, forms = [], _Forms(stored, wanted)
        for group in groups:
            try:
                made += forms.made(group) or _convert(group, stored, wanted, forms)
            except Exception as error:  # an operation may raise anything
                names = group.sources
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                problems.append(
                    f"{group.kinds} of {', '.join(map(repr, names[:3]))}{more} to {group.target!r}: {error}"
                )
        if problems:
            raise UnsupportedConversionError(
                f"{type(meta_model).__name__}: {len(problems)} conversions of stored tensors can't be compiled",
                tuple(problems[:50]) + ((f"and {len(problems) - 50} more",) if len(problems) > 50 else ()),
            )
        return made

    return resolve


class _Forms:
    """Caches what converters make of stored tensors: layers of the same kind are traced twice, not once each.

    A conversion may look at its patterns, at dtypes and shapes of stored tensors and of the model's own: groups that agree in
    these have the same result. The second group is traced as well, and compared with the first.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], wanted: Mapping[str, torch.Tensor]) -> None:
        self._stored, self._wanted = stored, wanted
        self._known: dict[tuple[object, ...], tuple[_Form | None, bool]] = {}
        """The form, and whether a second group has confirmed it; None: groups of this key differ."""

    def _key(self, group: HubGroup) -> tuple[object, ...]:
        own = [self._wanted[t] for t in group.targets if t in self._wanted]
        parts = [(pattern, (t := self._stored[name]).dtype, t.shape) for name, pattern in group.parts]
        return (
            id(group.converter),
            without_numbers(group.target),
            *((t.dtype, t.shape) for t in own),
            *parts,
        )

    def made(self, group: HubGroup) -> list[Made] | None:
        """The results for a group like others that were traced; None if it has to be traced."""
        form, is_confirmed = self._known.get(self._key(group), (None, False))
        return form.of(group) if form is not None and is_confirmed else None

    def note(self, group: HubGroup, made: list[Made]) -> None:
        """Remember what was traced."""
        key = self._key(group)
        if key not in self._known:
            self._known[key] = _form_of(group, made), False
        elif (form := self._known[key][0]) is not None:
            self._known[key] = (form, True) if form.of(group) == made else (None, False)


@frozen
class _Form:
    """Results of a conversion: dtype, shape, and tiles by the position of their source among the group's."""

    results: tuple[tuple[str, tuple[int, ...], tuple[tuple[int, Tile], ...]], ...]

    def of(self, group: HubGroup) -> list[Made]:
        """The same results, of the tensors of another group."""
        names = group.sources
        return [
            Made(
                target,
                dtype,
                shape,
                tuple([Tile(names[k], t.loops, t.source_start, t.target_start) for k, t in tiles]),
                names,
            )
            for target, (dtype, shape, tiles) in zip(group.targets, self.results, strict=True)
        ]


def _form_of(group: HubGroup, made: list[Made]) -> _Form | None:
    """The form of what was traced; None for results that are made whole, or have other names than the converter says."""
    place = {name: k for k, name in enumerate(group.sources)}
    by_target = {one.target: one for one in made if one.host is None}
    if by_target.keys() != set(group.targets) or len(made) != len(group.targets):
        return None
    ordered = [by_target[target] for target in group.targets]
    return _Form(tuple([(m.dtype, m.shape, tuple([(place[t.source], t) for t in m.tiles])) for m in ordered]))


def _convert(
    group: HubGroup, stored: Mapping[str, StoredTensor], wanted: Mapping[str, torch.Tensor], forms: _Forms
) -> list[Made]:
    """The results of a converter: by tiles if its operations have a map, otherwise by running it whole."""
    try:
        values = group.run({name: _symbol(stored[name]) for name in group.sources})
    except Exception as error:
        if not is_untraceable(error):
            raise
        return _convert_whole(group, stored, wanted, str(error))
    made = [_made(target, value, group.sources) for target, value in values.items()]
    forms.note(group, made)
    return made


def _convert_whole(
    group: HubGroup, stored: Mapping[str, StoredTensor], wanted: Mapping[str, torch.Tensor], reason: str
) -> list[Made]:
    dtype = wanted[group.target].dtype

    def run(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # As from_pretrained: cast stored tensors before converting them.
        return group.run({name: t.to(dtype) for name, t in tensors.items()})

    names = group.sources
    host = host_conversion(
        f"{group.kinds} of {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
        [stored[name] for name in names],
        {t: (wanted[t].dtype, tuple(wanted[t].shape)) for t in group.targets if t in wanted},
        run,
        reason,
    )
    return [
        Made(target, t.dtype, t.shape, (identity(t.name, t.shape),), names, host)
        for target, t in host.outputs.items()
    ]


def _symbol(tensor: StoredTensor) -> Traced:
    return stored_tensor(tensor.name, tensor.shape, torch_dtype(tensor.dtype))


def _made(target: str, value: Traced, sources: tuple[str, ...]) -> Made:
    return Made(target, code_of(value.dtype), tuple(value.shape), value.tiles, sources)


def meta_instance(model: Any) -> Any:
    """An unsharded instance, with parameters on meta, of the class of a (possibly wrapped) transformers model.

    Raises :class:`UnsupportedConversionError` for a class that can't be built from a config alone.
    """
    from ..models.meta import meta_init

    model = unwrap(model)
    model_class: Any = original_class(model)
    try:
        # Only names, shapes and classes are looked at: no values. Not on torch's meta device altogether, because
        # people's classes take numbers out of tensors (.item()) while they are built.
        with meta_init(), without_initialization():
            return build_from_config(model_class, copy.deepcopy(model.config), model.dtype)
    except MemoryError:
        raise
    except Exception as error:  # the class may need more than a config
        raise UnsupportedConversionError(
            f"the Hub names of the tensors of {model_class.__name__} are not known, because "
            f"{model_class.__name__}(config) fails ({type(error).__name__}: {error}); to load, give names= "
            f"(stored name → module name; {{}} if they are the same)"
        ) from error


def automatic_rules(live: LiveModel, key_mapping: Mapping[str, str] | None = None) -> HubRules | None:
    """The rules of a live model of transformers or diffusers, sharded or not, compiled or not; None for any other module.

    For a model wrapped by PEFT they are the base's; :func:`.adapters.wrapped` continues from them.
    """
    if is_diffusers_model(live.base):
        return _rules_of_diffusers(live.base, key_mapping)
    if not is_transformers_model(live.base):
        return None
    kinds = {type(module): module for _, module in live.modules}.values()
    if any(map(is_adapted, kinds)) or _has_wrappers_inside(live):
        return hub_rules(meta_instance(live.base), key_mapping)
    # A tree of modules that has the classes and names that its class gave it takes a tenth of the time of another instance, and
    # the description's names a tenth of the time of its state dict.
    buffers = [t for t in live.tensors if t.kind == "buffer"]
    if any(map(has_own_state_dict, kinds)) or any(t.aliases for t in buffers):
        return hub_rules(bare_tree(live.base), key_mapping)
    persistent = {name: t.tensor for t in live.tensors if t.persistent for name in t.names}
    tree = with_original_classes(live.base, is_transformers_model)
    return _rules_of(tree, key_mapping, persistent, [t.name for t in buffers])


def _has_wrappers_inside(live: LiveModel) -> bool:
    """Whether something (``torch.compile``, activation checkpointing, …) wraps a module inside the base."""
    around = next(path for path, module in live.modules if module is live.base)
    start = len(around) + 1 if around else 0
    inside = [path[start:] for path, _ in live.modules]
    return any(canonical_name(path) != path for path in inside)


def embedding_names(model: nn.Module) -> frozenset[str]:
    """Names of the tensors of a model's input and output embeddings, as its class says; none for other modules."""
    model = base_of(model)
    if not is_transformers_model(model):
        return frozenset()
    found = []
    for method in (model.get_input_embeddings, model.get_output_embeddings):
        with contextlib.suppress(NotImplementedError):  # by classes with several embeddings, or none
            found.append(method())  # type: ignore[operator]
    return frozenset(
        canonical_name(f"{path}.{attribute}")
        for path, module in modules_once(model)
        if any(module is one for one in found)
        for attribute, *_ in own_tensors(module)
    )


def note_conversions(model: nn.Module, conversions: list[Any]) -> None:
    """Set on a live model the conversions that ``save_pretrained`` inverts, as ``from_pretrained`` does.

    Without them ``save_pretrained`` inverts all conversions of the class, or none if FSDP2 swapped the class.
    """
    if is_transformers_model(base := base_of(model)):
        set_conversions(base, conversions)


def reverse_tiles(meta_model: Any, specs: Mapping[str, TensorSpec]) -> list[Made]:
    """Hub tensors of a model that was never loaded, by the library's reverse transforms.

    ``specs`` are by module name. The tiles' sources are module tensors. A diffusers model has none.
    """
    if is_diffusers_model(meta_model):
        return [Made(n, s.dtype, s.shape, (identity(n, s.shape),), (n,)) for n, s in specs.items()]
    symbols = {name: stored_tensor(name, shape, torch_dtype(code)) for name, (code, shape) in specs.items()}
    try:
        reverted = revert_to_hub(meta_model, symbols)
    except Exception as error:  # Untraceable, or any error of an operation without a reverse
        raise UnsupportedConversionError(
            f"{type(meta_model).__name__}: its reverse conversion to hub tensors can't be compiled: "
            f"{type(error).__name__}: {error}"
        ) from error
    return [
        Made(name, code_of(t.dtype), tuple(t.shape), t.tiles, tuple(dict.fromkeys(v.source for v in t.tiles)))
        for name, t in reverted.items()
    ]


# ----------------------------------------------------------------------------------------------------
# Name mapping for PEFT models: base names ↔ wrapped names, and names in an adapter's file.

#: What PEFT writes before the base's name of each tensor in an adapter's file.
_PREFIX = "base_model.model."


@frozen
class WrappedNames:
    """The names of a base model's tensors in the same model with adapters."""

    originals: Mapping[str, str]
    """Name in the base model → name with PEFT's parts in it."""
    copies: Mapping[str, tuple[str, ...]]
    """Name of a trained copy (``modules_to_save``) → names in the base model from which it can be made: its own
    first, then those tied with it."""
    bases: Mapping[str, str]
    """Name with PEFT's parts → name in the base model, copies included."""


def wrapped_names(live: LiveModel) -> WrappedNames:
    """The names of a live model, sharded or not. Raises :class:`PlanError` if its layers were replicated."""
    replicated = [a for a, c in adapter_configs(live.root).items() if getattr(c, "layer_replication", None)]
    if replicated:
        raise PlanError(
            f"adapter {replicated[0]!r} replicates layers of the base (layer_replication), so layers can't be matched "
            f"with stored ones; remove the replication from its config"
        )
    found = places(live.root)
    originals: dict[str, str] = {}
    own: dict[str, str] = {}
    bases: dict[str, str] = {}
    tied: dict[str, tuple[str, ...]] = {}
    for tensor in live.tensors:
        there = []
        for name in tensor.names:
            module, _, attribute = name.rpartition(".")
            place = found[module]
            if place.base is None:
                continue
            base = bases[name] = f"{place.base}.{attribute}" if place.base else attribute
            if place.copy_of is None:
                originals[base] = name
                there.append(base)
            else:
                own[name] = base
        tied |= dict.fromkeys(there, tuple(there))
    copies = {name: tuple(dict.fromkeys((base, *tied.get(base, ())))) for name, base in own.items()}
    return WrappedNames(originals, copies, bases)


def wrapped(live: LiveModel, resolve: Resolve) -> Resolve:
    """The resolve of a base model, for the same model with adapters; as it is for a model without.

    Tensors stored under the model's own names (in its checkpoint) keep them. A copy that is not stored is made from
    the sources of its original, as PEFT makes it when it wraps the module.
    """
    if not has_adapters(live.root):
        return resolve
    names = wrapped_names(live)

    def resolve_wrapped(stored: Mapping[str, StoredTensor]) -> list[Made]:
        by_base = {}
        result = []
        for made in resolve(stored):
            base = made.target if made.target in names.originals else canonical_name(made.target)
            by_base[base] = made
            result.append(replace(made, target=names.originals.get(base, made.target)))
        there = {made.target for made in result}
        for second, candidates in names.copies.items():
            source = next((by_base[b] for b in candidates if b in by_base), None)
            if second not in there and source is not None:
                result.append(replace(source, target=second))
        return result

    return resolve_wrapped


def wrapped_rules(live: LiveModel, rules: Rules) -> Rules:
    """The rules of a base model, for the same model with adapters. What is declared counts under either name."""
    names = wrapped_names(live).bases

    def embeddings() -> frozenset[str]:
        own = frozenset(rules.embeddings())
        return own | {name for name, base in names.items() if base in own}

    def either(declared: Callable[..., str | None]) -> Callable[..., str | None]:
        return lambda name, *rest: (
            declared(name, *rest) or (declared(names[name], *rest) if name in names else None)
        )

    return replace(
        rules,
        embeddings=embeddings,
        resolve=wrapped(live, rules.resolve),
        allow_missing=either(rules.allow_missing),
        grow=either(rules.grow),
    )


def adapter_tensors(
    live: LiveModel, adapter: str, *, embeddings: bool | Literal["auto"] = False
) -> dict[str, tuple[str, NamedTensor]]:
    """The tensors that PEFT stores for an adapter: name in its file → (name in the model, tensor).

    Taken from PEFT's own ``get_peft_model_state_dict``, run on symbols. Pure; works on sharded and meta models.

    Args:
        embeddings: as PEFT's ``save_embedding_layers``: base embeddings beside the adapter's tensors.

    Raises :class:`UnsupportedConversionError` for methods that store other tensors than the model holds.
    """
    peft = adapted_model(live.root)
    if peft is None:
        raise TypeError(f"{type(live.root).__name__} is not a PeftModel")
    held = {name: t for t in live.stored for name in t.names}
    state = {
        f"{path}.{attribute}": stored_tensor(name, tensor.shape, tensor.dtype)
        for path, module in peft.named_modules(remove_duplicate=False)
        for attribute, tensor, _, _ in own_tensors(module)
        if (name := canonical_name(f"{path}.{attribute}")) in held
    }
    names = {id(symbol): canonical_name(path) for path, symbol in state.items()}
    config = adapter_configs(peft).get(adapter)
    if getattr(config, "is_prompt_learning", False):  # PEFT would run the prompt's module, on shards
        raise _stored_otherwise(adapter, f"it computes those of {type(config).__name__}")
    try:
        selected = select_adapter(peft, adapter, state, embeddings)
    except Exception as error:  # a method may need data, which symbols don't have
        raise _stored_otherwise(adapter, f"{type(error).__name__}: {error}") from error
    found = {without_wrappers(stored): names.get(id(value)) for stored, value in selected.items()}
    if computed := sorted(stored for stored, name in found.items() if name is None):
        raise _stored_otherwise(adapter, f"it computes {computed[0]!r}")
    return {stored: (name, held[name]) for stored, name in found.items() if name is not None}


def _stored_otherwise(adapter: str, why: str) -> UnsupportedConversionError:
    return UnsupportedConversionError(
        f"adapter {adapter!r}: PEFT stores other tensors than the model holds ({why}), so they can't be written or "
        f"read in shards"
    )


def resolve_adapter(
    live: LiveModel, adapter: str, meta_base: object | None, rename: Callable[[str], str]
) -> Resolve:
    """From an adapter's file to names of the model that holds it; the inverse of what PEFT does when it saves.

    Names are read without the parts that wrappers such as ``torch.compile`` leave in them. Those that the model doesn't
    have go through ``rename``, which is the caller's ``key_mapping``. Tensors that PEFT does not list for the adapter, but
    that the file names as the model does (base embeddings, biases), keep their names, as in PEFT. ``stored`` is keyed by the names in the file; those in its records may differ. ``meta_base`` is an unsharded
    instance of a transformers base model, whose class may have changed its names since the adapter was trained; None for
    other base models.
    """
    targets = {stored: name for stored, (name, _) in adapter_tensors(live, adapter).items()}
    config = adapter_configs(live.root)[adapter]

    def plain(name: str, stored: Mapping[str, StoredTensor]) -> str:
        """The name in the file as PEFT would have written it for this model."""
        if name in targets:
            return name
        inner = without_wrappers(name)
        if inner not in targets:
            prefix = _PREFIX if inner.startswith(_PREFIX) else ""
            inner = prefix + rename(inner.removeprefix(prefix))
        return (
            name if inner != name and inner in stored else inner
        )  # two names for one tensor: said as unused

    def resolve(stored: Mapping[str, StoredTensor]) -> list[Made]:
        names = {plain(name, stored): name for name in stored}
        symbols = {
            n: stored_tensor((t := stored[name]).name, t.shape, torch_dtype(t.dtype))
            for n, name in names.items()
        }
        found: Mapping[str, Any] = symbols
        if meta_base is not None and not symbols.keys() <= targets.keys():
            try:
                found = convert_adapter(meta_base, adapter, config, symbols)
            except UnsupportedConversionError:
                raise
            except Exception as error:  # an operation may raise anything
                raise UnsupportedConversionError(
                    f"adapter {adapter!r} was trained on a class that has changed since, and PEFT's conversion of "
                    f"it can't be compiled ({type(error).__name__}: {error}); load it with PEFT on one process, "
                    f"save it there, and load that"
                ) from error
        return [
            Made(
                targets.get(name, name),
                code_of(value.dtype),
                tuple(value.shape),
                value.tiles,
                tuple(dict.fromkeys(t.source for t in value.tiles)) or (stored[names[name]].name,),
            )
            for name, value in found.items()
        ]

    return resolve


# ----------------------------------------------------------------------------------------------------
# Plans conversions that can't be traced: runs them on meta tensors to learn their results and memory.
#
# A conversion that looks at values can't run on meta: the plan then expects the model's own shapes. The real results are
# compared with the plan before any of them is placed.


def host_conversion(
    name: str,
    stored: Sequence[StoredTensor],
    expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    run: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    reason: str,
) -> HostConversion:
    """The host conversion of ``stored`` by ``run``, planned without payload.

    ``expected`` gives dtype and shape of the model's own tensors by module name; the plan uses them if ``run`` looks
    at values. Raises :class:`UnsupportedConversionError` if ``run`` can't take these shapes.
    """
    with _Allocations() as allocations:
        symbols = {t.name: torch.empty(t.shape, dtype=torch_dtype(t.dtype), device="meta") for t in stored}
        try:
            results = run(symbols)
            made = {n: (t.dtype, tuple(t.shape)) for n, t in results.items()}
            # Placing copies results that are not row-major.
            copied = sum(_nbytes(made[n]) for n, t in results.items() if not t.is_contiguous())
            staging_bytes = allocations.nbytes + copied
        except Exception as error:
            if not _looks_at_values(error):
                raise UnsupportedConversionError(f"{name}: {error}") from error
            made = dict(expected)
            # Intermediate tensors are unknown: assume a copy of sources and results.
            staging_bytes = 2 * (sum(t.nbytes for t in stored) + sum(map(_nbytes, made.values())))
    group = next(iter(made), "")
    return HostConversion(
        name,
        tuple(t.name for t in stored),
        {target: _virtual(group, target, code_of(dtype), shape) for target, (dtype, shape) in made.items()},
        reason,
        sum(t.nbytes for t in stored),
        staging_bytes,
        run,
    )


def _virtual(group: str, target: str, code: str, shape: tuple[int, ...]) -> StoredTensor:
    """A result as if it were stored. In order of path, the results of one conversion are neighbors."""
    name = f"<converted>/{group}/{target}"
    return StoredTensor(name, code, shape, (Chunk(whole(shape), name, 0),))


def _nbytes(made: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = made
    return TensorSpec(code_of(dtype), shape).nbytes


def _looks_at_values(error: Exception) -> bool:
    """Whether an operation failed because meta tensors have no values, and not because of its input."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


class _Allocations(TorchDispatchMode):
    """Adds up the bytes of all storages made inside the block; counts none as freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self._seen: dict[int, torch.UntypedStorage] = {}  # keeps storages alive: no address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if (key := storage_key(value)) not in self._seen:
                    self._seen[key] = storage
                    self.nbytes += storage.nbytes()
        return result
