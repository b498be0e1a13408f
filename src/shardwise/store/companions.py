"""The small files beside a model's tensors: config, generation config, tokenizer."""

from __future__ import annotations

import copy
import os
from typing import Any

from torch import nn

from .._compat import original_class
from ..catalog.manifest import FileEntry
from ..recipe.transformers import is_transformers_model
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
    home = getattr(model.config, "name_or_path", "") or ""
    if os.path.isdir(home):
        found = {**read_companions(home), **found}
    return found


def write_companions(folder: str, model: nn.Module, files: dict[str, FileEntry]) -> None:
    """Write them into ``model/`` of a checkpoint and add their entries."""
    for name, content in companion_files(model).items():
        files[f"model/{name}"] = write_file(os.path.join(folder, name), content)


def read_companions(folder: str) -> dict[str, bytes]:
    """Config, generation config and tokenizer files of a directory: name → content."""
    found = {}
    for name in ("config.json", "generation_config.json", *_TOKENIZER_FILES):
        file = os.path.join(folder, name)
        if os.path.isfile(file):
            with open(file, "rb") as stream:
                found[name] = stream.read()
    return found
