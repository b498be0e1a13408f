"""What shardwise uses of PEFT that PEFT keeps private, or moves between releases. peft 0.18-0.21.

Importing this module does not import PEFT, nor does asking whether a model has adapters: with such a model PEFT is
imported already.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

from torch import nn

from ..errors import UnsupportedConversionError
from ..names import canonical_name, unwrap
from ..objects import frozen
from .diffusers import is_diffusers_model
from .torch import original_class


def _class(module: str, name: str) -> Any:
    """A class of PEFT, or an empty tuple (of which nothing is an instance) if PEFT is not imported."""
    return getattr(sys.modules.get(module), name, ())


def peft_model(model: nn.Module) -> Any | None:
    """The ``PeftModel`` inside wrappers around the root; None for any other module.

    Without it, callers would import PEFT for models that have no adapters, too.
    """
    model = unwrap(model)
    return model if isinstance(model, _class("peft.peft_model", "PeftModel")) else None


def base_of(model: nn.Module) -> nn.Module:
    """The base model inside a ``PeftModel``; of any other module, the module itself (unwrapped).

    Without it, a ``PeftModel`` would count as no transformers model, and its base's hub names would not be found.
    """
    found = peft_model(model)
    inner: nn.Module = unwrap(model) if found is None else unwrap(found.get_base_model())
    return inner


def adapted_model(model: nn.Module) -> Any | None:
    """The module that has the adapters of a model and their configs: its ``PeftModel``, or a diffusers model with adapters inside.

    diffusers 0.37-0.42: ``add_adapter`` injects PEFT's layers into the model itself. Without it, such a model's adapters could be neither
    loaded nor exported.
    """
    found = peft_model(model)
    if found is None and is_diffusers_model(inner := unwrap(model)) and adapter_configs(inner):
        return inner
    return found


def active_adapters(model: Any) -> list[str]:
    """The names of the active adapters of what :func:`adapted_model` found.

    diffusers 0.37-0.42 has a method where PEFT has a property. Without it, an export would merge adapters that are off.
    """
    found = model.active_adapters
    found = found() if callable(found) else found
    return [found] if isinstance(found, str) else list(found)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is PEFT's layer or wrapper around one of the base's.

    Without it, the parts of a layer with several adapters would count as repeated blocks, and be FSDP2 groups.
    """
    return _is_tuner(module) or _is_wrapper(module)


def adapted_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The base's modules that PEFT put a layer around, by id, with the outermost such layer.

    Without it, FSDP2 would gather experts only after PEFT's layer around them has read their parameters.
    """
    found: dict[int, nn.Module] = {}
    for module in model.modules():  # parents first
        inner = module._modules.get("base_layer") if _is_tuner(module) else None
        if inner is not None:
            found[id(inner)] = found.get(id(module), module)
    return found


def cut_adapter(model: nn.Module) -> str | None:
    """The path of a layer whose adapters have the sizes of this rank's shard of its weight, not of the whole; None if there is none.

    peft before 0.21 takes every DTensor for a shard of tensor parallelism; later ones take those on meshes whose axes have names other than
    ``fsdp``. Without it, a model's forward would fail with sizes that don't fit.
    """
    for path, layer in model.named_modules():
        inner = layer._modules.get("base_layer") if _is_tuner(layer) else None
        if isinstance(inner, nn.Linear):
            whole = {name: getattr(inner, name) for name in ("in_features", "out_features")}
            if any(getattr(layer, name, size) != size for name, size in whole.items()):
                return str(path)
    return None


def _is_tuner(module: nn.Module) -> bool:
    return isinstance(module, _class("peft.tuners.tuners_utils", "BaseTunerLayer"))


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module wraps one trained whole (``modules_to_save``) or in part (``trainable_token_indices``)."""
    return isinstance(module, _class("peft.utils.other", "AuxiliaryTrainingWrapper"))


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT changed a model: it is a ``PeftModel``, or adapters were injected into it.

    Without it, an export under hub names would take a model with adapters, which has no such names.
    """
    if "peft" not in sys.modules:
        return False
    return peft_model(model) is not None or any(map(is_adapted, model.modules()))


def adapter_configs(model: nn.Module) -> dict[str, Any]:
    """PEFT's config of each adapter of a model, by the adapter's name.

    Without it, a checkpoint would lack the adapters' configs, and new adapters would have no rule of initial values.
    """
    return dict(getattr(unwrap(model), "peft_config", None) or {})


# ----------------------------------------------------------------------------------------------------
# Paths


@frozen
class BaseSlot:
    """The path of a module in the base model, with PEFT's parts left out.

    Without it, a module of the base and a trained copy of it could not be told apart: both have one path.
    """

    base: str | None
    """Path in the base model; None for modules outside it or of an adapter."""
    copy_of: str | None = None
    """The adapter for which it is a trained copy (``modules_to_save``); None for the base's own."""


def places(model: nn.Module) -> dict[str, BaseSlot]:
    """Every module of a model by canonical path, with that path as it is when PEFT's parts are left out.

    ``base_layer`` inside an adapted layer, ``original_module`` and ``modules_to_save.<adapter>`` inside a wrapper
    are the layer or wrapper itself, as in ``peft.utils.save_and_load._peft_key_to_original_key`` (0.21).
    Without it, the base's parameters would not be found under the base's names, to load them or to initialize them.
    """
    root = base_of(model)
    return {
        canonical_name(path): BaseSlot(
            None if place.base is None else canonical_name(place.base), place.copy_of
        )
        for path, place in _walk(model, "", "" if model is root else None, None, root)
    }


def is_of_base(name: str, places: Mapping[str, BaseSlot]) -> bool:
    """Whether a parameter is the base's own: neither an adapter's nor a copy in ``modules_to_save``. ``places``: of :func:`places`.

    Without it, an adapter that isn't trained now would count as a part of the base.
    """
    slot = places[name.rpartition(".")[0]]
    return slot.base is not None and slot.copy_of is None


def _walk(
    module: nn.Module, path: str, base: str | None, copy_of: str | None, root: nn.Module
) -> Iterator[tuple[str, BaseSlot]]:
    own = is_adapted(module)
    yield path, BaseSlot(None if own else base, copy_of)
    for name, child in module._modules.items():
        if child is None:
            continue
        inner = f"{path}.{name}" if path else name
        if child is root:
            yield from _walk(child, inner, "", None, root)
        elif _is_wrapper(module) and name == "modules_to_save":
            for adapter, trained in child._modules.items():
                if trained is not None:
                    yield from _walk(trained, f"{inner}.{adapter}", base, adapter, root)
        elif own:
            through = name in ("base_layer", "original_module", "token_adapter")
            yield from _walk(child, inner, base if through else None, copy_of, root)
        else:
            deeper = None if base is None else f"{base}.{name}" if base else name
            yield from _walk(child, inner, deeper, copy_of, root)


def add_adapter(model: Any, name: str, config: Any) -> None:
    """Add an adapter to a ``PeftModel``. What can be trained stays as it was.

    peft 0.18 and 0.19 freeze trained copies (``modules_to_save``) of the adapters that are there. Without it, those of the active
    adapter would not be trained.
    """
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.add_adapter(name, config)
    for parameter, trained in before:
        parameter.requires_grad_(trained)


def inject_adapter(model: Any, name: str, config: Any) -> None:
    """Add an adapter to a diffusers model on meta by its ``add_adapter``, in the dtypes that it gives a model with values.

    peft 0.18-0.21: ``_move_adapter_to_device_of_base_layer``, which leaves out what is on meta. Without it, the adapters of a
    model in half precision would be in fp32.
    """
    model.add_adapter(config, name)
    for _, layer in lora_layers(model):
        weight = getattr(layer.get_base_layer(), "weight", None)
        if weight is None or not weight.is_floating_point():
            continue
        for held in (*layer.adapter_layer_names, *layer.other_param_names):
            container = getattr(layer, held, None)
            if isinstance(container, nn.ModuleDict | nn.ParameterDict) and name in container:
                container[name] = container[name].to(weight.dtype)


# ----------------------------------------------------------------------------------------------------
# Adapters' files


#: Settings that PEFT matches with names of modules, and the expression that it makes of each.
_FORMS = {
    "target_modules": "{}",
    "exclude_modules": "{}",
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
    "modules_to_save": r"(^|.*\.){}($|\..*)",
}


def expressions_in(config: Any) -> Iterator[tuple[str, str, list[str]]]:
    """Each setting of a config that PEFT matches with names: its name, the form of its expressions, and those.

    Lists of ``target_modules`` and ``exclude_modules`` are compared as text. Without it, an expression from a stranger could
    keep PEFT busy forever.
    """
    for setting, form in _FORMS.items():
        value = getattr(config, setting, None)
        if isinstance(value, str):
            value = [value]
        elif form == "{}":
            continue
        listed = value if isinstance(value, Iterable) else ()  # PEFT refuses what is none
        yield setting, form, [one for one in listed if isinstance(one, str)]


def select_adapter(
    model: Any, adapter: str, state: Mapping[str, Any], embeddings: bool | Literal["auto"]
) -> dict[str, Any]:
    """The entries of a state dict that PEFT stores for an adapter, under its names in the file.

    ``state`` may hold symbols: for the supported methods PEFT only selects and renames. Without it, the caller
    would have to know for each method of PEFT what it stores.
    """
    from peft import get_peft_model_state_dict

    found: dict[str, Any] = get_peft_model_state_dict(
        model, state_dict=dict(state), adapter_name=adapter, save_embedding_layers=embeddings
    )
    return found


def convert_adapter(meta_base: Any, adapter: str, config: Any, stored: dict[str, Any]) -> dict[str, Any]:
    """PEFT's conversion of an adapter's stored tensors (symbols), if the base's class has changed since training.

    ``meta_base`` is an unsharded instance of the base's class. peft before 0.19 only renames, as transformers before 5.8 wants for
    some classes. peft 0.19 can't convert any with transformers 5.6 or newer, which is an :class:`UnsupportedConversionError`.
    Without it, such an adapter's file would name tensors that the model does not have.
    """
    renames = getattr(meta_base, "_checkpoint_conversion_mapping", None) or {}
    if renames:  # as in PeftModel.from_pretrained and load_peft_weights, peft 0.18-0.21
        stored = {_renamed(name, renames): symbol for name, symbol in stored.items()}
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
    except ImportError:
        return stored

    class Model:
        """The attributes of a PeftModel that PEFT reads. The live one is sharded and has no conversions."""

        def get_base_model(self) -> Any:
            return meta_base

        def __getattr__(self, name: str) -> Any:
            return getattr(meta_base, name)

    try:
        converted: dict[str, Any] = convert_peft_adapter_state_dict_for_transformers(
            model=cast(Any, Model()), peft_config=config, adapter_state_dict=stored, adapter_name=adapter
        )
    except TypeError as error:
        if "distributed_operation" not in str(error):
            raise
        raise UnsupportedConversionError(
            f"adapter {adapter!r} was trained on a class that has changed since, and PEFT 0.19 can't convert it with transformers "
            "5.6 or newer. Update: pip install 'peft>=0.20'"
        ) from error
    return converted


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    """A name of an adapter's file by the first of these expressions that fits it, after PEFT's prefix."""
    prefix = next((p for p in ("base_model.model.", "base_model.") if name.startswith(p)), "")
    inner = name.removeprefix(prefix)
    found = (re.subn(pattern, new, inner) for pattern, new in renames.items())
    return prefix + next((text for text, count in found if count), inner)


def embeddings_to_save(model: Any, adapter: str) -> bool | Literal["auto"]:
    """The value for ``save_embedding_layers="auto"`` if PEFT would ask the hub for it; else "auto".

    PEFT compares the vocabulary with the base's config. If the config is not on this machine, it counts as unchanged.
    Without it, an export would ask the hub for that config.
    """
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    config = model.peft_config[adapter]
    if os.path.isfile(os.path.join(config.base_model_name_or_path or "", "config.json")):
        return "auto"
    return any(
        path.rpartition(".")[2] in EMBEDDING_LAYER_NAMES and adapter in layer.scaling
        for path, layer in lora_layers(model)
    )


def stored_config(model: Any, adapter: str) -> dict[str, Any]:
    """The content of ``adapter_config.json`` as ``PeftModel.save_pretrained`` writes it.

    Without it, that file would lack the base's directory, or name the class that ``fully_shard`` made of the base's.
    """
    config = copy.deepcopy(model.peft_config[adapter])
    base = base_of(model)
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
    config.inference_mode = True
    content: dict[str, Any] = config.to_dict()
    if config.task_type is None:
        kind = original_class(base)
        content["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return {key: sorted(v) if isinstance(v, set) else v for key, v in content.items()}


def config_of(fields: Mapping[str, Any]) -> Any:
    """The config of a model that is trained, from what :func:`stored_config` made of it.

    peft 0.18-0.21: ``PeftConfig.from_peft_type``. Without it, a checkpoint's adapters could be exported only by the program that trains them.
    """
    import peft

    own = {**fields, "inference_mode": False}
    if own.get("task_type") is None:  # then stored_config added it
        own["auto_mapping"] = None
    return peft.PeftConfig.from_peft_type(**own)  # type: ignore[no-untyped-call]


# ----------------------------------------------------------------------------------------------------
# LoRA


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that LoRA adapts, with their canonical paths.

    Without it, new adapters would have no rule of initial values, and DoRA's magnitudes would not be found.
    """
    kind = _class("peft.tuners.lora.layer", "LoraLayer")
    for path, module in model.named_modules():
        if isinstance(module, kind):
            yield canonical_name(path), module
