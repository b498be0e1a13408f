"""shardwise: ``load`` into the sharded model on meta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardwise as sw
from benchmarks.loading.cases import Case, sharded_model

NAME = "shardwise"
WHOLE = False


def supports(case: Case) -> str | None:
    return None


def prepare(case: Case) -> Callable[[], Any]:
    model = sharded_model(case)

    def load() -> Any:
        sw.load(model, case.directory)
        return model

    return load
