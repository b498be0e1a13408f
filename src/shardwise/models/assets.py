"""The small files beside a model's tensors: config, generation config, tokenizer, the Python files of its classes."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import FormatError
from ..internals.peft import adapter_configs, has_adapters, stored_config
from ..internals.torch import original_class
from ..internals.transformers import auto_class_of, is_transformers_model
from ..limits import inside, parse_json, read_small
from ..names import unwrap
from .homes import home_of

__all__ = ["ADAPTERS_NAME", "TOKENIZER_FILES", "asset_files", "read_assets"]

ADAPTERS_NAME = "adapters.json"
#: The field of a config that names the file of the weights beside it: nothing that is written has a file of that name.
_WEIGHTS_FIELD = "transformers_weights"

#: Files of tokenizers and processors (transformers 5; also the sentencepiece and BPE originals).
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def asset_files(model: Any) -> dict[str, bytes]:
    """Config, generation config, own code and, if it came from a local directory, the tokenizer: name → content.

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
        stored = _read_files(home, ("generation_config.json", *TOKENIZER_FILES))
        found = {**_code_beside(home, {**stored, **found}), **stored, **found}
    return found


def _adapters_of(model: Any) -> dict[str, bytes]:
    """The configs of PEFT's adapters, which distinguish such a checkpoint from one of the base model."""
    if not has_adapters(model):
        return {}
    configs = {name: stored_config(model, name) for name in adapter_configs(model)}
    # A method's field that JSON can't express must not prevent a checkpoint.
    return {ADAPTERS_NAME: json.dumps(configs, indent=2, sort_keys=True, default=str).encode()}


def read_assets(folder: str) -> dict[str, bytes]:
    """Config, generation config, tokenizer files and own code of a directory: name → content.

    Raises :class:`SourceError` if one can't be read, :class:`FormatError` if the config is not a JSON object.
    """
    found = _read_files(folder, ("config.json", "generation_config.json", *TOKENIZER_FILES))
    if "config.json" in found:
        file = os.path.join(folder, "config.json")
        config = parse_json(found["config.json"], file, "config")
        if not isinstance(config, dict):
            raise FormatError("not a JSON object, which a config is", path=file)
        if config.pop(_WEIGHTS_FIELD, None) is not None:
            found["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return {**_code_beside(folder, found), **found}


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
        found |= _with_imports(file)
    return found


def _code_beside(folder: str, documents: Mapping[str, bytes]) -> dict[str, bytes]:
    """The Python files that ``auto_map`` in a document of a directory names, and the files that they import there."""
    found: dict[str, bytes] = {}
    for content in documents.values():
        for module in _modules_of(content):
            file = inside(folder, f"{module}.py")
            if os.path.isfile(file):
                found |= _with_imports(file)
    return found


def _modules_of(document: bytes) -> list[str]:
    """The modules that ``auto_map`` of a JSON document names, without those of other repositories (``repo--…``)."""
    try:
        auto_map = json.loads(document)["auto_map"]
        references = [
            r for value in auto_map.values() for r in (value if isinstance(value, list) else [value])
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    modules = (r.partition(".")[0] for r in references if isinstance(r, str))
    return [m for m in modules if re.fullmatch(r"\w+", m)]


_RELATIVE_IMPORT = re.compile(rb"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)


def _with_imports(file: str) -> dict[str, bytes]:
    """A Python file and the files beside it that it imports, directly or not: name → content. Runs no code."""
    folder, first = os.path.split(file)
    found: dict[str, bytes] = {}
    pending = {first}
    while pending:
        read = _read_files(folder, pending)
        found |= read
        imported = {
            f"{m.decode()}.py" for content in read.values() for m in _RELATIVE_IMPORT.findall(content)
        }
        pending = imported - found.keys()
    return found


def _read_files(folder: str, names: Iterable[str]) -> dict[str, bytes]:
    """The named files that exist: name → content."""
    found = {}
    for name in names:
        file = inside(folder, name)
        if os.path.isfile(file):
            found[name] = read_small(file, name)
    return found
