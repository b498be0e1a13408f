"""Reads configurations: Accelerate's YAML or JSON, and TrainingArguments as JSON. Values are taken as they stand."""

from __future__ import annotations

from typing import Any

from ..errors import FormatError
from ..limits import MAX_VALUE_BYTES, parse_json, read_small
from .facts import Settings

__all__ = ["is_accelerate", "is_arguments", "read_settings"]

_OF_ACCELERATE = {"compute_environment", "distributed_type", "fsdp_config", "num_processes"}
_OF_ARGUMENTS = {"output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "save_strategy"}


def read_settings(path: str) -> Settings:
    """The mapping in a ``.yaml``, ``.yml`` or ``.json`` file. Raises :class:`SourceError`, :class:`FormatError`."""
    raw = read_small(path, "configuration", MAX_VALUE_BYTES)
    found = parse_json(raw, path, "configuration") if path.endswith(".json") else _yaml(raw, path)
    if not isinstance(found, dict):
        raise FormatError("holds no settings: expected names and values", path=path)
    return Settings(path=path, values=found)


def _yaml(raw: bytes, path: str) -> Any:
    import yaml  # transformers and huggingface_hub require it

    try:
        return yaml.safe_load(raw)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        text = " ".join(str(error).split())[:200]
        raise FormatError(f"is not YAML: {text}", path=path) from None


def is_accelerate(settings: Settings) -> bool:
    """Whether ``accelerate config`` writes such names; TrainingArguments have an ``fsdp_config``, too."""
    return bool(_OF_ACCELERATE & settings.values.keys()) and not is_arguments(settings)


def is_arguments(settings: Settings) -> bool:
    """Whether these are arguments of the HF Trainer."""
    return len(_OF_ARGUMENTS & settings.values.keys()) >= 1
