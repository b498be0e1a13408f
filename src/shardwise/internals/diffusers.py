"""What shardwise uses of diffusers that is private, or moves between releases. diffusers 0.37-0.42.

Importing this does not import diffusers, and asking whether a module is a diffusers model doesn't either.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from .torch import original_class

#: The first part of the names of a model's files.
STEM = "diffusion_pytorch_model"
#: The file of a pipeline's adapters, and the field of its metadata with their configs. diffusers 0.37-0.42: ``loaders.lora_base``.
LORA_NAME, LORA_METADATA = "pytorch_lora_weights.safetensors", "lora_adapter_metadata"


def is_diffusers_config(config: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a config is one that diffusers' models write: a mapping with the name of the class in it.

    diffusers 0.37-0.42: ``_class_name``, and ``_diffusers_version`` where a class has an argument ``model_type`` of its own, which is
    otherwise transformers'. Without it, such a folder would be called a broken model of transformers.
    """
    return (
        isinstance(config, Mapping)
        and ("model_type" not in config or "_diffusers_version" in config)
        and isinstance(config.get("_class_name"), str)
    )


def is_diffusers_model(module: nn.Module) -> bool:
    """Whether a module is a model of diffusers; never imports diffusers itself.

    diffusers 0.37-0.42: ``models.modeling_utils.ModelMixin``. Without it, names that a class changes on load would be missing.
    """
    modeling = sys.modules.get("diffusers.models.modeling_utils")
    return modeling is not None and isinstance(module, modeling.ModelMixin)


def weights_names(variant: str | None, use_safetensors: bool | None) -> list[str]:
    """The files that ``from_pretrained`` looks for, in its order: an index, its older name in a variant, one file.

    diffusers 0.37-0.42: ``ModelMixin.from_pretrained`` with ``_fetch_index_file``, ``_fetch_index_file_legacy`` and ``_add_variant``.
    An index of ``.bin`` files counts only where safetensors are not wanted. Without it, a folder with several variants, or
    with a single file next to an index, would not be the model that diffusers opens.
    """
    part = "" if variant is None else f".{variant}"
    end = "bin" if use_safetensors is False else "safetensors"
    older = [] if variant is None else [f"{STEM}.{end}{part}.index.json"]
    pickled = [f"{STEM}{part}.bin"] if use_safetensors is None else []
    return [f"{STEM}.{end}.index{part}.json", *older, f"{STEM}{part}.{end}", *pickled]


def class_of(config: Mapping[str, Any]) -> Any | None:
    """The model class that a config names; None if diffusers has no such model. Raises :class:`ImportError` without diffusers.

    diffusers 0.37-0.42: ``models.modeling_utils.ModelMixin``. Without it, a scheduler's config would be taken for a model's.
    """
    import diffusers
    from diffusers.models.modeling_utils import ModelMixin

    try:
        found = getattr(diffusers, config["_class_name"], None)
    except Exception:  # the attribute imports the class's module, which may fail in any way
        return None
    return found if isinstance(found, type) and issubclass(found, ModelMixin) else None


def build_from_config(kind: Any, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A model of a class, built as ``from_pretrained`` builds it: with ``dtype`` as torch's default.

    diffusers 0.37-0.42. Without it, buffers that no file stores would be computed in another dtype.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return kind.from_config(dict(config))
    finally:
        torch.set_default_dtype(before)


def renamed_on_load(model: Any, names: Collection[str]) -> dict[str, str]:
    """Stored name → the model's, of the names that a class changes when it loads one file: attention of old VAEs.

    ``model`` may be sharded. diffusers 0.37-0.42: ``_fix_state_dict_keys_on_load``, which is run on the names
    alone. Without it, files of older versions would lack their attention.
    """
    fix = getattr(model, "_fix_state_dict_keys_on_load", None)
    if fix is None:
        return {}
    state = {name: name for name in names}
    fix(state)
    return {stored: own for own, stored in state.items() if stored != own}


def unused_patterns(model: Any) -> set[str]:
    """Patterns of stored names that a class has no use for.

    diffusers 0.37-0.42: ``_keys_to_ignore_on_load_unexpected``. Without it, loads that ``from_pretrained`` takes without a word are
    refused.
    """
    return set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def written_config(model: Any) -> str:
    """The ``config.json`` that ``save_pretrained`` writes for a model, which may be sharded. Doesn't change the model's own config.

    diffusers 0.37-0.42: ``ConfigMixin.to_json_string`` of ``_internal_dict``. Without it, the file would name the class that ``fully_shard``
    made, which diffusers doesn't know, or a quantization of weights that are plain.
    """
    kind: Any = original_class(model)
    twin = kind.__new__(kind)
    config = dict(model._internal_dict)
    if getattr(model, "hf_quantizer", None) is None:  # of the source, which was decoded while it was loaded
        config.pop("quantization_config", None)
    twin.__dict__["_internal_dict"] = config
    text: str = twin.to_json_string()
    return text


def lora_prefix(model: Any) -> str:
    """What a pipeline's ``save_lora_weights`` writes before the name of each tensor of a model's adapter: ``unet`` or ``transformer``.

    diffusers 0.37-0.42: ``loaders.unet.UNet2DConditionLoadersMixin.unet_name``, ``loaders.lora_pipeline.TRANSFORMER_NAME``, which is also the
    default of ``load_lora_adapter``. Without it, no pipeline would find the adapter.
    """
    found: str = getattr(model, "unet_name", "transformer")
    return found


def lora_metadata(model: Any, config: Any) -> dict[str, str]:
    """The metadata of the file in which a pipeline's ``save_lora_weights`` stores a model's adapter with its PEFT config.

    diffusers 0.37-0.42: ``LoraBaseMixin._save_lora_weights``. Without it, pipelines would load the adapter with another scale.
    """
    prefix = lora_prefix(model)
    settings = {
        f"{prefix}.{key}": sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    return {LORA_METADATA: json.dumps(settings, indent=2, sort_keys=True)}


def lora_config(stored: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any] | None) -> Any:
    """The PEFT config of an adapter in PEFT's names, without a prefix: from the file's metadata, else from names and shapes.

    diffusers 0.37-0.42: ``utils.peft_utils._create_lora_config``, called as in ``load_lora_adapter``. Without it, a file without metadata would be
    given another scale than diffusers gives it.
    """
    from diffusers.utils import peft_utils

    create: Any = peft_utils._create_lora_config
    state = {name: torch.empty(shape, device="meta") for name, shape in stored.items()}
    ranks = {f"^{name}": shape[1] for name, shape in stored.items() if "lora_B" in name and len(shape) > 1}
    return create(state, None, None if settings is None else dict(settings), ranks)


def note_path(model: Any, path: str) -> None:
    """Note where a model was loaded from, as ``from_pretrained`` does.

    diffusers 0.37-0.42: ``_name_or_path`` in its config. Without it, pipelines and adapters would not name their base.
    """
    model.register_to_config(_name_or_path=path)


# ----------------------------------------------------------------------------------------------------
# Pipelines


def component_class(library: str, name: str) -> Any | None:
    """The class of a pipeline's component, of diffusers or transformers; None for one of another library or of a pipeline's own code.

    diffusers 0.37-0.42: ``model_index.json`` names both; a library may be a folder of ``diffusers.pipelines``, such as ``stable_diffusion``.
    Without it, a component could be built by another class than its pipeline's.
    """
    try:
        if library not in ("diffusers", "transformers"):
            from diffusers import pipelines

            return getattr(getattr(pipelines, library, None), name, None)
        return getattr(importlib.import_module(library), name, None)
    except Exception:  # the attribute imports the class's module, which may fail in any way
        return None


def download_pipeline(path: str, left_out: Collection[str], options: Mapping[str, Any]) -> str:
    """The folder of a pipeline's snapshot, without the weights of some components.

    diffusers 0.37-0.42: ``DiffusionPipeline.download`` leaves out the components that it is given. Without it, weights would be
    downloaded that nobody reads.
    """
    import diffusers

    return str(diffusers.DiffusionPipeline.download(path, **options, **dict.fromkeys(left_out, True)))


def assembled(folder: str, components: Mapping[str, Any], dtype: Any, options: Mapping[str, Any]) -> Any:
    """The pipeline in a local folder, with these components instead of its own, and its others loaded as diffusers loads them.

    diffusers 0.37-0.42, of which older ones call ``dtype`` ``torch_dtype``. ``DiffusionPipeline`` itself ignores an optional component
    that it is given (``WanPipeline``'s transformers), so the pipeline's own class is called. Its config then names the components'
    classes as they were before FSDP2 changed them: otherwise ``save_pretrained`` would write a ``model_index.json`` that can't be opened.
    """
    import diffusers
    from diffusers.utils import deprecation_utils

    name = "dtype" if hasattr(deprecation_utils, "_resolve_dtype") else "torch_dtype"
    kind: Any = diffusers.DiffusionPipeline
    kind = getattr(diffusers, str(kind.load_config(folder)["_class_name"]), kind)
    pipeline = kind.from_pretrained(folder, **{name: dtype}, **options, **components)
    name_components(pipeline)
    return pipeline


def name_components(pipeline: Any) -> None:
    """Note in a pipeline's config the classes that its models had before FSDP2 changed them.

    diffusers 0.37-0.42: pairs of library and class, in ``model_index.json``. Without it, nothing could open what ``save_config`` writes.
    """
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module) and (kind := original_class(component)) is not type(component):
            pipeline.register_to_config(**{name: (kind.__module__.partition(".")[0], kind.__name__)})


def is_pipeline(parts: Any) -> bool:
    """Whether something is a pipeline of diffusers; never imports diffusers itself.

    diffusers 0.37-0.42: ``pipelines.pipeline_utils.DiffusionPipeline``. Without it, a pipeline would be taken for a path.
    """
    module = sys.modules.get("diffusers.pipelines.pipeline_utils")
    return module is not None and isinstance(parts, module.DiffusionPipeline)


def save_others(pipeline: Any, folder: str, models: Collection[str]) -> None:
    """Save ``model_index.json`` and all components of a pipeline except these models, as ``save_pretrained`` does.

    diffusers 0.37-0.42: each component that has ``save_pretrained``, in a folder of its name. Without it, an export would lack the scheduler
    and the tokenizers.
    """
    name_components(pipeline)
    pipeline.save_config(folder)
    for name, component in pipeline.components.items():
        if name not in models and component is not None and hasattr(component, "save_pretrained"):
            component.save_pretrained(f"{folder}/{name}")


def converted_from_original(model: Any, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors of a file with the names of the model's authors under diffusers' names; empty if diffusers has no conversion.

    diffusers 0.37-0.42 list the conversions by class. Without it, such a file has names that no module has.
    """
    loader: Any = importlib.import_module("diffusers.loaders.single_file_model")
    name = loader._get_single_file_loadable_mapping_class(type(model))
    if name is None:
        return {}
    convert = loader.SINGLE_FILE_LOADABLE_CLASSES[name]["checkpoint_mapping_fn"]
    found: Mapping[str, Any] = convert(checkpoint=dict(checkpoint), config=dict(model.config))
    return found
