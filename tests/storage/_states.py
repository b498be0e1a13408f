"""States that ranks save and restore."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw


def trained(hub: str, seed: int) -> sw.TrainState:
    """A model and AdamW after one step, sharded over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sw.load_pretrained(f"{hub}/qwen3", mesh)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 101, (2, 8), generator=torch.Generator().manual_seed(seed))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return sw.TrainState(model=model, optimizer=optimizer)


def without_staging(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan as JSON without what its ranks stage: from a store they read each range once, and hand it on in buckets."""
    per_rank = [{k: v for k, v in rank.items() if k != "staging_bytes"} for rank in plan["per_rank"]]
    return {**plan, "per_rank": per_rank}
