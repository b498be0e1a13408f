"""Installed versions, and the variables by which launchers and libraries are told what to do. Imports no package."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from glob import escape, glob
from importlib import metadata, util
from typing import Any

__all__ = ["classes_of", "launch_variables", "requirements", "versions"]

_PACKAGES = (
    "accelerate",
    "bitsandbytes",
    "huggingface_hub",
    "numpy",
    "obstore",
    "peft",
    "safetensors",
    "shardwise",
    "torch",
    "torchao",
    "torchaudio",
    "torchvision",
    "transformers",
    "trl",
)
_PREFIXES = ("ACCELERATE_", "FSDP_", "NCCL_", "GLOO_", "TP_", "SLURM_", "TORCH_NCCL_", "TORCHELASTIC_")
_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMP_NUM_THREADS",
    "RANK",
    "WORLD_SIZE",
)


def versions() -> dict[str, str]:
    """The version of each package that matters here and is installed, and Python's."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def requirements() -> tuple[str, ...]:
    """What shardwise itself requires, without its extras; nothing if it runs from a tree that is not installed."""
    try:
        return tuple(text for text in metadata.requires("shardwise") or () if "extra ==" not in text)
    except metadata.PackageNotFoundError:
        return ()


def launch_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of the launch alone: the rest may hold credentials, and ``--json`` prints what was seen."""
    return {n: v for n, v in environment.items() if n in _NAMES or n.startswith(_PREFIXES)}


_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def classes_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The classes in transformers' code of a config's architectures: its own, and those of its parts. Imports none.

    Empty where any of them is not transformers' own: code that comes with the model, or a backbone of another library.
    """
    found = set[str]()
    parts = [one for name, one in config.items() if name.endswith("_config") and isinstance(one, Mapping)]
    for part in (config, *(part for part in parts if "model_type" in part)):
        folder = None if "auto_map" in part else _folder_of(part.get("model_type"))
        if folder is None:
            return ()
        for file in glob(os.path.join(escape(folder), "modeling_*.py")):
            with open(file, encoding="utf-8") as code:
                found.update(_CLASS.findall(code.read()))
    return tuple(sorted(found))


def _folder_of(model_type: object) -> str | None:
    """The folder of transformers whose configuration has this ``model_type``."""
    spec = util.find_spec("transformers")
    if not isinstance(model_type, str) or not re.fullmatch(r"\w[\w-]*", model_type) or spec is None:
        return None
    name, says = model_type.replace("-", "_"), f'model_type = "{model_type}"'
    while name:
        folder = os.path.join((spec.submodule_search_locations or [""])[0], "models", name)
        for file in glob(os.path.join(escape(folder), "configuration_*.py")):
            with open(file, encoding="utf-8") as code:
                if says in code.read():
                    return folder
        name = name.rpartition("_")[0]
    return None
