"""The small files beside a model's tensors: config, generation config, tokenizer."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable
from typing import Any

from torch import nn

from .._compat import is_transformers_model, original_class
from ..catalog.manifest import FileEntry
from ..errors import FormatError, SourceError
from ..names import unwrap
from ..recipe.record import home_of
from .write import write_file

__all__ = ["companion_files", "read_companions", "write_companions"]

#: What tokenizers and processors are stored in (transformers 5; also the sentencepiece and BPE originals).
_TOKENIZER_FILES = (
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


def companion_files(model: Any) -> dict[str, bytes]:
    """Config, generation config and, if the model came from a local directory, its tokenizer: name → content."""
    model = unwrap(model)
    if not is_transformers_model(model):
        return {}
    config = copy.deepcopy(model.config)
    config.architectures = [original_class(model).__name__]
    floats = [p.dtype for p in model.parameters() if p.is_floating_point()]
    config.dtype = str(floats[0]).removeprefix("torch.") if floats else None
    found = {"config.json": config.to_json_string(use_diff=True).encode()}
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        found["generation_config.json"] = generation.to_json_string(use_diff=True).encode()
    home = home_of(model) or getattr(model.config, "name_or_path", "") or ""
    if os.path.isdir(home):
        found = {**_read_files(home, ("generation_config.json", *_TOKENIZER_FILES)), **found}
    return found


def write_companions(folder: str, model: nn.Module, files: dict[str, FileEntry]) -> None:
    """Write them into ``model/`` of a checkpoint and add their entries."""
    for name, content in companion_files(model).items():
        files[f"model/{name}"] = write_file(os.path.join(folder, name), content)


def read_companions(folder: str) -> dict[str, bytes]:
    """Config, generation config and tokenizer files of a directory: name → content.

    Raises :class:`SourceError` if one can't be read, :class:`FormatError` if the config is not a JSON object.
    """
    found = _read_files(folder, ("config.json", "generation_config.json", *_TOKENIZER_FILES))
    if "config.json" in found:
        file = os.path.join(folder, "config.json")
        try:
            config = json.loads(found["config.json"])
        except (ValueError, RecursionError) as error:
            raise FormatError(f"not JSON ({error})", path=file) from error
        if not isinstance(config, dict):
            raise FormatError("not a JSON object, which a config is", path=file)
    return found


def _read_files(folder: str, names: Iterable[str]) -> dict[str, bytes]:
    """Those of the named files that are there: name → content."""
    found = {}
    for name in names:
        file = os.path.join(folder, name)
        if os.path.isfile(file):
            try:
                with open(file, "rb") as stream:
                    found[name] = stream.read()
            except OSError as error:
                raise SourceError(f"can't be read: {error.strerror or error}", path=file) from error
    return found
