"""What depends on the inside of other packages, each with the version at which it was read.

Nothing here is needed for plain torch modules; transformers is imported only inside functions.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = [
    "convert_hub_tensors",
    "default_store",
    "empty_dtensor",
    "fsdp_parameter_ids",
    "is_transformers_model",
    "original_class",
    "revert_to_hub",
    "sibling_meshes",
    "tie_map",
    "transformers_conversions",
]


def default_store() -> Any:
    """The store of the default process group. torch 2.11-2.13: private, but the only way to the store."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def sibling_meshes(mesh: Any) -> torch.Tensor:
    """Ranks of a device mesh and of its siblings: all meshes that the same slicing of the root mesh gives.

    Shape: number of siblings, then the mesh's own. torch 2.11-2.13: ``DeviceMesh.mesh`` picks this rank's
    from the same tensor.
    """
    ranks: torch.Tensor = mesh._layout.remap_to_tensor(mesh._rank_map)
    return ranks


def empty_dtensor(like: DTensor, device: torch.device) -> DTensor:
    """A DTensor with the placements of ``like`` and uninitialised memory on ``device``.

    As ``torch.empty_like(like, device=device)``, without its dispatch, which costs more than the rest of
    materialising a parameter. torch 2.11-2.13: the constructor that FSDP2 uses itself.
    """
    local = like._local_tensor
    real = torch.empty_strided(local.size(), local.stride(), dtype=local.dtype, device=device)
    return DTensor(real, like._spec, requires_grad=False)


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


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a transformers model; does not import transformers if nobody else did."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def transformers_conversions(meta_model: Any, key_mapping: Mapping[str, str] | None) -> list[Any]:
    """The renames and converters that ``from_pretrained`` would apply, in its order.

    ``meta_model`` must be an unsharded instance of the original class: on a wrapped one the mapping comes
    back empty. transformers 5.17-5.23: ``conversion_mapping.get_model_conversion_mapping``.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    model_class: Any = type(meta_model)
    if original_class(meta_model) is not model_class:
        raise TypeError(f"{model_class.__name__} is wrapped: its conversions would come back empty")
    return list(get_model_conversion_mapping(meta_model, dict(key_mapping) if key_mapping else None))


def convert_hub_tensors(
    stored: Mapping[str, Any], conversions: Sequence[Any], meta_model: Any
) -> tuple[list[tuple[str, Any, tuple[str, ...]]], list[str]]:
    """Run a model's renames and converters over stored tensors (or symbols of them), as ``from_pretrained`` does.

    A function of the whole list of names: some renames only start once another key was seen, in natural
    order. Returns (module name, tensor, stored names) for each tensor that is made, names that the model
    does not have included, and a line for each conversion that failed.

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
    made: list[tuple[str, Any, tuple[str, ...]]] = []
    pending: dict[str, Any] = {}
    sources: dict[str, list[str]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if pattern is None or target not in wanted:
            made.append((target, stored[name], (name,)))
            continue
        if target not in pending:
            pending[target] = copy.deepcopy(by_pattern[pattern])
        pending[target].add_tensor(target, name, pattern, stored[name])
        sources.setdefault(target, []).append(name)
    problems = []
    with torch.no_grad():
        for target, converter in pending.items():
            names = tuple(sources[target])
            try:
                values = converter.convert(target, model=meta_model, config=meta_model.config)
            except Exception as error:  # whatever an operation raises on what is stored
                kinds = " + ".join(type(op).__name__ for op in converter.operations)
                shown = ", ".join(map(repr, names[:3])) + (
                    f" and {len(names) - 3} more" if len(names) > 3 else ""
                )
                problems.append(f"{kinds} of {shown} to {target!r}: {error}")
                continue
            for final, value in values.items():
                made.append((final, value[0] if isinstance(value, list) else value, names))
    return made, problems


def revert_to_hub(meta_model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Module tensors (or symbols of them) under hub names, as ``save_pretrained`` reverts them.

    transformers 5.17-5.23: ``core_model_loading.revert_weight_conversion``.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        return dict(revert_weight_conversion(meta_model, dict(tensors)))


def tie_map(model: Any) -> dict[str, str]:
    """Names that a transformers model ties, target to source; empty for other modules."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})
