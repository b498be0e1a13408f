"""The copy floor: as many bytes as a rank's shards go from pinned host memory to its device. Reads no file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.loading.cases import Case

NAME = "host-to-device copy"
WHOLE = False
SHARDS = False

_CHUNK_BYTES = 32 * 2**20


def supports(case: Case) -> str | None:
    return None


def prepare(case: Case) -> Callable[[], Any]:
    nbytes = case.nbytes // case.ranks
    device = torch.device("cpu") if case.device == "cpu" else torch.accelerator.current_accelerator()
    host = torch.ones(min(_CHUNK_BYTES, nbytes), dtype=torch.uint8, pin_memory=case.device != "cpu")
    target = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def load() -> Any:
        for start in range(0, nbytes, _CHUNK_BYTES):
            part = target[start : start + _CHUNK_BYTES]
            part.copy_(host[: part.numel()], non_blocking=True)
        return {}

    return load
