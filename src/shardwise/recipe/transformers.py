"""Recipes that a transformers model brings along: its renames, what it declares unused or missing.

Always taken from an unsharded, unwrapped meta instance of the original class: ``fully_shard`` swaps the
class, and the mapping of a wrapped model comes back empty without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._compat import (
    convert_hub_tensors,
    is_transformers_model,
    original_class,
    revert_to_hub,
    transformers_conversions,
)
from ..catalog.records import StoredTensor
from ..dtypes import code_of, torch_dtype
from ..errors import UnsupportedConversionError
from ..names import unwrap
from .match import Made, Resolve
from .trace import Untraceable, stored_tensor

__all__ = [
    "HubRules",
    "automatic_rules",
    "hub_rules",
    "is_transformers_model",
    "meta_instance",
    "reverse_tiles",
]


@dataclass(frozen=True, slots=True)
class HubRules:
    """What the model's class says about stored tensors."""

    resolve: Resolve
    conversions: list[Any]
    unexpected: tuple[str, ...]
    missing: tuple[str, ...]
    non_persistent: frozenset[str]

    def targets(self, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
        """Stored name → module name of the (first) tensor that it takes part in."""
        found: dict[str, str] = {}
        for made in self.resolve(stored):
            for source in made.sources:
                found.setdefault(source, made.target)
        return found

    def unused(self, stored: str, target: str) -> str | None:
        """Who declares that a stored tensor may be left over."""
        if target in self.non_persistent:
            return "model (stored copy of a non-persistent buffer)"
        if any(re.search(p, target) or re.search(p, stored) for p in self.unexpected):
            return "model (_keys_to_ignore_on_load_unexpected)"
        return None

    def init(self, name: str) -> str | None:
        """Who declares that a wanted tensor may be missing."""
        if any(re.search(p, name) for p in self.missing):
            return "model (_keys_to_ignore_on_load_missing)"
        return None


def hub_rules(meta_model: Any, key_mapping: Mapping[str, str] | None = None) -> HubRules:
    """The rules of a class, from an unsharded instance of it with its parameters on meta."""
    conversions = transformers_conversions(meta_model, key_mapping)
    buffers = dict(meta_model.named_buffers())
    unexpected = set(meta_model._keys_to_ignore_on_load_unexpected or ())
    # transformers adds these two itself: buffers that old checkpoints stored (modeling_utils 5.17-5.23).
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.add(r"(^|\.)position_ids$")
    persistent = set(meta_model.state_dict())
    return HubRules(
        resolve=_resolver(meta_model, conversions),
        conversions=conversions,
        unexpected=tuple(sorted(unexpected)),
        missing=tuple(sorted(meta_model._keys_to_ignore_on_load_missing or ())),
        non_persistent=frozenset(name for name in buffers if name not in persistent),
    )


def _resolver(meta_model: Any, conversions: list[Any]) -> Resolve:
    """Runs the class's renames and conversions once, on symbols, over everything that is stored."""

    def resolve(stored: Mapping[str, StoredTensor]) -> list[Made]:
        symbols = {t.name: stored_tensor(t.name, t.shape, torch_dtype(t.dtype)) for t in stored.values()}
        converted, problems = convert_hub_tensors(symbols, conversions, meta_model)
        if problems:
            raise UnsupportedConversionError(
                f"{type(meta_model).__name__}: {len(problems)} conversions of stored tensors can't be compiled",
                tuple(problems[:50]) + ((f"and {len(problems) - 50} more",) if len(problems) > 50 else ()),
            )
        return [
            Made(target, code_of(value.dtype), tuple(value.shape), value.tiles, sources)
            for target, value, sources in converted
        ]

    return resolve


def meta_instance(model: Any) -> Any:
    """An unsharded instance on meta of the class that a (possibly wrapped) transformers model has."""
    import torch
    from transformers.initialization import no_init_weights

    model = unwrap(model)
    # Only names, shapes and classes are looked at: everything may stay on meta and without values.
    with torch.device("meta"), no_init_weights():
        return original_class(model)(model.config)


def automatic_rules(model: nn.Module) -> HubRules | None:
    """The rules of a live transformers model, sharded or not, compiled or not; None for any other module."""
    model = unwrap(model)
    if not is_transformers_model(model):
        return None
    return hub_rules(meta_instance(model))


def reverse_tiles(meta_model: Any, module: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[Made]:
    """Hub tensors of a model that was never loaded, by the library's reverse transforms.

    ``module`` gives dtype and shape by module name. The tiles' sources are module tensors.
    """
    symbols = {name: stored_tensor(name, shape, torch_dtype(code)) for name, (code, shape) in module.items()}
    try:
        reverted = revert_to_hub(meta_model, symbols)
    except Untraceable as error:
        raise UnsupportedConversionError(
            f"{type(meta_model).__name__}: its reverse conversion to hub tensors can't be compiled: {error}"
        ) from error
    return [
        Made(name, code_of(t.dtype), tuple(t.shape), t.tiles, tuple(dict.fromkeys(v.source for v in t.tiles)))
        for name, t in reverted.items()
    ]
