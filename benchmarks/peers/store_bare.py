"""The floor of a store: each rank fetches its share of all parts of all files, and keeps them. Makes no model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from benchmarks.loading.cases import Case, sharded_model
from benchmarks.stores.served import MODEL

NAME = "bare client"
WHOLE = False
SHARDS = False


def supports(case: Case) -> str | None:
    return None


def prepare(case: Case) -> Callable[[], dict[str, torch.Tensor]]:
    from shardwise.engine.objects import PART_BYTES, REQUESTS
    from shardwise.storage import fetch

    sizes = {file.name: file.stat().st_size for file in case.files}
    sharded_model(case)  # as the others do before the time

    def load() -> dict[str, torch.Tensor]:
        parts = [
            (name, at, min(at + PART_BYTES, size))
            for name, size in sizes.items()
            for at in range(0, size, PART_BYTES)
        ][dist.get_rank() :: dist.get_world_size()]
        held = {f"{name}:{at}": torch.empty(stop - at, dtype=torch.uint8) for name, at, stop in parts}

        def get(part: tuple[str, int, int]) -> None:
            name, at, _ = part
            fetch(f"{MODEL}/{name}", at, held[f"{name}:{at}"].numpy().data)

        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(get, parts))
        return held

    return load
