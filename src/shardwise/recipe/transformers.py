"""Recipes that a transformers model brings along: its renames, what it declares unused or missing.

Always taken from an unsharded, unwrapped meta instance of the original class: ``fully_shard`` swaps the
class, and the mapping of a wrapped model comes back empty without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._compat import original_class, rename_hub_names, transformers_conversions
from ..errors import UnsupportedConversionError
from .match import Rename

__all__ = ["HubRules", "automatic_rename", "hub_rules", "is_transformers_model", "reverse_names"]


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a module is a transformers model; does not import transformers if nobody else did."""
    import sys

    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


@dataclass(frozen=True, slots=True)
class HubRules:
    """What the model's class says about stored tensors."""

    rename: Rename
    conversions: list[Any]
    unexpected: tuple[str, ...]
    missing: tuple[str, ...]
    non_persistent: frozenset[str]

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
    """The rules of a class, from an unsharded meta instance of it."""
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
        rename=_rename(meta_model, conversions),
        conversions=conversions,
        unexpected=tuple(sorted(unexpected)),
        missing=tuple(sorted(meta_model._keys_to_ignore_on_load_missing or ())),
        non_persistent=frozenset(name for name in buffers if name not in persistent),
    )


def _rename(meta_model: Any, conversions: list[Any]) -> Rename:
    def rename(stored: Sequence[str]) -> Mapping[str, str]:
        renamed, converted = rename_hub_names(stored, conversions, meta_model)
        if converted:
            kinds = {name: [type(op).__name__ for op in c.operations] for name, c in converted.items()}
            lines = [
                f"{name!r} needs {' + '.join(ops)} to become {renamed[name]!r}" for name, ops in kinds.items()
            ]
            raise UnsupportedConversionError(
                f"{type(meta_model).__name__} converts {len(lines)} stored tensors, which is not supported yet; "
                f"load it with from_pretrained and save it in its own names first",
                tuple(lines[:50]) + ((f"and {len(lines) - 50} more",) if len(lines) > 50 else ()),
            )
        return renamed

    return rename


def meta_instance(model: Any) -> Any:
    """An unsharded instance on meta of the class that a (possibly wrapped) transformers model has."""
    import torch
    from transformers.initialization import no_init_weights

    # Only names and classes are looked at: everything may stay on meta and without values.
    with torch.device("meta"), no_init_weights():
        return original_class(model)(model.config)


def automatic_rename(model: nn.Module) -> Rename | None:
    """The renames of a live transformers model; None for any other module."""
    if not is_transformers_model(model):
        return None
    return hub_rules(meta_instance(model)).rename


def reverse_names(meta_model: Any, names: Sequence[str]) -> dict[str, str]:
    """Module name → hub name for a model that was never loaded, by the library's reverse renames."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = [c.reverse_transform() for c in transformers_conversions(meta_model, None)[::-1]]
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    found = {}
    for name in names:
        hub, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is not None:
            raise UnsupportedConversionError(
                f"{type(meta_model).__name__} converts {name!r} for the hub, which is not supported yet"
            )
        found[name] = hub
    return found
