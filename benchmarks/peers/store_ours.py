"""shardwise from a store: ``load`` of the URL into the sharded model on meta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardwise as sw
from benchmarks.loading.cases import Case, sharded_model
from benchmarks.stores.served import MODEL

NAME = "shardwise"
WHOLE = False


def supports(case: Case) -> str | None:
    return None


def prepare(case: Case) -> Callable[[], Any]:
    model = sharded_model(case)

    def load() -> Any:
        sw.load(model, MODEL)
        return model

    return load
