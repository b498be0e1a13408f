"""Name mapping for PEFT models: base names ↔ wrapped names, and names in an adapter's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ..catalog.records import StoredTensor
from ..dtypes import code_of, torch_dtype
from ..errors import PlanError, UnsupportedConversionError
from ..internals.peft import (
    adapter_configs,
    convert_adapter,
    has_adapters,
    peft_model,
    places,
    select_adapter,
)
from ..layout.live import LiveModel
from ..names import NamedTensor, canonical_name, own_tensors, without_wrappers
from ..objects import frozen
from ..recipe.match import Made, Resolve, Rules
from ..recipe.trace import stored_tensor

__all__ = ["WrappedNames", "adapter_tensors", "resolve_adapter", "wrapped", "wrapped_names", "wrapped_rules"]


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
        for copy, candidates in names.copies.items():
            source = next((by_base[b] for b in candidates if b in by_base), None)
            if copy not in there and source is not None:
                result.append(replace(source, target=copy))
        return result

    return resolve_wrapped


def wrapped_rules(live: LiveModel, rules: Rules) -> Rules:
    """The rules of a base model, for the same model with adapters. What is declared counts under either name."""
    names = wrapped_names(live).bases

    def embeddings() -> frozenset[str]:
        own = frozenset(rules.embeddings())
        return own | {name for name, base in names.items() if base in own}

    return replace(
        rules,
        embeddings=embeddings,
        resolve=wrapped(live, rules.resolve),
        allow_missing=lambda name: (
            rules.allow_missing(name) or (rules.allow_missing(names[name]) if name in names else None)
        ),
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
    peft = peft_model(live.root)
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
