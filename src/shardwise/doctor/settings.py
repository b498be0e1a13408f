"""Reads configurations: Accelerate's YAML or JSON, and TrainingArguments as JSON or pickled. Values are taken as they stand."""

from __future__ import annotations

from typing import Any

from ..catalog.pickled_trees import Record
from ..catalog.torchfile import ANY_NAMES, read_torch_file
from ..errors import FormatError
from ..limits import MAX_CONFIG_DEPTH, MAX_COUNT, parse_json, read_small
from .facts import Settings

#: Real ones have a few KiB, and a few hundred values.
_MOST_BYTES, _MOST_VALUES = 1024**2, 100_000
#: Settings whose values the facts, which ``--json`` prints, repeat: those that rules read, without their prefixes. Any
#: other text or number may be a secret: under a name of its author's, within a URL or an argument.
_READ = frozenset(
    [
        "activation_checkpointing",
        "auto_wrap_policy",
        "backward_prefetch",
        "bf16",
        "compute_environment",
        "cp_size",
        "cpu_ram_efficient_loading",
        "distributed_type",
        "dynamo_backend",
        "dynamo_mode",
        "forward_prefetch",
        "fp16",
        "fsdp",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "ignore_data_skip",
        "load_best_model_at_end",
        "main_process_ip",
        "min_num_params",
        "mixed_precision",
        "num_machines",
        "num_processes",
        "offload_params",
        "optim",
        "rdzv_backend",
        "reshard_after_forward",
        "same_network",
        "save_only_model",
        "save_strategy",
        "sharding_strategy",
        "sp_size",
        "state_dict_type",
        "sync_module_states",
        "tf32",
        "tp_size",
        "transformer_layer_cls_to_wrap",
        "use_cpu",
        "use_orig_params",
        "version",
    ]
)
_HIDDEN = "…"

__all__ = ["ARGUMENTS_FILE", "is_accelerate", "is_arguments", "read_pickled_arguments", "read_settings"]

#: The HF Trainer's pickle of its arguments.
ARGUMENTS_FILE = "training_args.bin"

_OF_ACCELERATE = {"compute_environment", "distributed_type", "fsdp_config", "num_processes"}
_OF_ARGUMENTS = {"output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "save_strategy"}


def read_settings(path: str) -> Settings:
    """The mapping in a ``.yaml``, ``.yml`` or ``.json`` file. Raises :class:`SourceError`, :class:`FormatError`."""
    raw = read_small(path, "configuration", _MOST_BYTES)
    found = parse_json(raw, path, "configuration") if path.endswith(".json") else _yaml(raw, path)
    if not isinstance(found, dict):
        raise FormatError("holds no settings: expected names and values", path=path)
    _check_size(found, path)
    return Settings(path=path, values={name: _shown(name, value) for name, value in found.items()})


def read_pickled_arguments(path: str) -> Settings:
    """The fields of the TrainingArguments in a ``training_args.bin``. Nothing of it is run: an enum is its value, another object None.

    Raises :class:`SourceError`, :class:`FormatError`.
    """

    def pick(content: Any) -> Any:
        return _plain(content.state if isinstance(content, Record) else None)

    found, _ = read_torch_file(path, pick, names=ANY_NAMES)
    if not isinstance(found, dict):
        raise FormatError("holds no arguments of the HF Trainer", path=path)
    _check_size(found, path)
    return Settings(path=path, values={str(name): _shown(name, value) for name, value in found.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Record):  # an enum's member is a call with its value
        return value.args[0] if len(value.args) == 1 and isinstance(value.args[0], str) else None
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | float | str) else None


def _check_size(found: Any, path: str) -> None:
    """Refuse many values (aliases of YAML let one stand for billions), deep ones, and endless numbers."""
    waiting, count = [(found, 1)], 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if count + len(waiting) > _MOST_VALUES:
            raise FormatError(f"holds more than {_MOST_VALUES} values: no configuration", path=path)
        if depth > MAX_CONFIG_DEPTH:
            raise FormatError(
                f"has values nested deeper than {MAX_CONFIG_DEPTH}: no configuration", path=path
            )
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise FormatError(f"has a number above {MAX_COUNT}: no configuration", path=path)
        if isinstance(value, dict | list):
            waiting += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]


def _shown(name: Any, value: Any) -> Any:
    """A value for rules and facts: switches, and the settings that rules read."""
    if isinstance(value, dict):
        return {inner: _shown(inner, one) for inner, one in value.items()}
    if isinstance(value, list):
        return [_shown(name, one) for one in value]
    if isinstance(value, bool) or not value:
        return value
    is_read = str(name).removeprefix("fsdp_").removeprefix("parallelism_config_") in _READ
    return value if is_read and isinstance(value, str | int | float) else _HIDDEN


def _yaml(raw: bytes, path: str) -> Any:
    import yaml  # transformers and huggingface_hub require it

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """Counts what merge keys ("<<") copy: a few lines of them stand for billions of values."""

        copied = 0

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            self.copied += len(node.value)
            if self.copied > _MOST_VALUES:
                raise ValueError(f"its merge keys copy more than {_MOST_VALUES} values")

    try:
        return yaml.load(raw, Loader)
    except (
        Exception
    ) as error:  # PyYAML's constructors raise what Python does for "!!bool maybe" or "!!int ''"
        text = " ".join(str(error).split())[:200]
        raise FormatError(f"is not YAML: {type(error).__name__}: {text}", path=path) from None


def is_accelerate(settings: Settings) -> bool:
    """Whether ``accelerate config`` writes such names; TrainingArguments have an ``fsdp_config``, too."""
    return bool(_OF_ACCELERATE & settings.values.keys()) and not is_arguments(settings)


def is_arguments(settings: Settings) -> bool:
    """Whether these are arguments of the HF Trainer."""
    return len(_OF_ARGUMENTS & settings.values.keys()) >= 1
