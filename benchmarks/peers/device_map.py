"""transformers: ``from_pretrained(device_map={"": device})``; each rank holds the whole model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.loading.cases import Case

NAME = "transformers device_map, whole"
WHOLE = True
SHARDS = False


def supports(case: Case) -> str | None:
    if case.model == "linear":
        return "it is no model of transformers"
    return None if importlib.util.find_spec("accelerate") else "accelerate is not installed"


def prepare(case: Case) -> Callable[[], Any]:
    transformers.utils.logging.disable_progress_bar()
    device = "cpu" if case.device == "cpu" else f"{case.device}:{torch.accelerator.current_device_index()}"

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            case.directory, dtype="auto", device_map={"": device}, local_files_only=True
        )

    return load
