"""Code that depends on internals of other packages, each with the version at which it was read.

Nothing here is needed for plain torch modules; transformers is imported only inside functions.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = [
    "HubGroup",
    "default_conversions",
    "default_store",
    "empty_dtensor",
    "fsdp_parameter_ids",
    "fsdp_unreduced_ids",
    "hub_groups",
    "is_stateful_loader",
    "is_transformers_model",
    "modules_cache",
    "original_class",
    "remote_class",
    "revert_to_hub",
    "scaler_stages",
    "sibling_meshes",
    "tie_map",
    "tp_by_plan",
    "transformers_conversions",
]


def default_store() -> Any:
    """The store of the default process group. torch 2.11-2.13: private, but the only way to the store."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def scaler_stages(scaler: Any) -> set[str]:
    """How far the optimizers of a ``torch.amp.GradScaler`` are in a step: ``READY``, ``UNSCALED``, ``STEPPED``.

    torch 2.11-2.13: empty after ``update``.
    """
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    return {state["stage"].name for state in states if "stage" in state}


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
    return {id(p.sharded_param) for group in _fsdp_groups(model) for p in group.fsdp_params}


def fsdp_unreduced_ids(model: nn.Module) -> set[int]:
    """ids of the parameters for which ``fully_shard`` keeps a gradient that it has not reduced yet.

    torch 2.11-2.13: the gradient of the whole parameter, or its sum in the reduce dtype, after a backward without
    gradient sync; of HSDP without all-reduce, one partial sum a group.
    """
    found: set[int] = set()
    for group in _fsdp_groups(model):
        partial = getattr(group, "_partial_reduce_output", None) is not None
        for p in group.fsdp_params:
            whole = getattr(p, "_unsharded_param", None)  # missing before the first forward
            summed = getattr(p, "unsharded_accumulated_grad", None) is not None
            if partial or summed or (whole is not None and whole.grad is not None):
                found.add(id(p.sharded_param))
    return found


def _fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """The parameter groups that ``fully_shard`` keeps: one in the state of a module, or a list (torch 2.13)."""
    from torch.distributed.fsdp import FSDPModule

    found, stack = {model}, [model]
    while stack:  # model.modules() is a generator for each level of depth
        module = stack.pop()
        inner = {m for m in module._modules.values() if m is not None} - found
        stack += inner
        found |= inner
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            group = getattr(state, "_fsdp_param_group", None)
            groups = [group] if group is not None else []
        yield from groups


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before ``fully_shard`` swapped it (FSDP<Name>, FSDPModule, Name, …)."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    if isinstance(module, FSDPModule):
        return next(c for c in kind.__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule))
    return kind


def is_stateful_loader(loader: object) -> bool:
    """Whether a loader is torchdata's (0.11). Does not import torchdata."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(loader, module.StatefulDataLoader)


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a transformers model. Does not import transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def tp_by_plan(model: Any, mesh: Any) -> None:
    """Tensor parallelism as ``from_pretrained(distributed_config=DistributedConfig(tp_size=…))`` applies it, on meta.

    transformers 5.21-5.23: ``distributed.tensor_parallel.apply_tensor_parallelism``, which does not find tied parameters
    under their second names; here they are cut too, and tied again afterwards.
    """
    from transformers import DistributedConfig
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    for name, style_name in model._expand_parallel_plan(model.tp_plan).items():
        style = ALL_PARALLEL_STYLES[style_name]
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if last not in module._parameters:
            module = model.get_submodule(name)
            if style_name == "mla_kv_a_proj":
                module.config = model.config.get_text_config()
            style.install_forward(module, mesh)
        elif module._parameters[last] is not None:
            style.validate_param(module, last, mesh, parameter_name=name)
            style.shard_param(module, last, mesh)
        module._is_hooked = True
    model.tie_weights()
    model.config.distributed_config = DistributedConfig(tp_size=mesh.size())
    model._tp_size = mesh.size()


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


def default_conversions(meta_model: Any) -> list[Any]:
    """The conversions that ``save_pretrained`` inverts for a model that was not loaded from hub files.

    transformers 5.17-5.23: as in ``core_model_loading.revert_weight_conversion``, which finds nothing on a model
    whose class FSDP2 swapped.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    found = get_model_conversion_mapping(meta_model, add_legacy=False)
    return [conversion for conversion in found if not isinstance(conversion, PrefixChange)]


@dataclass(frozen=True, slots=True)
class HubGroup:
    """Stored tensors that one converter takes together: a layer's experts, the parts of a fused weight.

    The smallest set that the conversion can be run on.
    """

    target: str
    """Module name of the (first) tensor that it makes."""
    parts: tuple[tuple[str, str], ...]
    """(stored name, source pattern that it matched), in the order in which the converter takes them."""
    converter: Any
    meta_model: Any

    @property
    def sources(self) -> tuple[str, ...]:
        """Stored names."""
        return tuple(name for name, _ in self.parts)

    @property
    def kinds(self) -> str:
        """The operations, in words."""
        return " + ".join(type(op).__name__ for op in self.converter.operations)

    @property
    def targets(self) -> tuple[str, ...]:
        """Module names of all tensors that it makes, as far as the converter's patterns tell."""
        patterns: list[str] = list(self.converter.target_patterns)
        found = next((p for p in patterns if p in self.target), None)
        if found is None:
            return (self.target,)
        prefix, _, suffix = self.target.partition(found)
        return tuple(prefix + p + suffix for p in patterns)

    def run(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Convert ``tensors`` (by stored name; real ones or symbols). Returns the results by module name."""
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.parts:
            converter.add_tensor(self.target, name, pattern, tensors[name])
        with torch.no_grad():
            made = converter.convert(self.target, model=self.meta_model, config=self.meta_model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def hub_groups(
    stored: Iterable[str], conversions: Sequence[Any], meta_model: Any
) -> tuple[list[tuple[str, str]], list[HubGroup]]:
    """Sort stored names into those that are only renamed and those that a converter takes, as ``from_pretrained``.

    A function of the whole list of names: some renames only start once another key was seen, in natural
    order. Returns (module name, stored name) for the first kind, names that the model does not have included.

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
    names = set(stored)
    plain: list[tuple[str, str]] = []
    parts: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if pattern is None or target not in wanted:
            plain.append((target, name))
        else:
            parts.setdefault(target, []).append((name, pattern))
    groups = [
        HubGroup(target, tuple(found), by_pattern[found[0][1]], meta_model) for target, found in parts.items()
    ]
    return plain, groups


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


def modules_cache() -> str:
    """The directory into which transformers copies the Python files of models. 5.17-5.23."""
    from transformers.utils.hub import HF_MODULES_CACHE

    return str(HF_MODULES_CACHE)


def remote_class(reference: str, directory: str, auto_class: str) -> Any:
    """The model class that a directory's own code defines, as ``from_pretrained(trust_remote_code=True)`` takes it.

    Runs that code. ``reference`` is ``[repository--]module.Class``; another repository's is taken from the local
    cache of the hub only. transformers 5.17-5.23: as in ``_BaseAutoModelClass.from_config``.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

    found: Any = get_class_from_dynamic_module(reference, directory, local_files_only=True)
    found.register_for_auto_class(auto_class)  # a later save_pretrained then copies the files
    return add_generation_mixin_to_remote_model(found)
