"""What depends on the inside of other packages, each with the version at which it was read.

Nothing here is needed for plain torch modules; transformers is imported only inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

__all__ = [
    "default_store",
    "fsdp_parameter_ids",
    "original_class",
    "rename_hub_names",
    "tie_map",
    "transformers_conversions",
]


def default_store() -> Any:
    """The store of the default process group. torch 2.11-2.13: private, but the only way to the store."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def fsdp_parameter_ids(model: nn.Module) -> set[int]:
    """ids of the parameters that ``fully_shard`` manages (their ``_StridedShard`` means: TP cut first).

    torch 2.11-2.13 keep them in the FSDP state's parameter groups.
    """
    from torch.distributed.fsdp import FSDPModule

    found: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            group = getattr(state, "_fsdp_param_group", None)
            groups = [group] if group is not None else []
        for group in groups:
            found |= {id(p.sharded_param) for p in group.fsdp_params}
    return found


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before ``fully_shard`` swapped it (FSDP<Name>, FSDPModule, Name, …)."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    if isinstance(module, FSDPModule):
        return next(c for c in kind.__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))
    return kind


def transformers_conversions(meta_model: Any, key_mapping: Mapping[str, str] | None) -> list[Any]:
    """The renames and converters that ``from_pretrained`` would apply, in its order.

    ``meta_model`` must be an unsharded instance of the original class: on a wrapped one the mapping comes
    back empty. transformers 5.17-5.23: ``conversion_mapping.get_model_conversion_mapping``.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    model_class: Any = type(meta_model)
    assert original_class(meta_model) is model_class, "conversions of a wrapped model would be empty"
    return list(get_model_conversion_mapping(meta_model, dict(key_mapping) if key_mapping else None))


def rename_hub_names(
    names: Sequence[str], conversions: Sequence[Any], meta_model: Any
) -> tuple[dict[str, str], dict[str, Any]]:
    """Module name of every stored name, as ``from_pretrained`` finds it, and the converter it falls under.

    A function of the whole list: some renames only start once another key was seen, in natural order.
    transformers 5.17-5.23: follows ``core_model_loading.convert_and_load_state_dict_in_model``.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    wanted = meta_model.state_dict()
    prefix = meta_model.base_model_prefix
    renamed: dict[str, str] = {}
    converted: dict[str, Any] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        renamed[name] = target
        if pattern is not None:
            converted[name] = by_pattern[pattern]
    return renamed, converted


def tie_map(model: Any) -> dict[str, str]:
    """Names that a transformers model ties, target to source; empty for other modules."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})
