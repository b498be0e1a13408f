"""safetensors' own prefetch (0.9 and later): ``safe_open(..., backend="pread").prefetch(plan)``, to CUDA devices alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import safetensors

from benchmarks.loading.cases import Case

NAME = "safetensors prefetch"
WHOLE = False


def supports(case: Case) -> str | None:
    if not hasattr(safetensors.safe_open, "prefetch"):
        return f"safetensors {safetensors.__version__} has none"
    if case.device == "cuda":
        return "never tried on a CUDA device, and not written"
    return "it fills memory of CUDA devices alone"


def prepare(case: Case) -> Callable[[], Any]:
    raise NotImplementedError(supports(case))
