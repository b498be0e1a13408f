"""torch's distributed checkpoint: ``HuggingFaceStorageReader`` into the sharded model's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from benchmarks.loading.cases import Case, sharded_model

NAME = "torch DCP"
WHOLE = False


def supports(case: Case) -> str | None:
    if case.device == "simgpu":
        return "the simulated device's backend has no gather"
    return "it converts nothing: experts are stored one by one" if case.model == "moe" else None


def prepare(case: Case) -> Callable[[], Any]:
    model = sharded_model(case)

    def load() -> Any:
        model.to_empty(device=case.device)
        # Each parameter once: its metadata has no second name for a tied one.
        state: dict[str, torch.Tensor] = dict(model.named_parameters())
        dcp.load(state, storage_reader=HuggingFaceStorageReader(case.directory))
        return model

    return load
