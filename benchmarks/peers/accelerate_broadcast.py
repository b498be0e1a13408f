"""Accelerate: rank 0 reads all files, ``fsdp2_load_full_state_dict`` broadcasts and scatters each tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import fsdp2_load_full_state_dict

from benchmarks.loading.cases import Case, sharded_model
from benchmarks.peers import torch_broadcast

NAME = "Accelerate broadcast"
WHOLE = False


def supports(case: Case) -> str | None:
    return torch_broadcast.supports(case)


def prepare(case: Case) -> Callable[[], Any]:
    model = sharded_model(case)
    accelerator = Accelerator(cpu=True)

    def load() -> Any:
        return fsdp2_load_full_state_dict(accelerator, model, torch_broadcast.full_state_dict(case))

    return load
