"""Where a model came from: its directory, its quantized source, and the small files next to its weights."""

from __future__ import annotations

import copy
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..catalog.records import Catalog
from ..errors import FormatError
from ..internals.diffusers import is_diffusers_config, is_diffusers_model, written_config
from ..internals.peft import adapter_configs, base_of, has_adapters, stored_config
from ..internals.torch import original_class
from ..internals.transformers import auto_class_of, is_transformers_model
from ..limits import inside, leads_out, parse_json, read_small, refuse_foreign_config
from ..names import unwrap
from ..objects import frozen
from ..storage.records import is_url
from .documents import code_of, read_documents, with_imports

if TYPE_CHECKING:
    from torch import nn


# ----------------------------------------------------------------------------------------------------
# Remembers the directory that a model was built from, and the quantized source that filled it.
#
# Export copies config and tokenizer from the one, and writes the format of the other.

# Keyed by the model object, not stored on it: a model's attributes are its owner's.
_HOMES: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_SOURCES: weakref.WeakKeyDictionary[nn.Module, LoadedFrom] = weakref.WeakKeyDictionary()


@frozen
class LoadedFrom:
    """A quantized source, and its files as they were when a model was filled from it."""

    root: str
    versions: Mapping[str, tuple[int, object]]
    """As :func:`versions_of`."""


def remember_home(model: nn.Module, directory: str) -> None:
    """Keep the absolute path of the directory of a model's config: the working directory may change."""
    _HOMES[unwrap(model)] = os.path.abspath(directory)


def home_of(model: nn.Module) -> str | None:
    """The directory of a model's config and tokenizer; None if it was not built from one."""
    return _HOMES.get(unwrap(model))


def inherit_home(model: nn.Module, ancestor: nn.Module) -> None:
    """Note that ``model`` was built from the same directory as ``ancestor``, if any."""
    if (home := home_of(ancestor)) is not None:
        _HOMES[unwrap(model)] = home
    if (source := source_of(ancestor)) is not None:
        _SOURCES[unwrap(model)] = source


def remember_source(models: Iterable[nn.Module], catalog: Catalog) -> None:
    """Note the source that a model was filled from, if it is quantized. ``models``: it, and what is inside its wrappers."""
    if catalog.coded:
        root = catalog.root if is_url(catalog.root) else os.path.abspath(catalog.root)
        source = LoadedFrom(root, versions_of(catalog))
        for model in models:
            _SOURCES[unwrap(model)] = source


def source_of(model: nn.Module) -> LoadedFrom | None:
    """The quantized source of a model's last load from one; None if there was none."""
    return _SOURCES.get(unwrap(model))


def versions_of(catalog: Catalog) -> dict[str, tuple[int, object]]:
    """What tells whether the files of a source are still the same: of each its size, and its time or the store's version."""
    found: dict[str, tuple[int, object]] = {}
    for file in catalog.files:
        if is_url(file.path):
            found[file.path] = file.nbytes, file.version
        else:
            path = os.path.abspath(file.path)
            found[path] = file.nbytes, os.stat(path).st_mtime_ns
    return found


# ----------------------------------------------------------------------------------------------------
# The small files next to a model's tensors: config, generation config, the Python files of its classes, other documents.

ADAPTERS_NAME = "adapters.json"
#: The field of a config that names the file of its weights. Nothing that we write has a file of that name.
_WEIGHTS_FIELD = "transformers_weights"


def asset_files(model: Any) -> dict[str, bytes]:
    """Config, generation config, own code and, if it came from a local directory, its other documents: name → content.

    For a model with PEFT adapters, those of its base, and the adapters' configs. For a model of diffusers, as with its ``save_pretrained``, only the config.
    """
    adapters = _adapters_of(unwrap(model))
    model = base_of(model)
    if is_diffusers_model(model):
        return {**adapters, "config.json": written_config(model).encode()}
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


def with_dtype(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """The content of ``config.json`` of a model whose weights are in ``dtype``, a name of torch's; None: as it is. Pure.

    A diffusers config has no dtype.
    """
    found = dict(config)
    if dtype is not None and not is_diffusers_config(config):
        found.pop("torch_dtype", None)
        found["dtype"] = dtype
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
