"""The small files next to a model's tensors: config, generation config, the Python files of its classes, other documents."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..errors import FormatError
from ..internals.peft import adapter_configs, has_adapters, stored_config
from ..internals.torch import original_class
from ..internals.transformers import auto_class_of, is_transformers_model
from ..limits import inside, leads_out, parse_json, read_small, refuse_foreign_config
from ..names import unwrap
from .documents import code_of, read_documents, with_imports
from .homes import home_of

__all__ = ["ADAPTERS_NAME", "asset_files", "read_assets"]

ADAPTERS_NAME = "adapters.json"
#: The field of a config that names the file of its weights. Nothing that we write has a file of that name.
_WEIGHTS_FIELD = "transformers_weights"


def asset_files(model: Any) -> dict[str, bytes]:
    """Config, generation config, own code and, if it came from a local directory, its other documents: name → content.

    For a model with PEFT adapters also the adapters' configs.
    """
    model = unwrap(model)
    adapters = _adapters_of(model)
    if not is_transformers_model(model):
        return adapters
    config = copy.deepcopy(model.config)
    config.architectures = [original_class(model).__name__]
    if (
        getattr(config, _WEIGHTS_FIELD, None) is not None
    ):  # of the files that it was loaded from; save_pretrained drops it, too
        delattr(config, _WEIGHTS_FIELD)
    # The dtype of most elements: some classes keep their first parameters in fp32, and "auto" would use that for all. Float8 are
    # codes, in which no model can be built.
    floats: Counter[Any] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1:
            floats[parameter.dtype] += parameter.numel()
    config.dtype = str(max(floats, key=lambda d: floats[d])).removeprefix("torch.") if floats else None
    code = _code_of(model, config)
    found = {**adapters, **code, "config.json": config.to_json_string(use_diff=True).encode()}
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        found["generation_config.json"] = generation.to_json_string(use_diff=True).encode()
    home = home_of(model) or getattr(model.config, "name_or_path", "") or ""
    if os.path.isdir(home):
        stored = read_documents(home, without=found.keys())
        found = {**code_of(home, {**stored, **found}), **stored, **found}
    return found


def _adapters_of(model: Any) -> dict[str, bytes]:
    """The configs of PEFT's adapters, which distinguish such a checkpoint from one of the base model."""
    if not has_adapters(model):
        return {}
    configs = {name: stored_config(model, name) for name in adapter_configs(model)}
    # A method's field that JSON can't express must not prevent a checkpoint.
    return {ADAPTERS_NAME: json.dumps(configs, indent=2, sort_keys=True, default=str).encode()}


def read_assets(folder: str) -> dict[str, bytes]:
    """Config, own code and all other documents of a directory: name → content.

    A config that is a link out of the directory is read as a load reads it, and written again. Raises :class:`SourceError` if a file
    can't be read or such a config is not a model's, :class:`FormatError` if the config is not a JSON object.
    """
    file = os.path.join(folder, "config.json")
    is_linked = os.path.lexists(file) and leads_out(folder, file)
    found = read_documents(folder, without={"config.json"} if is_linked else ())
    if is_linked:
        found["config.json"] = read_small(file, "config")
    if "config.json" in found:
        config = parse_json(found["config.json"], file, "config")
        refuse_foreign_config(folder, file, config)
        if not isinstance(config, dict):
            raise FormatError("not a JSON object, which a config is", path=file)
        if config.pop(_WEIGHTS_FIELD, None) is not None or is_linked:
            found["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return {**code_of(folder, found), **found}


def _code_of(model: Any, config: Any) -> dict[str, bytes]:
    """The Python files of a custom model class and its config class; notes them in ``config``.

    ``save_pretrained`` does the same, but looks at the class that ``fully_shard`` made and so copies the wrong file.
    """
    found: dict[str, bytes] = {}
    for cls in (original_class(model), type(model.config)):
        auto_class = auto_class_of(cls)
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if auto_class is None or file is None:
            continue
        reference = f"{os.path.basename(file).removesuffix('.py')}.{cls.__name__}"
        config.auto_map = {**(getattr(config, "auto_map", None) or {}), auto_class: reference}
        found |= with_imports(os.path.basename(file), _reader_of(os.path.dirname(file)))
    return found


def _reader_of(folder: str) -> Callable[[str], bytes | None]:
    """Reads files of a folder from which this process has imported code; links in it are its own."""

    def read(name: str) -> bytes | None:
        file = inside(folder, name)
        return read_small(file, name) if os.path.isfile(file) else None

    return read
