"""safetensors: ``load_file(device=…)`` of every file; each rank holds the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.loading.cases import Case

NAME = "safetensors load_file, whole"
WHOLE = False
SHARDS = False


def supports(case: Case) -> str | None:
    return "it does not know the simulated device" if case.device == "simgpu" else None


def prepare(case: Case) -> Callable[[], Any]:
    device = "cpu" if case.device == "cpu" else f"{case.device}:{torch.accelerator.current_device_index()}"

    def load() -> Any:
        return [load_file(file, device=device) for file in case.files]

    return load
