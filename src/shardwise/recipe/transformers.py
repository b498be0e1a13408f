"""The recipes of a transformers model: its renames and conversions, and the tensors that it declares unused or missing.

Always taken from an unsharded, unwrapped copy or instance of the original class, on meta: ``fully_shard`` swaps the class,
and the mapping of a wrapped model is silently empty.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..catalog.records import StoredTensor
from ..dtypes import code_of, torch_dtype
from ..errors import UnsupportedConversionError
from ..internals.peft import base_of, is_adapted
from ..internals.torch import bare_tree, original_class
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
from ..layout.spec import TensorSpec
from ..names import canonical_name, modules_once, own_tensors, unwrap, without_numbers
from ..objects import frozen
from .match import Made, Resolve, as_stored
from .tiles import Tile, identity
from .trace import Traced, is_untraceable, stored_tensor

__all__ = [
    "HubRules",
    "automatic_rules",
    "embedding_names",
    "hub_rules",
    "is_transformers_model",
    "meta_instance",
    "note_conversions",
    "reverse_tiles",
]


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
    conversions = transformers_conversions(meta_model, key_mapping)
    buffers = dict(meta_model.named_buffers())
    unexpected, missing = ignored_on_load(meta_model)
    # transformers adds these two itself: buffers that old checkpoints stored (modeling_utils 5.17-5.23).
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.add(r"(^|\.)position_ids$")
    persistent = meta_model.state_dict(keep_vars=True)  # else torch detaches each
    return HubRules(
        resolve=_resolver(meta_model, persistent, conversions),
        conversions=conversions,
        unexpected=tuple(sorted(unexpected)),
        missing=tuple(sorted(missing)),
        non_persistent=frozenset(name for name in buffers if name not in persistent),
    )


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

    from .whole import host_conversion

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
    from ..models.meta_init import meta_init

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
            f"the hub names of the tensors of {model_class.__name__} are not known, because "
            f"{model_class.__name__}(config) fails ({type(error).__name__}: {error}); to load, give names= "
            f"(stored name → module name; {{}} if they are the same)"
        ) from error


def automatic_rules(model: nn.Module, key_mapping: Mapping[str, str] | None = None) -> HubRules | None:
    """The rules of a live transformers model, sharded or not, compiled or not; None for any other module.

    For a model wrapped by PEFT they are the base's; :func:`.adapters.wrapped` continues from them.
    """
    model = base_of(model)
    if not is_transformers_model(model):
        return None
    return hub_rules(bare_tree(model) if _is_as_built(model) else meta_instance(model), key_mapping)


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


def _is_as_built(model: nn.Module) -> bool:
    """Whether a live model has the modules and names that its class gave it: neither adapters nor wrappers inside.

    The tree of such a model, copied with its original classes, takes a tenth of the time of another instance.
    """
    return not any(is_adapted(module) or canonical_name(path) != path for path, module in modules_once(model))


def note_conversions(model: nn.Module, conversions: list[Any]) -> None:
    """Set on a live model the conversions that ``save_pretrained`` inverts, as ``from_pretrained`` does.

    Without them ``save_pretrained`` inverts all conversions of the class, or none if FSDP2 swapped the class.
    """
    set_conversions(base_of(model), conversions)


def reverse_tiles(meta_model: Any, specs: Mapping[str, TensorSpec]) -> list[Made]:
    """Hub tensors of a model that was never loaded, by the library's reverse transforms.

    ``specs`` are by module name. The tiles' sources are module tensors.
    """
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
