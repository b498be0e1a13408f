"""torch: rank 0 reads all files, ``set_model_state_dict(broadcast_from_rank0=True)`` hands each rank its shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from benchmarks.loading.cases import Case, sharded_model

NAME = "torch broadcast"
WHOLE = False


def supports(case: Case) -> str | None:
    return {
        "moe": "it converts nothing: experts are stored one by one",
        "tied": "it asks for the second name of a tied tensor",
    }.get(case.model)


def prepare(case: Case) -> Callable[[], Any]:
    model = sharded_model(case)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def load() -> Any:
        set_model_state_dict(model, full_state_dict(case), options=options)
        return model

    return load


def full_state_dict(case: Case) -> dict[str, torch.Tensor]:
    """All stored tensors on rank 0, none on the other ranks."""
    files = case.files if dist.get_rank() == 0 else []
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
