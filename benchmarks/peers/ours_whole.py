"""shardwise, from the path: ``load_pretrained`` builds, shards and fills the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from benchmarks.loading.cases import Case

NAME = "shardwise from path"
WHOLE = True


def supports(case: Case) -> str | None:
    if case.model == "linear":
        return "it is no model of transformers"
    return None if case.layout == "dim 0" else "it shards by FSDP2 along dim 0"


def prepare(case: Case) -> Callable[[], Any]:
    mesh = init_device_mesh(case.device, (case.ranks,))

    def load() -> Any:
        model = sw.load_pretrained(case.directory, mesh)
        return model

    return load
