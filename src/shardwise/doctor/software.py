"""Installed versions, and the variables by which launchers and libraries are told what to do. Imports no package."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata

__all__ = ["launch_variables", "requirements", "versions"]

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
