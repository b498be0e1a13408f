"""Reads configurations: Accelerate's YAML or JSON, and TrainingArguments as JSON. Values are taken as they stand."""

from __future__ import annotations

import re
from typing import Any

from ..errors import FormatError
from ..limits import parse_json, read_small
from .facts import Settings

#: Real ones have a few KiB, and a few hundred values.
_MOST_BYTES, _MOST_VALUES = 1024**2, 100_000
#: What the facts, which ``--json`` prints, must not repeat.
_SECRET = re.compile(r"token|secret|passw|credential|api_?key", re.IGNORECASE)

__all__ = ["is_accelerate", "is_arguments", "read_settings"]

_OF_ACCELERATE = {"compute_environment", "distributed_type", "fsdp_config", "num_processes"}
_OF_ARGUMENTS = {"output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "save_strategy"}


def read_settings(path: str) -> Settings:
    """The mapping in a ``.yaml``, ``.yml`` or ``.json`` file. Raises :class:`SourceError`, :class:`FormatError`."""
    raw = read_small(path, "configuration", _MOST_BYTES)
    found = parse_json(raw, path, "configuration") if path.endswith(".json") else _yaml(raw, path)
    if not isinstance(found, dict):
        raise FormatError("holds no settings: expected names and values", path=path)
    if not _is_small(found):
        raise FormatError(f"holds more than {_MOST_VALUES} values: no configuration", path=path)
    return Settings(path=path, values=_without_secrets(found))


def _is_small(found: Any) -> bool:
    """Whether a walk meets few values: aliases of YAML let one stand for billions."""
    waiting, count = [found], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count + len(waiting) > _MOST_VALUES:
            return False
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
    return True


def _without_secrets(found: dict[Any, Any]) -> dict[Any, Any]:
    """Values whose names say that they are secrets, as an ellipsis."""
    return {
        name: ("…" if value and _SECRET.search(str(name)) and isinstance(value, str) else value)
        if not isinstance(value, dict)
        else _without_secrets(value)
        for name, value in found.items()
    }


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
